//! The client: fetches shards from their owners, and sends requests to workers.
//!
//! Invariants:
//!
//! - The token of an owner is sent only to the address that it was trusted with, never to another one in a handle.
//! - A request that is sent again changes nothing when it is done twice, or was not sent at all.

mod connection;
mod fetch;
mod idle_connections;
mod incoming_response;
mod socket;
mod worker_client;

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;

use tundish_shm::{PerProcess, without_signals};

use self::connection::{Connection, ConnectionFailure};
use self::idle_connections::IdleConnections;
pub use self::worker_client::WorkerClient;
use super::json::ErrorAnswer;
use super::tls::ClientTls;
use super::token::Token;
use crate::error::StoreError;
use crate::shard_id::ShardId;
use crate::time_limit::TimeLimit;

/// What to look at if a connection breaks.
const STILL_THERE: &str = "does that process still run and serve?";

/// Characters of an owner's message that an error repeats.
const LONGEST_REASON: usize = 2000;

/// Fetches from owners. Used by any number of threads at once.
#[derive(Debug, Default)]
pub struct Client {
    idle_connections: IdleConnections,
    /// The trust in owners, by their addresses.
    trusted: Mutex<HashMap<Arc<str>, Trust>>,
    /// Whether memory of owners on this node is read where it lies.
    reads_memory: bool,
    /// Owners on this node whose memory cannot be reached.
    unreachable: Mutex<HashSet<Arc<str>>>,
}

/// How a client authenticates to an owner, and the owner to it.
#[derive(Clone, Debug, Default)]
pub struct Trust {
    /// The token that it is sent with every request.
    pub token: Option<Token>,
    /// The certificates by which it is known, where it serves over TLS.
    pub tls: Option<ClientTls>,
}

static OF_PROCESS: PerProcess<Client> = PerProcess::new(Client::new);

impl Client {
    /// A client that reads the memory of owners on this node where it lies, and receives from all others.
    pub fn new() -> Self {
        Client { reads_memory: true, ..Client::default() }
    }

    /// A client that receives the bytes over sockets from all owners.
    pub fn of_sockets() -> Self {
        Client::default()
    }

    /// The client of this process. A child made by `fork` has its own.
    pub fn of_process() -> &'static Client {
        OF_PROCESS.get()
    }

    /// From now on sends the token to `owner`, at exactly this address, and uses TLS if certificates are given.
    pub fn trust(&self, owner: &str, trust: Trust) {
        self.trusted.lock().unwrap_or_else(PoisonError::into_inner).insert(owner.into(), trust);
        // Connections that are kept may be of another kind.
        self.idle_connections.forget(owner);
    }

    fn trusted(&self, owner: &str) -> Trust {
        self.trusted.lock().unwrap_or_else(PoisonError::into_inner).get(owner).cloned().unwrap_or_default()
    }

    /// An idle connection, or a new one.
    fn take_or_open(&self, owner: &Arc<str>, time_limit: &mut TimeLimit<'_>) -> Result<Connection, ConnectionFailure> {
        if let Some(connection) = self.idle_connections.take(owner) {
            return Ok(connection);
        }
        self.idle_connections.tidy();
        let addresses = resolve(owner, time_limit)?;
        Connection::open(owner, &addresses, &self.trusted(owner), time_limit)
    }

    /// The error in a response.
    fn refusal(&self, owner: &Arc<str>, status: u16, body: &[u8]) -> StoreError {
        let refused: ErrorAnswer = serde_json::from_slice(body).unwrap_or_default();
        if let Some(step) = refused.ended_step {
            return StoreError::StepEnded { step };
        }
        if let Some(step) = refused.taken_step {
            return StoreError::StepTaken { step };
        }
        let shards = fetch::missing(&refused);
        if !shards.is_empty() {
            return StoreError::Missing { owner: Some(Arc::clone(owner)), shards };
        }
        let mut reason: String = refused.message.chars().take(LONGEST_REASON).collect();
        if status == 401 && self.trusted(owner).token.is_none() {
            reason += "; this process was not told to trust that address";
        }
        StoreError::Refused { owner: Arc::clone(owner), status, reason }
    }
}

impl ConnectionFailure {
    fn reason(&self) -> String {
        match self {
            ConnectionFailure::Broken(reason) => format!("{reason}; {STILL_THERE}"),
            ConnectionFailure::Silent => format!("its machine does not answer; {STILL_THERE}"),
            ConnectionFailure::Misfit(reason) => reason.clone(),
            ConnectionFailure::Final(error) => error.to_string(),
        }
    }

    /// The error of a request to `owner`, for shard `id` if it was for one.
    fn into_error(self, owner: &Arc<str>, id: Option<&ShardId>) -> StoreError {
        let reason = self.reason();
        match (self, id) {
            (ConnectionFailure::Final(StoreError::TimedOut { .. }), id) => {
                let shard = id.map_or_else(String::new, |id| format!(", shard {id}"));
                StoreError::TimedOut { what: format!("an answer of {owner}{shard}") }
            }
            (ConnectionFailure::Final(error), _) => error,
            (_, Some(id)) => StoreError::Unreachable { id: id.clone(), owner: Arc::clone(owner), reason },
            (_, None) => StoreError::Unanswered { owner: Arc::clone(owner), reason },
        }
    }
}

/// The addresses of an owner. A host name is looked up on another thread, since a look-up cannot be cancelled.
fn resolve(owner: &str, time_limit: &mut TimeLimit<'_>) -> Result<Vec<SocketAddr>, ConnectionFailure> {
    if let Ok(address) = owner.parse::<SocketAddr>() {
        return Ok(vec![address]);
    }
    let has_port = owner.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    if !has_port {
        let reason = format!("{owner:?} is no address; an owner's is host:port");
        return Err(ConnectionFailure::Final(StoreError::Invalid(reason)));
    }
    let (tell, told) = mpsc::channel();
    let name = owner.to_owned();
    let looking = || {
        let look_up = move || tell.send(look_up(&name));
        thread::Builder::new().name("tundish-resolve".to_owned()).spawn(look_up)
    };
    let or_not = |error: io::Error| ConnectionFailure::Broken(format!("its name is not found: {error}"));
    if without_signals(looking).is_err() {
        // The system has no thread left.
        return look_up(owner).map_err(or_not);
    }
    loop {
        match told.recv_timeout(time_limit.next_wait()) {
            Ok(found) => return found.map_err(or_not),
            Err(mpsc::RecvTimeoutError::Timeout) => time_limit.check()?,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(ConnectionFailure::Broken("its name is not found".to_owned()));
            }
        }
    }
}

fn look_up(name: &str) -> io::Result<Vec<SocketAddr>> {
    name.to_socket_addrs().map(Iterator::collect)
}

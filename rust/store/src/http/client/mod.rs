//! The client: fetching shards from their owners, and telling processes to drain.
//!
//! It owns the connections that wait for their next use. What always holds: the token of an owner is sent to the
//! address that this process was told with it, and to no other that a handle may name; what is tried again changes
//! nothing when it is done twice, or was not sent at all.

mod attempts;
mod connection;
mod fetch;
mod held;
mod pool;
mod request;
mod worker;

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use tundish_shm::{PerProcess, without_signals};

use self::attempts::Attempts;
use self::connection::{Connection, Trouble};
pub use self::held::Held;
use self::pool::Pool;
use self::request::{Request, read_small, unfit};
pub use self::worker::WorkerClient;
use super::head::Form;
use super::json::{self, Refused};
use super::shard_header::{Payload, ShardHeader};
use super::token::Token;
use crate::checksum::Checksum;
use crate::error::StoreError;
use crate::patience::Patience;
use crate::shard::ShardId;
use crate::stats::Removed;
use crate::{Epoch, Meta};

/// Characters of what an owner says that are repeated in an error.
const LONGEST_REASON: usize = 2000;

/// Fetches from owners and tells them what to do. Used by any number of threads at once.
#[derive(Debug, Default)]
pub struct Client {
    pool: Pool,
    /// Tokens, by the addresses that they are for.
    tokens: Mutex<HashMap<Arc<str>, Token>>,
    /// Whether memory of owners on this node is read where it lies.
    reads_memory: bool,
    /// Owners on this node whose memory cannot be reached.
    unreachable: Mutex<HashSet<Arc<str>>>,
}

static OF_PROCESS: PerProcess<Client> = PerProcess::new(Client::new);

impl Client {
    /// A client that reads the memory of owners on this node where it lies, and receives from all others.
    pub fn new() -> Self {
        Client { reads_memory: true, ..Client::default() }
    }

    /// A client that receives from all.
    pub fn of_sockets() -> Self {
        Client::default()
    }

    /// That of this process; a child made by `fork` has one of its own.
    pub fn of_process() -> &'static Client {
        OF_PROCESS.get()
    }

    /// From here on `token` is sent to `owner`, at exactly this address; no token where `None`.
    pub fn trust(&self, owner: &str, token: Option<Token>) {
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        match token {
            Some(token) => tokens.insert(owner.into(), token),
            None => tokens.remove(owner),
        };
    }

    /// Removes shards that `owner` stores, also from its own buffer.
    ///
    /// # Errors
    /// [`StoreError::Unreachable`] and [`StoreError::Refused`], and what patience says.
    pub fn remove(
        &self,
        owner: &Arc<str>,
        ids: &[ShardId],
        patience: &mut Patience<'_>,
    ) -> Result<Removed, StoreError> {
        #[derive(Deserialize)]
        struct Counts {
            cleared_count: u64,
            freed_bytes: u64,
        }
        let mut removed = Removed::default();
        for some in ids.chunks(json::MOST_IDS) {
            let body = json::ids_body(some.iter());
            let counts: Counts = self.ask(owner, &Request::new("DELETE", "/data/clear", &[&body]), patience)?;
            removed.cleared_count += counts.cleared_count;
            removed.num_tensors += counts.cleared_count;
            removed.total_bytes += counts.freed_bytes;
        }
        Ok(removed)
    }

    /// Removes what `owner` fetched of these shards, all of it where `None`; how many entries.
    ///
    /// # Errors
    /// As of [`remove`](Client::remove).
    pub fn clear_buffer(
        &self,
        owner: &Arc<str>,
        ids: Option<&[ShardId]>,
        patience: &mut Patience<'_>,
    ) -> Result<u64, StoreError> {
        #[derive(Deserialize)]
        struct Count {
            cleared_count: u64,
        }
        let mut clear = |body: &[u8]| {
            let count: Count = self.ask(owner, &Request::new("DELETE", "/buffer/clear", &[body]), patience)?;
            Ok(count.cleared_count)
        };
        match ids {
            Some(ids) => ids.chunks(json::MOST_IDS).map(|some| clear(&json::ids_body(some.iter()))).sum(),
            None => clear(br#"{"shard_ids":null}"#),
        }
    }

    /// What `owner` tells of itself: [`Stats`](crate::Stats), in JSON.
    ///
    /// # Errors
    /// As of [`remove`](Client::remove).
    pub fn stats(&self, owner: &Arc<str>, patience: &mut Patience<'_>) -> Result<String, StoreError> {
        let body = self.call(owner, &Request::new("GET", "/stats", &[]), patience)?;
        String::from_utf8(body).map_err(|_| unfit(owner, 200, "it is no text"))
    }

    /// Stores a shard of this name with `owner`.
    ///
    /// # Errors
    /// As of [`remove`](Client::remove); [`StoreError::Refused`] with status 409 where there is one, and with 507 where
    /// there is no room. It is not tried again once it was sent: it may have arrived.
    pub fn store(
        &self,
        owner: &Arc<str>,
        id: &ShardId,
        meta: &Meta,
        bytes: &[u8],
        patience: &mut Patience<'_>,
    ) -> Result<(), StoreError> {
        if bytes.len() as u64 != meta.nbytes() {
            let (has, found) = (meta.nbytes(), bytes.len());
            return Err(StoreError::Invalid(format!("a {meta:?} has {has} bytes, not {found}")));
        }
        let mut header = Vec::new();
        ShardHeader { meta: meta.clone(), payload: Payload::Bytes(Checksum::of(bytes)) }.write(&mut header);
        let path = format!("/data/{id}");
        let parts = [&header[..], bytes];
        let request = Request { content: Some(Form::Shards), ..Request::new("PUT", &path, &parts) };
        self.call(owner, &request, patience).map(drop)
    }

    /// A connection to `owner` that is held open for the claims that are made on it.
    pub fn hold(&self, owner: &Arc<str>) -> Held<'_> {
        Held::new(self, owner)
    }

    /// What an answer of JSON says.
    fn ask<T: DeserializeOwned>(
        &self,
        owner: &Arc<str>,
        request: &Request<'_>,
        patience: &mut Patience<'_>,
    ) -> Result<T, StoreError> {
        let body = self.call(owner, request, patience)?;
        serde_json::from_slice(&body).map_err(|error| unfit(owner, 200, &error.to_string()))
    }

    /// Sends a request until it is answered.
    fn call(
        &self,
        owner: &Arc<str>,
        request: &Request<'_>,
        patience: &mut Patience<'_>,
    ) -> Result<Vec<u8>, StoreError> {
        let mut attempts = Attempts::new();
        loop {
            let (mut connection, is_fresh) = match self.take_or_open(owner, patience) {
                Ok(taken) => taken,
                Err(trouble) => {
                    self.once_more(owner, None, trouble, &mut attempts, patience)?;
                    continue;
                }
            };
            match self.exchange(&mut connection, owner, request, patience) {
                Ok(body) => {
                    self.pool.give_back(owner, connection);
                    return Ok(body);
                }
                // One that waited may have been closed by the owner at the moment of its use.
                Err(trouble) if request.method == "GET" || (!is_fresh && request.method != "PUT") => {
                    self.once_more(owner, None, trouble, &mut attempts, patience)?;
                }
                Err(trouble) => return Err(trouble.into_error(owner, None)),
            }
        }
    }

    /// Sends a request on this connection and reads the answer.
    fn exchange(
        &self,
        connection: &mut Connection,
        owner: &Arc<str>,
        request: &Request<'_>,
        patience: &mut Patience<'_>,
    ) -> Result<Vec<u8>, Trouble> {
        let unsent = match request.send(connection, owner, self.token(owner).as_ref(), patience) {
            Err(trouble @ Trouble::Final(_)) => return Err(trouble),
            sent => sent.err(),
        };
        // Who refuses a body says so before it has come, and closes: that answer is to be read.
        let head = connection.head(patience).map_err(|unanswered| unsent.unwrap_or(unanswered))?;
        let body = read_small(connection, &head, request, owner, patience)?;
        if head.status >= 300 {
            return Err(Trouble::Final(self.refusal(owner, head.status, &body)));
        }
        Ok(body)
    }

    fn token(&self, owner: &str) -> Option<Token> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner).get(owner).cloned()
    }

    /// A connection, and whether it is a new one.
    fn take_or_open(&self, owner: &Arc<str>, patience: &mut Patience<'_>) -> Result<(Connection, bool), Trouble> {
        if let Some(connection) = self.pool.take(owner) {
            return Ok((connection, false));
        }
        self.pool.tidy();
        let addresses = resolve(owner, patience)?;
        Ok((Connection::open(&addresses, patience)?, true))
    }

    /// Waits before the next try, where there is one.
    fn once_more(
        &self,
        owner: &Arc<str>,
        id: Option<&ShardId>,
        trouble: Trouble,
        attempts: &mut Attempts,
        patience: &mut Patience<'_>,
    ) -> Result<(), StoreError> {
        // Those that wait lead to the same process.
        self.pool.forget(owner);
        let reason = match trouble {
            Trouble::Broken(reason) => reason,
            other => return Err(other.into_error(owner, id)),
        };
        let may_try = attempts.wait(patience).map_err(|trouble| trouble.into_error(owner, id))?;
        if may_try { Ok(()) } else { Err(Trouble::Broken(reason).into_error(owner, id)) }
    }

    /// The error that an answer means.
    fn refusal(&self, owner: &Arc<str>, status: u16, body: &[u8]) -> StoreError {
        let refused: Refused = serde_json::from_slice(body).unwrap_or_default();
        if let Some(epoch) = refused.ended_epoch {
            return StoreError::StepEnded { epoch };
        }
        if let Some(epoch) = refused.taken_epoch {
            return StoreError::StepTaken { epoch };
        }
        let shards = fetch::missing(&refused);
        if !shards.is_empty() {
            return StoreError::Missing { owner: Some(Arc::clone(owner)), shards };
        }
        let mut reason: String = refused.message.chars().take(LONGEST_REASON).collect();
        if status == 401 && self.token(owner).is_none() {
            reason += "; this process was not told to trust that address";
        }
        StoreError::Refused { owner: Arc::clone(owner), status, reason }
    }
}

impl Trouble {
    fn reason(&self) -> String {
        match self {
            Trouble::Broken(reason) => reason.clone(),
            Trouble::Silent => "its machine does not answer".to_owned(),
            Trouble::Final(error) => error.to_string(),
        }
    }

    /// What the caller is told, who asked `owner` for a shard, if for one.
    fn into_error(self, owner: &Arc<str>, id: Option<&ShardId>) -> StoreError {
        let reason = self.reason();
        match (self, id) {
            (Trouble::Final(StoreError::TimedOut { .. }), id) => {
                let shard = id.map_or_else(String::new, |id| format!(", shard {id}"));
                StoreError::TimedOut { what: format!("an answer of {owner}{shard}") }
            }
            (Trouble::Final(error), _) => error,
            (_, Some(id)) => StoreError::Unreachable { id: id.clone(), owner: Arc::clone(owner), reason },
            (_, None) => StoreError::Unanswered { owner: Arc::clone(owner), reason },
        }
    }
}

/// The addresses of an owner. A name is looked up by another thread, for nothing calls that off.
fn resolve(owner: &str, patience: &mut Patience<'_>) -> Result<Vec<SocketAddr>, Trouble> {
    if let Ok(address) = owner.parse::<SocketAddr>() {
        return Ok(vec![address]);
    }
    let has_port = owner.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    if !has_port {
        let reason = format!("{owner:?} is no address; an owner's is host:port");
        return Err(Trouble::Final(StoreError::Invalid(reason)));
    }
    let (tell, told) = mpsc::channel();
    let name = owner.to_owned();
    let looking = || {
        let look_up = move || tell.send(look_up(&name));
        thread::Builder::new().name("tundish-resolve".to_owned()).spawn(look_up)
    };
    let or_not = |error: io::Error| Trouble::Broken(format!("its name is not found: {error}"));
    if without_signals(looking).is_err() {
        // The system has no thread left.
        return look_up(owner).map_err(or_not);
    }
    loop {
        match told.recv_timeout(patience.turn()) {
            Ok(found) => return found.map_err(or_not),
            Err(mpsc::RecvTimeoutError::Timeout) => connection::look(patience)?,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(Trouble::Broken("its name is not found".to_owned()));
            }
        }
    }
}

fn look_up(name: &str) -> io::Result<Vec<SocketAddr>> {
    name.to_socket_addrs().map(Iterator::collect)
}

/// The path of what is done to a step.
fn epoch_path(epoch: Epoch, what: &str) -> String {
    format!("/epoch/{epoch}/{what}")
}

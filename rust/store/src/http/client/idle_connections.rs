//! Connections that are kept open for the next request to the same owner.
//!
//! Invariants: one request at a time uses a connection, and gives it back only when its response was read to the end.
//! Before a connection is opened, those that the other side has closed are dropped.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::connection::Connection;

/// Connections to one owner that are kept.
const MAX_PER_OWNER: usize = 8;

/// Connections that are kept: each takes a descriptor, and many systems allow a process 1024.
const MOST: usize = 256;

/// A connection that waited longer was closed by some router on the way, or is about to be.
const LONGEST: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct IdleConnections(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    waiting: HashMap<Arc<str>, Vec<IdleConnection>>,
    count: usize,
}

#[derive(Debug)]
struct IdleConnection {
    connection: Connection,
    since: Instant,
}

impl IdleConnection {
    fn can_be_used(&mut self) -> bool {
        self.since.elapsed() < LONGEST && self.connection.is_idle()
    }
}

impl IdleConnections {
    /// The connection to this owner that was used last, if one waits and lives.
    pub(super) fn take(&self, owner: &str) -> Option<Connection> {
        loop {
            let mut waiting = self.lock().pop(owner)?;
            if waiting.can_be_used() {
                return Some(waiting.connection);
            }
        }
    }

    /// Drops connections that the other sides have closed, or that waited too long. Called before one is opened.
    pub(super) fn tidy(&self) {
        let mut state = self.lock();
        state.waiting.retain(|_, of_owner| {
            of_owner.retain_mut(IdleConnection::can_be_used);
            !of_owner.is_empty()
        });
        state.count = state.waiting.values().map(Vec::len).sum();
    }

    pub(super) fn give_back(&self, owner: &Arc<str>, mut connection: Connection) {
        if !connection.is_idle() {
            return;
        }
        let mut state = self.lock();
        let is_full = state.count >= MOST;
        let of_owner = state.waiting.entry(Arc::clone(owner)).or_default();
        if of_owner.len() < MAX_PER_OWNER && !is_full {
            of_owner.push(IdleConnection { connection, since: Instant::now() });
            state.count += 1;
        }
    }

    /// Lets go of all connections to an owner.
    pub(super) fn forget(&self, owner: &str) {
        let mut state = self.lock();
        let forgotten = state.waiting.remove(owner);
        state.count -= forgotten.as_ref().map_or(0, Vec::len);
        drop(state);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn pop(&mut self, owner: &str) -> Option<IdleConnection> {
        let of_owner = self.waiting.get_mut(owner)?;
        let waiting = of_owner.pop();
        if of_owner.is_empty() {
            self.waiting.remove(owner);
        }
        self.count -= usize::from(waiting.is_some());
        waiting
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::{Duration, Instant};

    use crate::http::client::connection::json_request;
    use crate::http::client::connection::{Connection, ConnectionFailure};
    use crate::http::client::{Client, Trust};
    use crate::http::server::{Server, ServerOptions};
    use crate::stats::Limits;
    use crate::tensor_store::TensorStore;
    use crate::time_limit::TimeLimit;

    fn ask(client: &Client, server: &Server) {
        let mut check_cancelled = || Ok(());
        let time_limit = &mut TimeLimit::new(Instant::now() + Duration::from_secs(20), &mut check_cancelled);
        let owner = server.address().to_string().into();
        let mut connection = client.take_or_open(&owner, time_limit).unwrap();
        let request = json_request(&owner, None, "GET", "/health", Vec::new()).unwrap();
        connection.send(request, time_limit).unwrap().collect(time_limit).unwrap();
        client.idle_connections.give_back(&owner, connection);
    }

    fn serve() -> Server {
        let store = TensorStore::new(Limits { storage_bytes: 1 << 20, buffer_bytes: 1 << 20 });
        Server::start(store, "127.0.0.1", 0, ServerOptions::default()).unwrap()
    }

    #[test]
    fn owners_that_come_and_go_leave_no_connections_behind() {
        let (client, living) = (Client::of_sockets(), serve());
        ask(&client, &living);
        for _ in 0..5 {
            let server = serve();
            ask(&client, &server);
            assert_eq!(client.idle_connections.lock().count, 2, "of the one that lives, and of this one");
            drop(server);
        }
        assert!(client.idle_connections.take(&living.address().to_string()).is_some(), "those that can be used stay");
    }

    #[test]
    fn where_one_address_of_a_name_refuses_the_next_one_is_asked() {
        let living = serve();
        let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut check_cancelled = || Ok(());
        let time_limit = &mut TimeLimit::new(Instant::now() + Duration::from_secs(20), &mut check_cancelled);
        assert!(Connection::open("a:1", &[dead, living.address()], &Trust::default(), time_limit).unwrap().is_idle());
        assert!(matches!(
            Connection::open("a:1", &[dead], &Trust::default(), time_limit),
            Err(ConnectionFailure::Broken(_))
        ));
    }
}

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
#[path = "idle_connections_tests.rs"]
mod tests;

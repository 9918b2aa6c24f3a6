//! The connections of a server, so that there are never too many of them.
//!
//! What always holds:
//!
//! 1. There are at most `most`. Where there is one more, the one goes that has waited longest for a request; where none
//!    does, the one whose other side has sent or taken next to nothing for the longest time, if that is longer than who
//!    keeps up takes. A client that keeps such a connection finds it closed and opens another.
//! 2. Those that hold claims do not go, and are at most a part of all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::net::{Shutdown, shutdown};
use rustix::process::{Resource, getrlimit};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::http::descriptors::Socket;

/// Connections, and no more than a quarter of the descriptors that the process may have.
const MOST: u64 = 4096;

/// One of so many may hold claims: controllers are few.
const HOLDING: usize = 4;

/// Between two looks at whether a place has become free.
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);

pub(super) struct Table {
    most: usize,
    /// Who moves nothing for so long may be sent away.
    crowded: Duration,
    state: Mutex<State>,
    freed: Notify,
}

#[derive(Default)]
struct State {
    last: u64,
    entries: HashMap<u64, Entry>,
    holding: usize,
}

struct Entry {
    stream: Weak<Socket<TcpStream>>,
    standing: Standing,
    holds_claims: bool,
}

/// Whom a connection waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// For the next request, since then.
    Idle(Instant),
    /// For the other side to send or to take more, since it last did.
    Halting(Instant),
    /// For this process; or it was sent away.
    Busy,
}

/// The place of one connection.
pub(super) struct Seat {
    number: u64,
    table: Arc<Table>,
}

impl Table {
    pub(super) fn new(crowded: Duration) -> Self {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let most = usize::try_from(MOST.min(descriptors / 4)).unwrap_or(usize::MAX).max(16);
        Table { most, crowded, state: Mutex::default(), freed: Notify::new() }
    }

    /// Waits until there is a place.
    pub(super) async fn seat(self: &Arc<Self>, stream: &Arc<Socket<TcpStream>>) -> Seat {
        loop {
            {
                let mut state = self.lock();
                if state.entries.len() < self.most {
                    state.last += 1;
                    let number = state.last;
                    let stream = Arc::downgrade(stream);
                    let entry = Entry { stream, standing: Standing::Busy, holds_claims: false };
                    state.entries.insert(number, entry);
                    return Seat { number, table: Arc::clone(self) };
                }
            }
            self.close_one();
            let _ = timeout(BETWEEN_LOOKS, self.freed.notified()).await;
        }
    }

    /// Closes the connection that is missed least, if there is one.
    pub(super) fn close_one(&self) {
        let mut state = self.lock();
        let missed = |entry: &&mut Entry| match entry.standing {
            Standing::Idle(since) => Some((false, since)),
            Standing::Halting(since) if since.elapsed() > self.crowded => Some((true, since)),
            Standing::Halting(_) | Standing::Busy => None,
        };
        let can_go = state.entries.values_mut().filter(|entry| !entry.holds_claims && missed(entry).is_some());
        if let Some(least) = can_go.min_by_key(missed) {
            least.standing = Standing::Busy;
            if let Some(stream) = least.stream.upgrade() {
                // Who waits on it finds its end.
                let _ = shutdown(&**stream, Shutdown::Both);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seat {
    /// From here on it waits for a request.
    pub(super) fn set_idle(&self) {
        self.set(Standing::Idle(Instant::now()));
    }

    /// From here on it waits for the other side to send or to take something; or something was sent or taken.
    pub(super) fn set_halting(&self) {
        self.set(Standing::Halting(Instant::now()));
    }

    /// From here on it waits for this process.
    pub(super) fn set_busy(&self) {
        self.set(Standing::Busy);
    }

    /// From here on it holds claims; `false` where too many do.
    pub(super) fn hold(&self) -> bool {
        let mut state = self.table.lock();
        let may_hold = state.holding < self.table.most / HOLDING;
        match state.entries.get_mut(&self.number) {
            Some(entry) if entry.holds_claims => true,
            Some(entry) if may_hold => {
                entry.holds_claims = true;
                state.holding += 1;
                true
            }
            _ => false,
        }
    }

    fn set(&self, standing: Standing) {
        if let Some(entry) = self.table.lock().entries.get_mut(&self.number) {
            entry.standing = standing;
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut state = self.table.lock();
        let entry = state.entries.remove(&self.number);
        state.holding -= usize::from(entry.is_some_and(|entry| entry.holds_claims));
        drop(state);
        self.table.freed.notify_one();
    }
}

#[cfg(test)]
mod tests;

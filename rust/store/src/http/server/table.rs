//! The connections of a server, so that there are never too many of them.
//!
//! What always holds: there are at most `most`; where there is one more, the one that has waited longest for a request
//! goes, if it holds no claims. A client that keeps such a connection finds it closed and opens another.

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

/// Between two looks at whether a place has become free.
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);

pub(super) struct Table {
    most: usize,
    state: Mutex<State>,
    freed: Notify,
}

#[derive(Default)]
struct State {
    last: u64,
    entries: HashMap<u64, Entry>,
}

struct Entry {
    stream: Weak<Socket<TcpStream>>,
    /// Since when it waits for a request; `None` of one that does not, or that may not be closed.
    idle_since: Option<Instant>,
}

/// The place of one connection.
pub(super) struct Seat {
    number: u64,
    table: Arc<Table>,
}

impl Table {
    pub(super) fn new() -> Self {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let most = usize::try_from(MOST.min(descriptors / 4)).unwrap_or(usize::MAX).max(16);
        Table { most, state: Mutex::default(), freed: Notify::new() }
    }

    /// Waits until there is a place.
    pub(super) async fn seat(self: &Arc<Self>, stream: &Arc<Socket<TcpStream>>) -> Seat {
        loop {
            {
                let mut state = self.lock();
                if state.entries.len() < self.most {
                    state.last += 1;
                    let number = state.last;
                    state.entries.insert(number, Entry { stream: Arc::downgrade(stream), idle_since: None });
                    return Seat { number, table: Arc::clone(self) };
                }
            }
            self.close_idle();
            let _ = timeout(BETWEEN_LOOKS, self.freed.notified()).await;
        }
    }

    /// Closes the connection that has waited longest, if one waits.
    pub(super) fn close_idle(&self) {
        let mut state = self.lock();
        let waiting = state.entries.values_mut().filter(|entry| entry.idle_since.is_some());
        if let Some(longest) = waiting.min_by_key(|entry| entry.idle_since) {
            longest.idle_since = None;
            if let Some(stream) = longest.stream.upgrade() {
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
    /// From here on it waits for a request, or does not.
    pub(super) fn set_idle(&self, is_idle: bool) {
        if let Some(entry) = self.table.lock().entries.get_mut(&self.number) {
            entry.idle_since = is_idle.then(Instant::now);
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.table.lock().entries.remove(&self.number);
        self.table.freed.notify_one();
    }
}

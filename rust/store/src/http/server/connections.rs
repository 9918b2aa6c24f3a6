//! The open connections of a server: how many there may be, and which one is closed when there is one too many.
//!
//! Invariants:
//!
//! 1. At most `limit` connections are open. To admit another one, the server closes the connection that has waited
//!    longest for its next request. If none waits, it closes the one whose client has sent or taken next to nothing
//!    for longest, if that is longer than `crowded`. A client whose kept connection was closed opens another.
//! 2. Connections that hold claims are not closed this way.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{Shutdown, shutdown};
use rustix::process::{Resource, getrlimit};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::Timeouts;
use crate::http::fork_safe_sockets::Socket;

/// Connections of a server, and no more than a quarter of the descriptors that the process may open.
const LIMIT: u64 = 4096;

/// How often a connection that waits to be admitted looks for a place.
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);

/// A client that sends or takes fewer bytes than these counts as silent.
const PROGRESS: usize = 64 << 10;

/// All open connections.
pub(super) struct Connections {
    limit: usize,
    timeouts: Timeouts,
    state: Mutex<State>,
    freed: Notify,
}

#[derive(Default)]
struct State {
    next_id: u64,
    open: HashMap<u64, Arc<Connection>>,
}

/// One connection.
pub(super) struct Connection {
    id: u64,
    pub(super) stream: Socket<TcpStream>,
    progress: Mutex<Progress>,
}

struct Progress {
    waits: WaitsFor,
    since: Instant,
    /// Bytes that were sent and received since then.
    moved: usize,
    /// Whether a response was handed over for sending, and not all of it is sent.
    is_answered: bool,
    holds_claims: bool,
}

/// The event that a connection waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitsFor {
    /// For the client's next request.
    Request,
    /// For the client to send more of a request, or to take more of a response.
    Client,
    /// For nothing: it was closed.
    End,
}

/// A connection among the open ones; dropped, it is none of them any more.
pub(super) struct Admitted {
    connections: Arc<Connections>,
    pub(super) connection: Arc<Connection>,
}

impl Connections {
    pub(super) fn new(timeouts: Timeouts) -> Self {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let limit = usize::try_from(LIMIT.min(descriptors / 4)).unwrap_or(usize::MAX).max(16);
        Connections { limit, timeouts, state: Mutex::default(), freed: Notify::new() }
    }

    /// Waits until there is a place for this connection.
    pub(super) async fn admit(self: &Arc<Self>, stream: Socket<TcpStream>) -> Admitted {
        loop {
            {
                let mut state = self.lock();
                if state.open.len() < self.limit {
                    let id = state.next_id;
                    state.next_id += 1;
                    let (waits, since) = (WaitsFor::Request, Instant::now());
                    let progress = Progress { waits, since, moved: 0, is_answered: false, holds_claims: false };
                    let connection = Arc::new(Connection { id, stream, progress: Mutex::new(progress) });
                    state.open.insert(id, Arc::clone(&connection));
                    return Admitted { connections: Arc::clone(self), connection };
                }
            }
            self.close_one();
            let _ = timeout(BETWEEN_LOOKS, self.freed.notified()).await;
        }
    }

    /// Closes the idle or stalled connection whose loss matters least, if there is any.
    pub(super) fn close_one(&self) {
        let state = self.lock();
        let missed = |connection: &&Arc<Connection>| {
            let progress = connection.lock();
            match progress.waits {
                _ if progress.holds_claims => None,
                WaitsFor::Request => Some((false, progress.since)),
                WaitsFor::Client => {
                    (progress.since.elapsed() > self.timeouts.crowded).then_some((true, progress.since))
                }
                WaitsFor::End => None,
            }
        };
        let may_go = state.open.values().filter_map(|connection| Some((missed(&connection)?, connection)));
        if let Some((_, connection)) = may_go.min_by_key(|(missed, _)| *missed) {
            connection.set(WaitsFor::End);
            // The task that serves it finds the end of the stream.
            let _ = shutdown(&*connection.stream, Shutdown::Both);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut state = self.connections.lock();
        state.open.remove(&self.connection.id);
        drop(state);
        self.connections.freed.notify_one();
    }
}

impl Connection {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets what it waits for from now on.
    pub(super) fn set(&self, waits: WaitsFor) {
        self.lock().set(waits);
    }

    /// From now on the connection holds claims.
    pub(super) fn hold_claims(&self) {
        self.lock().holds_claims = true;
    }

    /// Notes bytes that were sent or received.
    pub(super) fn add_progress(&self, bytes: usize) {
        let mut progress = self.lock();
        progress.moved += bytes;
        if progress.waits == WaitsFor::Request || progress.moved >= PROGRESS {
            progress.set(WaitsFor::Client);
        }
    }

    /// Notes that the whole response was handed over for sending.
    pub(super) fn note_answered(&self) {
        self.lock().is_answered = true;
    }

    /// Notes that everything that was handed over is sent.
    pub(super) fn note_flushed(&self) {
        let mut progress = self.lock();
        if std::mem::take(&mut progress.is_answered) {
            progress.set(WaitsFor::Request);
        }
    }

    /// When the client loses the connection unless it does something.
    pub(super) fn deadline(&self, timeouts: &Timeouts) -> Option<Instant> {
        let progress = self.lock();
        match progress.waits {
            // The kernel looks whether the other side of a connection that is held open on purpose is there.
            WaitsFor::Request => (!progress.holds_claims).then(|| progress.since + timeouts.idle),
            WaitsFor::Client => Some(progress.since + timeouts.silence),
            WaitsFor::End => None,
        }
    }
}

impl Progress {
    fn set(&mut self, waits: WaitsFor) {
        (self.waits, self.since, self.moved) = (waits, Instant::now(), 0);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use tokio::runtime::{Builder, Runtime};

    use super::*;

    struct World {
        runtime: Runtime,
        connections: Arc<Connections>,
        listener: TcpListener,
    }

    impl World {
        fn new(limit: usize, crowded: Duration) -> Self {
            let runtime = Builder::new_current_thread().enable_all().build().unwrap();
            let timeouts = Timeouts { crowded, ..Timeouts::default() };
            let connections = Connections { limit, timeouts, state: Mutex::default(), freed: Notify::new() };
            World { runtime, connections: Arc::new(connections), listener: TcpListener::bind("127.0.0.1:0").unwrap() }
        }

        /// A connection, and its client.
        fn connect(&self) -> (Admitted, std::net::TcpStream) {
            let client = std::net::TcpStream::connect(self.listener.local_addr().unwrap()).unwrap();
            client.set_nonblocking(true).unwrap();
            let (stream, _) = self.listener.accept().unwrap();
            stream.set_nonblocking(true).unwrap();
            let admitted = self
                .runtime
                .block_on(async { self.connections.admit(Socket::new(TcpStream::from_std(stream).unwrap())).await });
            (admitted, client)
        }

        /// Which of these is closed for another one, if any is.
        fn closes(&self, open: &mut [(Admitted, std::net::TcpStream)]) -> Option<usize> {
            self.connections.close_one();
            open.iter_mut().position(|(_, client)| matches!(client.read(&mut [0]), Ok(0)))
        }
    }

    #[test]
    fn idle_connections_are_closed_first_then_silent_ones_and_none_that_hold_claims() {
        for crowded in [Duration::ZERO, Duration::from_secs(600)] {
            let world = World::new(8, crowded);
            let mut open: Vec<_> = (0..6).map(|_| world.connect()).collect();
            for (admitted, _) in &open[..5] {
                admitted.connection.set(WaitsFor::Client);
            }
            open[0].0.connection.hold_claims();
            open[4].0.connection.hold_claims();
            // One that has just moved something has been silent for the shortest time.
            std::thread::sleep(Duration::from_millis(2));
            open[1].0.connection.add_progress(PROGRESS);
            assert_eq!(world.closes(&mut open), Some(5));
            open.remove(5);
            for closes in [Some(2), Some(2), Some(1), None] {
                let closes = closes.filter(|_| crowded.is_zero());
                std::thread::sleep(Duration::from_millis(2));
                assert_eq!(world.closes(&mut open), closes, "{crowded:?}");
                closes.map(|one| open.remove(one));
            }
        }
    }
}

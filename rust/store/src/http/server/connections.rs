//! The open connections of a server: how many there may be, and which one is closed when there is one too many.
//!
//! Invariants:
//!
//! 1. At most `limit` connections are open. To admit another one, the server closes the connection that has waited
//!    longest for its next request; if none does, the one whose client has sent or taken next to nothing for longest,
//!    if that is longer than `crowded`. A client whose kept connection was closed opens another.
//! 2. Connections that hold claims are not closed this way, and are at most a quarter of all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::{Shutdown, shutdown};
use rustix::process::{Resource, getrlimit};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::timeouts::Timeouts;
use crate::http::sockets::Socket;

/// Connections of a server, and no more than a quarter of the descriptors that the process may open.
const LIMIT: u64 = 4096;

/// One connection in so many may hold claims: controllers are few.
const HOLDING: usize = 4;

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
    /// How many hold claims.
    holding: usize,
}

/// One connection.
pub(super) struct Connection {
    id: u64,
    pub(super) stream: Socket<TcpStream>,
    progress: Mutex<Progress>,
}

struct Progress {
    waits: WaitsFor,
    /// Bytes that were sent and received since `waits` last changed.
    moved: usize,
    /// Whether a response was handed over for sending, and not all of it is sent.
    is_answered: bool,
    holds_claims: bool,
}

/// What a connection waits for, and since when.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitsFor {
    /// For the client's next request.
    Request(Instant),
    /// For the rest of a request's head.
    Head(Instant),
    /// For the client to send more of a body.
    Body(Instant),
    /// For the client to take more of a response.
    Reader(Instant),
    /// For this process; or the connection was closed.
    Server,
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

    /// WaitsFor until there is a place for this connection.
    pub(super) async fn admit(self: &Arc<Self>, stream: Socket<TcpStream>) -> Admitted {
        loop {
            {
                let mut state = self.lock();
                if state.open.len() < self.limit {
                    let (id, waits) = (state.next_id, WaitsFor::Request(Instant::now()));
                    state.next_id += 1;
                    let progress = Progress { waits, moved: 0, is_answered: false, holds_claims: false };
                    let connection = Arc::new(Connection { id, stream, progress: Mutex::new(progress) });
                    state.open.insert(id, Arc::clone(&connection));
                    return Admitted { connections: Arc::clone(self), connection };
                }
            }
            self.close_one();
            let _ = timeout(BETWEEN_LOOKS, self.freed.notified()).await;
        }
    }

    /// Closes the connection that is missed least, if there is one.
    pub(super) fn close_one(&self) {
        let state = self.lock();
        let missed = |connection: &&Arc<Connection>| {
            let progress = connection.lock();
            match progress.waits {
                _ if progress.holds_claims => None,
                WaitsFor::Request(since) => Some((false, since)),
                WaitsFor::Head(since) | WaitsFor::Body(since) | WaitsFor::Reader(since) => {
                    (since.elapsed() > self.timeouts.crowded).then_some((true, since))
                }
                WaitsFor::Server => None,
            }
        };
        let may_go = state.open.values().filter_map(|connection| Some((missed(&connection)?, connection)));
        if let Some((_, connection)) = may_go.min_by_key(|(missed, _)| *missed) {
            connection.set(WaitsFor::Server);
            // The task that serves it finds the end of the stream.
            let _ = shutdown(&*connection.stream, Shutdown::Both);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Admitted {
    /// From here on the connection holds claims; `false` where too many connections do.
    pub(super) fn hold_claims(&self) -> bool {
        let mut state = self.connections.lock();
        let mut progress = self.connection.lock();
        if !progress.holds_claims && state.holding < self.connections.limit / HOLDING {
            progress.holds_claims = true;
            state.holding += 1;
        }
        progress.holds_claims
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut state = self.connections.lock();
        state.open.remove(&self.connection.id);
        state.holding -= usize::from(self.connection.lock().holds_claims);
        drop(state);
        self.connections.freed.notify_one();
    }
}

impl Connection {
    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it waits for from here on.
    pub(super) fn set(&self, waits: WaitsFor) {
        let mut progress = self.lock();
        (progress.waits, progress.moved) = (waits, 0);
    }

    /// So many bytes were received. The first ones of a request begin its head.
    pub(super) fn has_received(&self, bytes: usize) {
        let mut progress = self.lock();
        match progress.waits {
            WaitsFor::Request(_) => progress.waits = WaitsFor::Head(Instant::now()),
            WaitsFor::Body(_) => progress.move_by(bytes, WaitsFor::Body),
            // A body of which the client was told to send it.
            WaitsFor::Reader(_) => progress.move_by(bytes, WaitsFor::Reader),
            WaitsFor::Head(_) | WaitsFor::Server => {}
        }
    }

    /// Something is about to be sent.
    pub(super) fn sends(&self) {
        let mut progress = self.lock();
        if !matches!(progress.waits, WaitsFor::Reader(_)) {
            (progress.waits, progress.moved) = (WaitsFor::Reader(Instant::now()), 0);
        }
    }

    /// So many bytes were sent.
    pub(super) fn has_sent(&self, bytes: usize) {
        self.lock().move_by(bytes, WaitsFor::Reader);
    }

    /// The whole response was handed over for sending.
    pub(super) fn has_answered(&self) {
        self.lock().is_answered = true;
    }

    /// Everything that was handed over is sent.
    pub(super) fn has_flushed(&self) {
        let mut progress = self.lock();
        if std::mem::take(&mut progress.is_answered) {
            (progress.waits, progress.moved) = (WaitsFor::Request(Instant::now()), 0);
        }
    }

    /// When the client loses the connection unless it does something; of a body the handler of the request decides.
    pub(super) fn deadline(&self, timeouts: &Timeouts) -> Option<Instant> {
        let progress = self.lock();
        match progress.waits {
            // The kernel looks whether the other side of a connection that is held open on purpose is there.
            WaitsFor::Request(since) => (!progress.holds_claims).then(|| since + timeouts.idle),
            WaitsFor::Head(since) => Some(since + timeouts.head),
            WaitsFor::Reader(since) => Some(since + timeouts.silence),
            WaitsFor::Body(_) | WaitsFor::Server => None,
        }
    }

    /// When the client last sent a part of the body, if one is waited for.
    pub(super) fn last_of_body(&self) -> Instant {
        match self.lock().waits {
            WaitsFor::Body(since) | WaitsFor::Reader(since) => since,
            _ => Instant::now(),
        }
    }
}

impl Progress {
    fn move_by(&mut self, bytes: usize, waits: fn(Instant) -> WaitsFor) {
        self.moved += bytes;
        if self.moved >= PROGRESS {
            (self.waits, self.moved) = (waits(Instant::now()), 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpListener;

    use tokio::runtime::{Builder, Runtime};

    use super::*;
    use crate::http::sockets::NoFork;

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
            let no_fork = NoFork::begin().unwrap();
            let (stream, _) = self.listener.accept().unwrap();
            stream.set_nonblocking(true).unwrap();
            let admitted = self
                .runtime
                .block_on(async { self.connections.admit(no_fork.keep(TcpStream::from_std(stream).unwrap())).await });
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
            for (admitted, _) in &open[..4] {
                admitted.connection.set(WaitsFor::Reader(Instant::now()));
            }
            open[4].0.connection.set(WaitsFor::Server);
            assert!(open[0].0.hold_claims());
            // One that has just moved something has been silent for the shortest time.
            std::thread::sleep(Duration::from_millis(2));
            open[1].0.connection.has_sent(PROGRESS);
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

    #[test]
    fn a_quarter_of_the_connections_may_hold_claims() {
        let world = World::new(8, Duration::from_secs(600));
        let mut open: Vec<_> = (0..3).map(|_| world.connect()).collect();
        let may_hold = |open: &[(Admitted, _)]| open.iter().map(|(one, _)| one.hold_claims()).collect::<Vec<_>>();
        assert_eq!(may_hold(&open), [true, true, false]);
        assert_eq!(may_hold(&open), [true, true, false], "again, they hold no more");
        open.remove(0);
        assert_eq!(may_hold(&open), [true, true]);
    }
}

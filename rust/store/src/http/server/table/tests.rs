use std::io::Read;
use std::net::TcpListener;

use tokio::runtime::{Builder, Runtime};

use super::*;
use crate::http::descriptors::NoFork;

/// Longer than anything here takes.
const NEVER: Duration = Duration::from_secs(600);

struct World {
    runtime: Runtime,
    table: Arc<Table>,
    listener: TcpListener,
}

/// A connection with a place, and its other side.
struct Seated {
    seat: Seat,
    _stream: Arc<Socket<TcpStream>>,
    other: std::net::TcpStream,
}

impl World {
    fn new(most: usize, crowded: Duration) -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let table = Arc::new(Table { most, crowded, state: Mutex::default(), freed: Notify::new() });
        World { runtime, table, listener: TcpListener::bind("127.0.0.1:0").unwrap() }
    }

    fn seat(&self) -> Seated {
        let other = std::net::TcpStream::connect(self.listener.local_addr().unwrap()).unwrap();
        other.set_nonblocking(true).unwrap();
        let no_fork = NoFork::begin().unwrap();
        let (stream, _) = self.listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        self.runtime.block_on(async {
            let stream = Arc::new(no_fork.keep(TcpStream::from_std(stream).unwrap()));
            Seated { seat: self.table.seat(&stream).await, _stream: stream, other }
        })
    }

    /// Which of these is closed for another one, if any is.
    fn closes(&self, seated: &mut [Seated]) -> Option<usize> {
        let mut is_closed = || {
            let mut ends = seated.iter_mut().map(|one| matches!(one.other.read(&mut [0]), Ok(0)));
            ends.position(|has_ended| has_ended)
        };
        assert_eq!(is_closed(), None);
        self.table.close_one();
        is_closed()
    }
}

#[test]
fn who_waits_goes_first_then_who_has_halted_longest_and_nobody_who_keeps_up_or_holds_claims() {
    for crowded in [Duration::ZERO, NEVER] {
        let world = World::new(8, crowded);
        let mut seated: Vec<Seated> = (0..6).map(|_| world.seat()).collect();
        for one in &seated[..4] {
            one.seat.set_halting();
        }
        seated[4].seat.set_busy();
        seated[5].seat.set_idle();
        assert!(seated[0].seat.hold());
        // What has moved something last has halted for the shortest time.
        std::thread::sleep(Duration::from_millis(2));
        seated[1].seat.set_halting();
        assert_eq!(world.closes(&mut seated), Some(5));
        seated.remove(5);
        for goes in [Some(2), Some(2), Some(1), None] {
            let goes = goes.filter(|_| crowded.is_zero());
            assert_eq!(world.closes(&mut seated), goes, "{crowded:?}");
            goes.map(|one| seated.remove(one));
        }
    }
}

#[test]
fn some_may_hold_claims() {
    let world = World::new(8, NEVER);
    let mut seated: Vec<Seated> = (0..3).map(|_| world.seat()).collect();
    let may_hold = |seated: &[Seated]| seated.iter().map(|one| one.seat.hold()).collect::<Vec<_>>();
    assert_eq!(may_hold(&seated), [true, true, false]);
    assert_eq!(may_hold(&seated), [true, true, false], "again, they hold no more");
    seated.remove(0);
    assert_eq!(may_hold(&seated), [true, true]);
}

//! Processes that are killed, that fork, and that have few descriptors.
#![allow(unsafe_code)]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tundish_store::http::{Client, Server, Timing};
use tundish_store::{Node, Service, ShardId, StoreError};

use crate::common::{LIMITS, pattern, put, whole, within};
use crate::raw::{Owner, Raw, STUCK, clients, until};

const WHERE_TO_CALL: &str = "TUNDISH_TEST_PARENT";

/// Another process of this test, which does as it is told by lines.
struct Process {
    child: Child,
    told: BufReader<TcpStream>,
}

impl Process {
    fn start(role: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", role, "--nocapture"])
            .env(WHERE_TO_CALL, listener.local_addr().unwrap().to_string())
            .spawn()
            .unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(STUCK)).unwrap();
        Process { child, told: BufReader::new(stream) }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.told.get_mut(), "{line}").unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.told.read_line(&mut line).unwrap();
        assert!(line.ends_with('\n'), "the other process ended");
        line.trim_end().to_owned()
    }

    fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.line()
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In a process that was started by [`Process::start`]: answers lines until nobody sends any.
fn obey(mut answer: impl FnMut(&[&str]) -> String) {
    let Ok(parent) = std::env::var(WHERE_TO_CALL) else { return };
    let mut stream = TcpStream::connect(parent).unwrap();
    let lines = BufReader::new(stream.try_clone().unwrap()).lines();
    for line in lines.map_while(Result::ok) {
        let answer = answer(&line.split(' ').collect::<Vec<_>>());
        writeln!(stream, "{answer}").unwrap();
    }
    std::process::exit(0);
}

fn is_started() -> bool {
    std::env::var(WHERE_TO_CALL).is_ok()
}

#[test]
fn owning_process() {
    if !is_started() {
        return;
    }
    let owner = Owner::new();
    obey(|words| match words {
        ["address"] => owner.address().to_string(),
        ["put", len] => put(&owner.node, &[pattern(1, len.parse().unwrap())]).unwrap()[0].to_string(),
        // SAFETY: the child of a process with threads does nothing but sleep and end.
        ["fork"] => match unsafe { libc::fork() } {
            0 => {
                std::thread::sleep(STUCK);
                // SAFETY: ends the child without running the parent's code in it.
                unsafe { libc::_exit(0) }
            }
            child => child.to_string(),
        },
        other => panic!("{other:?}"),
    });
}

#[test]
fn controlling_process() {
    if !is_started() {
        return;
    }
    let client = Client::new();
    let mut held = Vec::new();
    obey(|words| {
        let ["claim", owner, id] = words else { panic!("{words:?}") };
        let mut on = client.hold(&Arc::from(*owner));
        let ids: [ShardId; 1] = [id.parse().unwrap()];
        let claimed = within(10.0, |patience| on.claim(1, &ids, patience)).unwrap();
        held.push(on);
        claimed.claimed_count.to_string()
    });
}

#[test]
fn an_owner_with_few_descriptors() {
    if !is_started() {
        return;
    }
    let few = libc::rlimit { rlim_cur: 256, rlim_max: 256 };
    // SAFETY: a limit of this process.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const few) }, 0);
    let owner = Owner::new();
    obey(|_| owner.address().to_string());
}

const OWNING: &str = "processes::owning_process";

#[test]
fn shards_come_from_another_process() {
    let mut process = Process::start(OWNING);
    let address = process.ask("address");
    let bytes = pattern(1, 5 << 20);
    let id = process.ask(&format!("put {}", bytes.len())).parse().unwrap();
    for (way, client) in clients() {
        let node = Node::new(LIMITS);
        let wanted = [whole(&address, &id, bytes.len() as u64)];
        let views = within(20.0, |patience| node.fetch(&wanted, &client, patience)).unwrap();
        assert_eq!(node.stats().buffer.memory.used_bytes == 0, way == "where it lies");
        process.kill_last_round(way);
        assert!(views[0].bytes() == bytes, "{way}: also when the owner is gone");
    }
}

impl Process {
    fn kill_last_round(&mut self, way: &str) {
        if way == "where it lies" {
            self.kill();
        }
    }
}

#[test]
fn an_owner_that_is_killed_in_mid_transfer_is_told_of_within_a_second() {
    for round in 0..6 {
        let mut process = Process::start(OWNING);
        let address = process.ask("address");
        let len = 200 << 20;
        let id: ShardId = process.ask(&format!("put {len}")).parse().unwrap();
        let (node, client) = (Node::new(LIMITS), Client::of_sockets());
        let (error, spent) = std::thread::scope(|scope| {
            let fetching = scope.spawn(|| {
                let wanted = [whole(&address, &id, len)];
                let outcome = within(20.0, |patience| node.fetch(&wanted, &client, patience));
                (outcome.map(drop), Instant::now())
            });
            std::thread::sleep(Duration::from_millis(5 * round));
            process.kill();
            let killed = Instant::now();
            let (outcome, end) = fetching.join().unwrap();
            (outcome, end.saturating_duration_since(killed))
        });
        let Err(error) = error else { continue };
        assert!(spent < Duration::from_millis(1000), "{round}: {spent:?}");
        let StoreError::Unreachable { id: named, owner, .. } = &error else { panic!("{round}: {error}") };
        assert_eq!((named, &**owner), (&id, &*address));
        assert!(node.settle(Duration::from_secs(5)));
        assert_eq!(node.stats().buffer.memory.used_bytes, 0);
    }
}

#[test]
fn a_child_keeps_no_connection_of_its_parent() {
    let mut process = Process::start(OWNING);
    let address = process.ask("address");
    let id = process.ask("put 1000").parse().unwrap();
    let (node, client) = (Node::new(LIMITS), Client::of_sockets());
    let fetch = || {
        node.clear_buffer(None);
        within(20.0, |patience| node.fetch(&[whole(&address, &id, 1000)], &client, patience)).map(drop)
    };
    // A connection is open, and then the child is made.
    fetch().unwrap();
    let mut open = Raw::connect(address.parse().unwrap());
    open.request("GET", "/health", "", b"");
    assert_eq!(open.answer().status, 200);
    let child: i32 = process.ask("fork").parse().unwrap();
    fetch().unwrap();
    process.kill();
    let begin = Instant::now();
    assert!(open.is_closed(), "the end of the process is the end of its connections");
    assert!(matches!(fetch(), Err(StoreError::Unreachable { .. })));
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    // SAFETY: the child of the process that was killed, which does nothing but sleep.
    unsafe { libc::kill(child, libc::SIGKILL) };
}

#[test]
fn a_controller_that_dies_gives_up_its_claims() {
    let owner = Owner::new();
    owner.store("a", b"abc");
    let mut controller = Process::start("processes::controlling_process");
    assert_eq!(controller.ask(&format!("claim {} a", owner.address())), "1");
    assert_eq!(owner.node.stats().storage.unclaimed_entries, 0);
    controller.kill();
    until("its claims are given up", || owner.node.stats().storage.unclaimed_entries == 1);
}

#[test]
fn a_consumer_that_dies_in_mid_transfer_keeps_nothing_of_the_owners() {
    let owner = Owner::new();
    let id = put(&owner.node, &[pattern(1, 100 << 20)]).unwrap().remove(0);
    for _ in 0..3 {
        let mut raw = owner.connect();
        raw.request("GET", &format!("/data/{id}"), "", b"");
        std::io::Read::read_exact(&mut raw.0, &mut [0; 1000]).unwrap();
    }
    owner.node.remove(&[id]);
    until("its memory is given up", || {
        let memory = owner.node.stats().storage.memory;
        (memory.used_bytes, memory.escaped_bytes) == (0, 0)
    });
}

#[test]
fn a_port_that_is_taken_is_told_of() {
    let owner = Owner::new();
    let port = owner.server.address().port();
    let error = Server::start(Node::new(LIMITS), "127.0.0.1", port, None, Timing::default()).unwrap_err();
    let StoreError::Io { object, kind, .. } = &error else { panic!("{error}") };
    assert_eq!((object, kind), (&format!("127.0.0.1:{port}"), &std::io::ErrorKind::AddrInUse));
    drop(owner);
    Server::start(Node::new(LIMITS), "127.0.0.1", port, None, Timing::default()).unwrap();
}

#[test]
fn more_connections_than_there_is_room_for_push_out_those_that_wait() {
    let mut process = Process::start("processes::an_owner_with_few_descriptors");
    let address: Arc<str> = process.ask("address").into();
    let at = address.parse().unwrap();
    let client = Client::new();
    let mut held = client.hold(&address);
    within(10.0, |patience| held.begin_epoch(1, patience)).unwrap();
    let ask = |raw: &mut Raw| {
        raw.request("GET", "/health", "", b"");
        raw.answer().status
    };
    let open: Vec<Raw> = (0..300)
        .map(|_| {
            let mut raw = Raw::connect(at);
            assert_eq!(ask(&mut raw), 200);
            raw
        })
        .collect();
    let closed = open.into_iter().filter_map(|mut raw| {
        raw.0.set_nonblocking(true).unwrap();
        raw.is_closed().then_some(())
    });
    let closed = closed.count();
    assert!(closed > 200, "only {closed} of 300 had to go");
    assert!(held.is_alive(), "but not the one that holds claims");
    within(10.0, |patience| held.end_epoch(1, patience)).unwrap();
}

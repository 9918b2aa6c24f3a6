//! Processes that are killed, that fork, and that have few descriptors.
#![allow(unsafe_code)]

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tundish_store::http::{Client, Server, ServerOptions};
use tundish_store::{ShardId, StoreError, TensorStore};

use crate::common::{LIMITS, pattern, put, whole, within};
use crate::controller::Controller;
use crate::raw_http::{Owner, Raw, STUCK, clients, until};

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
        ["put", len] => put(&owner.store, &[pattern(1, len.parse().unwrap())]).unwrap()[0].to_string(),
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
    let mut held = Vec::new();
    obey(|words| {
        let ["claim", owner, id] = words else { panic!("{words:?}") };
        let mut on = Controller::new(&Arc::from(*owner));
        let ids: [ShardId; 1] = [id.parse().unwrap()];
        let claimed = within(10.0, |time_limit| on.claim(1, &ids, time_limit)).unwrap();
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
    obey(|words| match words {
        ["put", len] => put(&owner.store, &[pattern(1, len.parse().unwrap())]).unwrap()[0].to_string(),
        _ => owner.address().to_string(),
    });
}

#[test]
fn an_owner_without_threads() {
    if !is_started() {
        return;
    }
    let owner = Owner::new();
    // Not by a request: for that a thread may be started, and stay for a while.
    let id = put(&owner.store, &[vec![7]]).unwrap().remove(0);
    let none = libc::rlimit { rlim_cur: 1, rlim_max: 1 };
    // SAFETY: the user and a limit of this process; the limit is not for root.
    let limited = unsafe { libc::setuid(65_534) | libc::setrlimit(libc::RLIMIT_NPROC, &raw const none) };
    assert!(limited == 0 && std::thread::Builder::new().spawn(|| ()).is_err());
    obey(|words| if words == ["address"] { owner.address().to_string() } else { id.to_string() });
}

const OWNING: &str = "processes::owning_process";

#[test]
fn shards_come_from_another_process() {
    let mut process = Process::start(OWNING);
    let address = process.ask("address");
    let bytes = pattern(1, 5 << 20);
    let id = process.ask(&format!("put {}", bytes.len())).parse().unwrap();
    for (way, client) in clients() {
        let store = TensorStore::new(LIMITS);
        let wanted = [whole(&address, &id, bytes.len() as u64)];
        let views = within(20.0, |time_limit| store.fetch(&wanted, &client, time_limit)).unwrap();
        assert_eq!(store.stats().buffer.memory.used_bytes == 0, way == "where it lies");
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
fn the_death_of_an_owner_in_mid_transfer_is_noticed_within_a_second() {
    for round in 0..6 {
        let mut process = Process::start(OWNING);
        let address = process.ask("address");
        let len = 200 << 20;
        let id: ShardId = process.ask(&format!("put {len}")).parse().unwrap();
        let (store, client) = (TensorStore::new(LIMITS), Client::of_sockets());
        let (error, spent) = std::thread::scope(|scope| {
            let fetching = scope.spawn(|| {
                let wanted = [whole(&address, &id, len)];
                let outcome = within(20.0, |time_limit| store.fetch(&wanted, &client, time_limit));
                (outcome.map(drop), Instant::now())
            });
            std::thread::sleep(Duration::from_millis(5 * round));
            process.kill();
            let killed = Instant::now();
            let (outcome, end) = fetching.join().unwrap();
            (outcome, end.saturating_duration_since(killed))
        });
        let Err(error) = error else { continue };
        // time: ten times the promised second; the fetch may take 20 s
        assert!(spent < Duration::from_secs(10), "{round}: {spent:?}");
        let StoreError::Unreachable { id: named, owner, .. } = &error else { panic!("{round}: {error}") };
        assert_eq!((named, &**owner), (&id, &*address));
        assert_eq!(store.stats().buffer.memory.used_bytes, 0);
    }
}

#[test]
fn a_child_keeps_no_connection_of_its_parent() {
    let mut process = Process::start(OWNING);
    let address = process.ask("address");
    let id = process.ask("put 1000").parse().unwrap();
    let (store, client) = (TensorStore::new(LIMITS), Client::of_sockets());
    let fetch = || {
        store.clear_buffer(None);
        within(20.0, |time_limit| store.fetch(&[whole(&address, &id, 1000)], &client, time_limit)).map(drop)
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
    // time: ten times the promised second; the fetch may take 20 s
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    // SAFETY: the child of the process that was killed, which does nothing but sleep.
    unsafe { libc::kill(child, libc::SIGKILL) };
}

#[test]
fn a_controller_that_dies_gives_up_its_claims() {
    let owner = Owner::new();
    owner.store("a", b"abc");
    let mut controller = Process::start("processes::controlling_process");
    assert_eq!(controller.ask(&format!("claim {} a", owner.address())), "1");
    assert_eq!(owner.store.stats().storage.unclaimed_entries, 0);
    controller.kill();
    until("its claims are given up", || owner.store.stats().storage.unclaimed_entries == 1);
}

#[test]
fn a_consumer_that_dies_in_mid_transfer_keeps_nothing_of_the_owners() {
    let owner = Owner::new();
    let id = put(&owner.store, &[pattern(1, 100 << 20)]).unwrap().remove(0);
    for _ in 0..3 {
        let mut raw = owner.connect();
        raw.request("GET", &format!("/data/{id}"), "", b"");
        std::io::Read::read_exact(&mut raw.0, &mut [0; 1000]).unwrap();
    }
    owner.store.remove(&[id]);
    until("its memory is given up", || {
        let memory = owner.store.stats().storage.memory;
        (memory.used_bytes, memory.escaped_bytes) == (0, 0)
    });
}

#[test]
fn a_taken_port_is_named() {
    let owner = Owner::new();
    let port = owner.server.address().port();
    let error = Server::start(TensorStore::new(LIMITS), "127.0.0.1", port, ServerOptions::default()).unwrap_err();
    let StoreError::Io { object, kind, .. } = &error else { panic!("{error}") };
    assert_eq!((object, kind), (&format!("127.0.0.1:{port}"), &std::io::ErrorKind::AddrInUse));
    drop(owner);
    Server::start(TensorStore::new(LIMITS), "127.0.0.1", port, ServerOptions::default()).unwrap();
}

#[test]
fn more_connections_than_there_is_room_for_push_out_those_that_wait() {
    let mut process = Process::start("processes::an_owner_with_few_descriptors");
    let address: Arc<str> = process.ask("address").into();
    let at = address.parse().unwrap();
    let mut held = Controller::new(&address);
    within(10.0, |time_limit| held.begin_step(1, time_limit)).unwrap();
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
    let number = held.connection_number();
    within(10.0, |time_limit| held.end_step(1, time_limit)).unwrap();
    assert_eq!(held.connection_number(), number, "but not the one that holds claims");
}

#[test]
fn without_threads_everything_is_done_by_those_that_serve() {
    let mut process = Process::start("processes::an_owner_without_threads");
    let at = process.ask("address").parse().unwrap();
    let clear = format!(r#"{{"shard_ids": ["{}"]}}"#, process.ask("id"));
    let mut raw = Raw::connect(at);
    let requests: [(_, _, &[u8], _); 5] = [
        ("POST", "/step/3/claim", clear.as_bytes(), "\"claimed_count\":1"),
        ("POST", "/keep", clear.as_bytes(), "\"kept_shards\":1"),
        ("DELETE", "/data/clear", clear.as_bytes(), "\"cleared_count\":1"),
        ("POST", "/step/3/end", b"", "\"held_bytes\":0"),
        ("DELETE", "/buffer/clear", b"", "\"cleared_count\":0"),
    ];
    for (method, path, body, says) in requests {
        raw.request(method, path, "", body);
        let answer = raw.answer();
        assert!(answer.status == 200 && answer.text().contains(says), "{path}: {}", answer.text());
    }
}

/// The most memory that a process ever had, in MiB.
fn peak(process: &Process) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() >> 10
}

#[test]
fn a_short_name_that_is_named_often_costs_little() {
    let mut process = Process::start(OWNING);
    let at = process.ask("address").parse().unwrap();
    let mut raw = Raw::connect(at);
    let id = process.ask("put 1");
    let before = peak(&process);
    let names = |count: usize| {
        let name = if count > 1 << 16 { "a" } else { &*id };
        format!(r#"{{"shard_ids":[{}]}}"#, vec![format!("\"{name}\""); count].join(","))
    };
    raw.request("POST", "/data/batch", "", names(1 << 16).as_bytes());
    let answer = raw.answer();
    assert_eq!((answer.status, answer.body.len()), (200, 33 << 16));
    let of_all = peak(&process) - before;
    // Eight megabytes of them.
    for (method, path) in [("POST", "/data/batch"), ("DELETE", "/data/clear"), ("POST", "/keep")] {
        raw.request(method, path, "", names(2_000_000).as_bytes());
        let answer = raw.answer();
        assert!(answer.status == 400 && answer.text().contains("at most 65536"), "{}", answer.text());
    }
    let of_more = peak(&process) - before;
    assert!(of_all < 24 && of_more < 64, "{of_all} and {of_more} MiB");
}

#[test]
fn those_that_stop_half_way_make_room_for_others() {
    let half_ways = [
        "GET /health HT",
        "POST /data/batch HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
        "GET /data/LARGE HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "POST /step/99/begin HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
    ];
    let mut process = Process::start("processes::an_owner_with_few_descriptors");
    let at: SocketAddr = process.ask("address").parse().unwrap();
    let large = process.ask("put 67108864");
    let ask = |method, path, body: &[u8]| {
        let mut raw = Raw::connect(at);
        raw.request(method, path, "", body);
        raw.answer().status
    };
    for half_way in half_ways {
        // More than it has places.
        let silent: Vec<Raw> = (0..100)
            .map(|_| {
                let mut raw = Raw::connect(at);
                raw.send(half_way.replace("LARGE", &large).as_bytes());
                if half_way.starts_with("POST /step") {
                    // The first has the step, and keeps its place; those that are refused keep none.
                    raw.answer();
                }
                raw
            })
            .collect();
        let begin = Instant::now();
        assert_eq!(ask("GET", "/health", b""), 200, "{half_way}");
        // time: an answer takes milliseconds; that of a server without a free place never comes
        assert!(begin.elapsed() < Duration::from_secs(5), "{half_way}: {:?}", begin.elapsed());
        drop(silent);
    }
}

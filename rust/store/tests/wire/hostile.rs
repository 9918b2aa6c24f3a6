//! Clients that are strangers, that lie, that stop half-way, and that are many.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use tundish_store::http::{Server, ServerOptions, Timeouts};
use tundish_store::{Node, Service, StoreError};

use crate::common::{LIMITS, pattern};
use crate::raw::{Owner, Raw, STUCK, meta, shard, until};

const SHORT: Duration = Duration::from_millis(300);

fn hasty() -> Timeouts {
    Timeouts { head: SHORT, silence: 2 * SHORT, space: SHORT, ..Timeouts::default() }
}

fn assert_serves(owner: &Owner) {
    assert_eq!(owner.ask("GET", "/health", "", b"").status, 200);
}

fn assert_holds_nothing(owner: &Owner) {
    until("memory that was given up is counted as such", || {
        let storage = owner.node.stats().storage;
        (storage.num_entries, storage.memory.used_bytes, storage.memory.escaped_bytes) == (0, 0, 0)
    });
}

#[test]
fn nothing_is_done_without_the_token() {
    let owner = Owner::with(Some("s3cret"), Timeouts::default());
    let routes = [
        ("PUT", "/data/a"),
        ("GET", "/data/a"),
        ("POST", "/data/batch"),
        ("DELETE", "/data/clear"),
        ("DELETE", "/buffer/clear"),
        ("GET", "/buffer/stats"),
        ("POST", "/epoch/1/begin"),
        ("POST", "/epoch/1/claim"),
        ("POST", "/epoch/1/close"),
        ("POST", "/epoch/1/end"),
        ("POST", "/keep"),
        ("GET", "/stats"),
        ("GET", "/metrics"),
        ("GET", "/health"),
        ("GET", "/nothing"),
    ];
    for (method, path) in routes {
        for said in
            ["", "Authorization: Bearer wrong\r\n", "Authorization: Bearer s3cre\r\n", "Authorization: s3cret\r\n"]
        {
            let answer = owner.ask(method, path, said, b"");
            assert_eq!((answer.status, answer.field("WWW-Authenticate")), (401, Some("Bearer")), "{path} {said}");
            assert!(!answer.text().contains("s3cret"));
        }
    }
    let said = "Authorization: Bearer s3cret\r\n";
    assert_eq!(owner.ask("PUT", "/data/a", said, &shard(&meta("uint8", &[1]), b"a")).status, 200);
    assert_eq!(owner.ask("POST", "/epoch/1/end", said, b"").status, 200);
}

#[test]
fn an_address_that_others_reach_needs_a_token() {
    let start = |host: &str| Server::start(Node::new(LIMITS), host, 0, ServerOptions::default());
    for host in ["0.0.0.0", "::"] {
        let error = start(host).unwrap_err();
        assert!(matches!(&error, StoreError::Invalid(reason) if reason.contains("token")), "{error}");
    }
    assert!(start("localhost").is_ok());
}

#[test]
fn pages_in_a_browser_are_not_served() {
    let owner = Owner::new();
    for fields in ["Origin: http://evil.example\r\n", "Sec-Fetch-Site: cross-site\r\n"] {
        assert_eq!(owner.ask("POST", "/epoch/1/end", fields, b"").status, 403);
    }
    let mut turned = owner.connect();
    turned.send(b"GET /stats HTTP/1.1\r\nHost: evil.example\r\n\r\n");
    assert_eq!(turned.answer().status, 403);
}

#[test]
fn a_body_that_is_not_what_it_says_stores_nothing() {
    let owner = Owner::new();
    let meta = meta("float32", &[25_000]);
    let good = shard(&meta, &pattern(1, 100_000));
    let changed = |place: usize| {
        let mut body = good.clone();
        body[place] ^= 1;
        body
    };
    let bodies = [
        (changed(good.len() - 1), 422),
        (changed(5000), 422),
        (changed(16), 422),
        (changed(0), 400),
        (changed(5), 400),
        (changed(8), 400),
        (changed(24), 400),
        (good[..good.len() - 1].to_vec(), 400),
        ([&good[..], b"x"].concat(), 400),
        (good[..30].to_vec(), 400),
        (Vec::new(), 400),
        ([&good[..7], &[1], &good[8..]].concat(), 400),
    ];
    for (number, (body, status)) in bodies.iter().enumerate() {
        let answer = owner.ask("PUT", "/data/a", "", body);
        assert_eq!(answer.status, *status, "{number}: {}", answer.text());
    }
    assert_holds_nothing(&owner);
}

#[test]
fn a_body_that_ends_half_way_leaves_nothing_behind() {
    let owner = Owner::new();
    let body = shard(&meta("uint8", &[5 << 20]), &pattern(2, 5 << 20));
    for end in [0, 3, 32, 1000, 4 << 20] {
        let mut raw = owner.connect();
        let head = format!("PUT /data/a HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", body.len());
        raw.send(head.as_bytes());
        raw.send(&body[..end]);
        drop(raw);
    }
    assert_holds_nothing(&owner);
    assert_eq!(owner.ask("GET", "/data/a", "", b"").status, 404);
    assert_eq!(owner.ask("PUT", "/data/a", "", &body).status, 200);
}

#[test]
fn lengths_that_are_only_announced_cost_nothing() {
    let owner = Owner::new();
    let announce = |line: &str, length: u64, begun: &[u8]| {
        let mut raw = owner.connect();
        raw.send(format!("{line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n").as_bytes());
        raw.send(begun);
        raw.answer().status
    };
    // A tensor of 2⁶² bytes, and one that is merely larger than the store.
    for size in [1u64 << 62, 1 << 40] {
        let mut header = shard(&meta("uint8", &[0]), b"");
        header[8..16].copy_from_slice(&size.to_le_bytes());
        header[24..32].copy_from_slice(&size.to_le_bytes());
        assert_eq!(announce("PUT /data/a", 32 + size, &header), 413);
    }
    assert_eq!(announce("POST /data/batch", 1 << 60, b"{"), 413);
    // More than any length may be.
    assert_eq!(announce("DELETE /data/clear", u64::MAX, b""), 431);
    assert_holds_nothing(&owner);
}

#[test]
fn who_is_slow_or_silent_is_waited_for_no_longer_than_that() {
    let owner = Owner::with(None, hasty());
    let begin = Instant::now();
    let half = |begun: &str| {
        let mut raw = owner.connect();
        raw.send(begun.as_bytes());
        raw
    };
    let mut silent = half("GET /data/a HTTP/1.1\r\nHos");
    assert!(silent.is_closed());
    let mut body = half("POST /data/batch HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{");
    assert!(body.is_closed());
    // A byte now and then is no progress.
    let mut dripping = half("GET /");
    let drips = (0..300).take_while(|_| {
        std::thread::sleep(Duration::from_millis(20));
        dripping.0.write_all(b"a").is_ok()
    });
    assert!(drips.count() < 200);
    assert!(begin.elapsed() < Duration::from_secs(10));
    assert_serves(&owner);
}

#[test]
fn a_connection_may_wait_longer_for_its_next_request_than_for_the_rest_of_one() {
    let owner = Owner::with(None, hasty());
    let mut raw = owner.connect();
    for _ in 0..2 {
        std::thread::sleep(4 * SHORT);
        raw.request("GET", "/health", "", b"");
        assert_eq!(raw.answer().status, 200);
    }
}

#[test]
fn who_takes_no_answer_does_not_keep_the_shard() {
    let owner = Owner::with(None, hasty());
    owner.store("a", &pattern(3, 64 << 20));
    let mut raw = owner.connect();
    raw.request("GET", "/data/a", "", b"");
    std::thread::sleep(Duration::from_millis(20));
    owner.ask("DELETE", "/data/clear", "", br#"{"shard_ids": ["a"]}"#);
    assert_holds_nothing(&owner);
}

#[test]
fn a_store_at_its_limit_refuses_after_a_while() {
    let owner = Owner::with(None, hasty());
    owner.node.set_limits(tundish_store::Limits { storage_bytes: 8 << 20, buffer_bytes: 8 << 20 });
    owner.store("a", &pattern(4, 6 << 20));
    let second = shard(&meta("uint8", &[6 << 20]), &pattern(5, 6 << 20));
    let answer = owner.ask("PUT", "/data/b", "", &second);
    assert_eq!(answer.status, 507, "{}", answer.text());
    // One that waits for space gets it when there is some.
    let answer = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| owner.ask("PUT", "/data/b", "", &second));
        std::thread::sleep(Duration::from_millis(100));
        owner.ask("DELETE", "/data/clear", "", br#"{"shard_ids": ["a"]}"#);
        waiting.join().unwrap()
    });
    assert_eq!(answer.status, 200, "{}", answer.text());
}

#[test]
fn who_has_room_and_sends_nothing_loses_it_to_who_waits_for_it() {
    let timeouts = Timeouts { silence: STUCK, space: 20 * SHORT, ..Timeouts::default() };
    let owner = Owner::with(None, timeouts);
    owner.node.set_limits(tundish_store::Limits { storage_bytes: 8 << 20, buffer_bytes: 8 << 20 });
    let body = shard(&meta("uint8", &[6 << 20]), &pattern(6, 6 << 20));
    let mut silent = owner.connect();
    let head = format!("PUT /data/silent HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", body.len());
    silent.send(&[head.as_bytes(), &body[..100]].concat());
    until("it has its space", || owner.node.stats().storage.memory.used_bytes > 0);
    let answer = owner.ask("PUT", "/data/a", "", &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
}

#[test]
fn what_is_made_of_names_has_its_room_until_it_is_answered() {
    let owner = Owner::new();
    owner.store("a", &pattern(7, 1 << 20));
    let names = format!(r#"{{"shard_ids":[{}]}}"#, vec![r#""a""#; 1 << 16].join(","));
    // Takes some of an answer of many gigabytes.
    let take = || {
        let mut raw = owner.connect();
        raw.request("POST", "/data/batch", "", names.as_bytes());
        std::io::Read::read_exact(&mut raw.0, &mut [0; 1000]).unwrap();
        raw
    };
    let taking: Vec<Raw> = (0..7).map(|_| take()).collect();
    let beside = Owner::with(None, hasty());
    beside.store("a", b"a");
    let ask = |names: &str| beside.ask("POST", "/data/batch", "", names.as_bytes()).status;
    assert_eq!(ask(&names), 503);
    assert_eq!(ask(r#"{"shard_ids":["a"]}"#), 200, "small ones are not counted");
    drop(taking);
    until("their space is given back", || ask(&names) == 200);
}

#[test]
fn a_thousand_idle_connections_harm_nobody() {
    let owner = Owner::new();
    owner.store("a", b"abc");
    let idle: Vec<TcpStream> = (0..1000).map(|_| owner.connect().0).collect();
    let begun: Vec<Raw> = (0..100)
        .map(|_| {
            let mut raw = owner.connect();
            raw.send(b"GET /data/a HT");
            raw
        })
        .collect();
    let begin = Instant::now();
    for _ in 0..20 {
        assert_eq!(owner.ask("GET", "/data/a", "", b"").status, 200);
    }
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    drop(begun);
    let mut last = Raw(idle.into_iter().next_back().unwrap());
    last.request("GET", "/data/a", "", b"");
    assert_eq!(last.answer().status, 200, "they can still be used");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn whatever_comes_the_server_lives(
        parts in proptest::collection::vec(
            prop_oneof![
                "(GET|PUT|POST|DELETE) /(data|epoch|buffer|stats)?/?[a-z0-9]{0,5}(/end)?( HTTP/1.1)?\r\n",
                "(Host: localhost|Content-Length: [0-9]{1,3}|Range: [a-z]{1,5}=[0-9]?-[0-9]?|Expect: 100-continue)\r\n",
                "\r\n",
                "[\\x00-\\x7f]{0,20}",
            ],
            0..12,
        ),
    ) {
        thread_local!(static OWNER: Owner = Owner::with(None, hasty()));
        OWNER.with(|owner| {
            let mut stream = owner.connect().0;
            for part in &parts {
                // The server may have hung up already.
                let _ = stream.write_all(part.as_bytes());
            }
            drop(stream);
            assert_serves(owner);
        });
    }
}

//! Clients that are not authorized, lie, stop in the middle of a request, or are many.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use tundish_store::http::{Server, ServerOptions, Timeouts};
use tundish_store::{StoreError, TensorStore};

use crate::common::{LIMITS, pattern};
use crate::raw_http::{Owner, Raw, until};

const SHORT: Duration = Duration::from_millis(300);

fn hasty() -> Timeouts {
    Timeouts { silence: 2 * SHORT, ..Timeouts::default() }
}

fn assert_serves(owner: &Owner) {
    assert_eq!(owner.ask("GET", "/health", "", b"").status, 200);
}

fn assert_holds_nothing(owner: &Owner) {
    until("memory that was given up is counted as such", || {
        let storage = owner.store.stats().storage;
        (storage.num_entries, storage.memory.used_bytes, storage.memory.escaped_bytes) == (0, 0, 0)
    });
}

#[test]
fn nothing_is_done_without_the_token() {
    let owner = Owner::with(Some("s3cret"), Timeouts::default());
    let routes = [
        ("GET", "/data/a"),
        ("POST", "/data/batch"),
        ("DELETE", "/data/clear"),
        ("DELETE", "/buffer/clear"),
        ("GET", "/buffer/stats"),
        ("POST", "/step/1/begin"),
        ("POST", "/step/1/claim"),
        ("POST", "/step/1/end"),
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
    assert_eq!(owner.ask("POST", "/step/1/end", said, b"").status, 200);
}

#[test]
fn an_address_that_others_reach_needs_a_token() {
    let start = |host: &str| Server::start(TensorStore::new(LIMITS), host, 0, ServerOptions::default());
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
        assert_eq!(owner.ask("POST", "/step/1/end", fields, b"").status, 403);
    }
}

#[test]
fn a_request_names_this_machine_as_its_host_and_nothing_else() {
    let owner = Owner::new();
    let own = owner.address();
    for (line, hosts, status) in [
        ("GET /stats HTTP/1.1", "Host: localhost\r\n", 200),
        ("GET http://localhost/stats HTTP/1.1", "Host: localhost\r\n", 200),
        (&format!("GET http://{own}/stats HTTP/1.1"), "Host: localhost\r\n", 200),
        ("GET /stats HTTP/1.1", "Host: evil.example\r\n", 403),
        ("GET http://evil.example/stats HTTP/1.1", "Host: localhost\r\n", 403),
        ("GET http://localhost@evil.example/stats HTTP/1.1", "Host: localhost\r\n", 403),
        ("GET /stats HTTP/1.1", "", 400),
        ("GET /stats HTTP/1.0", "", 400),
        ("GET http://localhost/stats HTTP/1.1", "", 400),
        ("GET /stats HTTP/1.1", "Host: localhost\r\nHost: evil.example\r\n", 400),
        ("GET /stats HTTP/1.1", "Host: localhost\r\nHost: localhost\r\n", 400),
    ] {
        let mut raw = owner.connect();
        raw.send(format!("{line}\r\n{hosts}\r\n").as_bytes());
        assert_eq!(raw.answer().status, status, "{line} {hosts}");
    }
}

#[test]
fn a_client_that_closes_its_side_after_its_request_is_answered() {
    let owner = Owner::new();
    let bytes = pattern(1, 1 << 20);
    owner.store("a", &bytes);
    for _ in 0..100 {
        let mut raw = owner.connect();
        raw.request("GET", "/data/a", "", b"");
        raw.0.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(raw.answer().body.ends_with(&bytes));
        assert!(raw.is_closed());
    }
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
    assert_eq!(announce("POST /data/batch", 1 << 60, b"{"), 413);
    // More than any length may be.
    assert_eq!(announce("DELETE /data/clear", u64::MAX, b""), 431);
    assert_holds_nothing(&owner);
}

#[test]
fn slow_and_silent_clients_are_disconnected() {
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
    // time: three times the limit of 0.6 s, and 8 s of room
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
fn a_client_that_reads_no_response_does_not_keep_the_shard() {
    let owner = Owner::with(None, hasty());
    owner.store("a", &pattern(3, 64 << 20));
    let mut raw = owner.connect();
    raw.request("GET", "/data/a", "", b"");
    std::thread::sleep(Duration::from_millis(20));
    owner.ask("DELETE", "/data/clear", "", br#"{"shard_ids": ["a"]}"#);
    assert_holds_nothing(&owner);
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
    // time: 20 requests take milliseconds; one that waited for another connection would take longer
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    drop(begun);
    let mut last = Raw(idle.into_iter().next_back().unwrap());
    last.request("GET", "/data/a", "", b"");
    assert_eq!(last.answer().status, 200, "they can still be used");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn the_server_survives_any_bytes(
        parts in proptest::collection::vec(
            prop_oneof![
                "(GET|PUT|POST|DELETE) /(data|step|buffer|stats)?/?[a-z0-9]{0,5}(/end)?( HTTP/1.1)?\r\n",
                "(Host: localhost|Content-Length: [0-9]{1,3}|Expect: 100-continue)\r\n",
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

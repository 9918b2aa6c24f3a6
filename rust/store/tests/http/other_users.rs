//! Processes of other users of the machine: without a token every request of theirs is refused.
#![allow(unsafe_code)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};

use serde_json::json;
use tundish_store::http::{ServerOptions, Token};

use crate::raw_http::Owner;

const WHERE: &str = "TUNDISH_TEST_SERVER";
const REQUEST: &str = "TUNDISH_TEST_REQUEST";

const NOBODY: u32 = 65_534;

/// Sends a request as another user and prints the status of the response. [`as_nobody`] starts it.
#[test]
fn a_client_of_another_user() {
    let (Ok(address), Ok(request)) = (std::env::var(WHERE), std::env::var(REQUEST)) else { return };
    // SAFETY: changes the user of this process, which does nothing else.
    assert_eq!(unsafe { libc::setuid(NOBODY) }, 0);
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    println!("STATUS {}", answer.split(' ').nth(1).unwrap_or("none"));
    println!("CLOSED {}", answer.to_lowercase().contains("connection: close"));
    std::process::exit(0);
}

fn as_nobody(address: SocketAddr, method: &str, path: &str, fields: &str, body: &str) -> String {
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n{fields}\r\n{body}"
    );
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "other_users::a_client_of_another_user", "--nocapture"])
        .env(WHERE, address.to_string())
        .env(REQUEST, request)
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("CLOSED true"), "{text}");
    text.lines().find_map(|line| line.split("STATUS ").nth(1)).unwrap_or_else(|| panic!("{text}")).to_owned()
}

fn is_root() -> bool {
    // SAFETY: asks who runs this.
    unsafe { libc::geteuid() == 0 }
}

#[test]
fn another_user_can_do_nothing_without_a_token() {
    if !is_root() {
        return;
    }
    let owner = Owner::new();
    owner.store("a", b"secret");
    let names = r#"{"shard_ids": ["a"]}"#;
    for (method, path, body) in [
        ("GET", "/data/a", ""),
        ("POST", "/data/batch", names),
        ("DELETE", "/data/clear", names),
        ("DELETE", "/buffer/clear", ""),
        ("POST", "/step/1/begin", ""),
        ("POST", "/step/1/claim", names),
        ("POST", "/step/1/end", ""),
        ("POST", "/keep", names),
        ("GET", "/stats", ""),
        ("GET", "/metrics", ""),
        ("GET", "/health", ""),
    ] {
        assert_eq!(as_nobody(owner.server.address(), method, path, "", body), "403", "{method} {path}");
    }
    let stats = owner.store.stats();
    assert_eq!((stats.storage.num_entries, stats.storage.unclaimed_entries, stats.current_step), (1, 1, None));
    assert_eq!(owner.ask("GET", "/health", "", b"").json(), json!({"status": "ok"}), "its own user is answered");
}

#[test]
fn another_user_with_the_token_is_served() {
    if !is_root() {
        return;
    }
    let owner = Owner::serving(ServerOptions { token: Some(Token::new("s3cret").unwrap()), ..Default::default() });
    let address = owner.server.address();
    assert_eq!(as_nobody(address, "GET", "/stats", "", ""), "401");
    assert_eq!(as_nobody(address, "GET", "/stats", "Authorization: Bearer wrong\r\n", ""), "401");
    assert_eq!(as_nobody(address, "GET", "/stats", "Authorization: Bearer s3cret\r\n", ""), "200");
    assert!(!owner.ask("GET", "/metrics", "Authorization: Bearer s3cret\r\n", b"").text().contains("s3cret"));
}

#[test]
fn metrics_and_health_are_open_to_everybody_on_request_and_nothing_else_is() {
    for token in [None, Some(Token::new("s3cret").unwrap())] {
        let refused = if token.is_some() { "401" } else { "403" };
        let owner = Owner::serving(ServerOptions { token, open_metrics: true, ..Default::default() });
        let address = owner.server.address();
        if is_root() {
            assert_eq!(as_nobody(address, "GET", "/metrics", "", ""), "200");
            assert_eq!(as_nobody(address, "GET", "/health", "", ""), "200");
            assert_eq!(as_nobody(address, "GET", "/stats", "", ""), refused);
        }
        assert_eq!(owner.ask("GET", "/metrics", "", b"").status, 200);
    }
}

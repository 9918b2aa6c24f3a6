//! Servers to test, and a client that writes requests and reads answers without the code under test.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tundish_store::http::{Client, Server, ServerOptions, Timeouts, Token, Trust};
use tundish_store::{Dtype, TensorMeta, TensorStore, TensorToStore, Wanted};

use crate::common::{LIMITS, within};

/// Far longer than anything here takes.
pub const STUCK: Duration = Duration::from_secs(20);

/// A field of requests.
pub const TAKES_SHARDS: &str = "Accept: application/x-tundish-shards\r\n";

/// A store that serves.
pub struct Owner {
    pub store: Arc<TensorStore>,
    pub server: Server,
}

impl Owner {
    pub fn new() -> Self {
        Owner::with(None, Timeouts::default())
    }

    pub fn with(token: Option<&str>, timeouts: Timeouts) -> Self {
        let token = token.map(|text| Token::new(text).unwrap());
        Owner::serving(ServerOptions { token, timeouts, ..ServerOptions::default() })
    }

    pub fn serving(options: ServerOptions) -> Self {
        let store = TensorStore::new(LIMITS);
        let server = Server::start(store.clone(), "127.0.0.1", 0, options).unwrap();
        Owner { store, server }
    }

    pub fn address(&self) -> Arc<str> {
        self.server.address().to_string().into()
    }

    pub fn connect(&self) -> Raw {
        Raw::connect(self.server.address())
    }

    /// One request on a connection of its own.
    pub fn ask(&self, method: &str, path: &str, fields: &str, body: &[u8]) -> Answer {
        let mut raw = self.connect();
        raw.request(method, path, fields, body);
        raw.answer()
    }

    /// Stores bytes under this name.
    pub fn store(&self, id: &str, bytes: &[u8]) {
        self.put(id, meta("uint8", &[bytes.len() as u64]), bytes);
    }

    /// Stores a tensor under this name.
    pub fn put(&self, id: &str, meta: TensorMeta, bytes: &[u8]) {
        let source = TensorToStore::new(meta, bytes).unwrap();
        within(20.0, |time_limit| self.store.put_as(&id.parse().unwrap(), source, time_limit)).unwrap();
    }

    pub fn wanted(&self, id: &str, len: u64) -> Wanted {
        crate::common::whole(&self.address(), &id.parse().unwrap(), len)
    }
}

/// How an owner with this token is spoken to.
pub fn with_token(token: &str) -> Trust {
    Trust { token: Some(Token::new(token).unwrap()), tls: None }
}

/// Ways to fetch.
pub fn clients() -> [(&'static str, Client); 2] {
    [("over a socket", Client::of_sockets()), ("where it lies", Client::new())]
}

/// A connection on which anything can be sent.
pub struct Raw(pub TcpStream);

impl Raw {
    pub fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(STUCK)).unwrap();
        stream.set_write_timeout(Some(STUCK)).unwrap();
        Raw(stream)
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    /// Of one who takes shards as they are, unless `fields` say otherwise.
    pub fn request(&mut self, method: &str, path: &str, fields: &str, body: &[u8]) {
        let length = body.len();
        let accepts = if fields.contains("Accept: ") { "" } else { TAKES_SHARDS };
        let head =
            format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{accepts}{fields}\r\n");
        self.send(&[head.as_bytes(), body].concat());
    }

    pub fn answer(&mut self) -> Answer {
        self.answer_to("GET")
    }

    pub fn answer_to(&mut self, method: &str) -> Answer {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            self.0.read_exact(&mut byte).expect("the head of an answer");
            head.push(byte[0]);
        }
        let head = String::from_utf8(head).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let mut answer = Answer { status, head, body: Vec::new() };
        if method != "HEAD" && status >= 200 {
            let length = answer.field("Content-Length").unwrap().parse().unwrap();
            answer.body = vec![0; length];
            self.0.read_exact(&mut answer.body).expect("the body of an answer");
        }
        answer
    }

    /// Whether the other side closes without another word.
    pub fn is_closed(&mut self) -> bool {
        match self.0.read(&mut [0]) {
            Ok(read) => read == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn field(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (field, value) = line.split_once(": ")?;
            field.eq_ignore_ascii_case(name).then_some(value)
        })
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }
}

pub fn meta(dtype: &str, shape: &[u64]) -> TensorMeta {
    TensorMeta::new(Dtype::from_name(dtype).unwrap(), shape).unwrap()
}

/// A shard as it travels, written after the table in the documentation.
pub fn shard(meta: &TensorMeta, bytes: &[u8]) -> Vec<u8> {
    let shape = meta.shape();
    let mut body = b"TSHD".to_vec();
    body.extend([1, meta.dtype().code(), shape.len() as u8, 0]);
    body.extend((bytes.len() as u64).to_le_bytes());
    body.extend(crc64_nvme(bytes).to_le_bytes());
    shape.iter().for_each(|size| body.extend(size.to_le_bytes()));
    body.extend(bytes);
    body
}

/// CRC-64/NVME bit by bit, as the catalogue of parametrised CRC algorithms defines it.
pub fn crc64_nvme(bytes: &[u8]) -> u64 {
    let step = |crc: u64| if crc & 1 == 1 { (crc >> 1) ^ 0x9a6c_9329_ac4b_c9b5 } else { crc >> 1 };
    let next = |crc: u64, byte: &u8| (0..8).fold(crc ^ u64::from(*byte), |crc, _| step(crc));
    !bytes.iter().fold(u64::MAX, next)
}

/// Waits until something holds.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = std::time::Instant::now() + STUCK;
    while !holds() {
        assert!(std::time::Instant::now() < end, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

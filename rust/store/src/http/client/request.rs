//! Requests, and small responses.

use std::io::IoSlice;
use std::sync::Arc;

use super::connection::{Connection, ConnectionFailure};
use super::response_head::ResponseHead;
use crate::error::StoreError;
use crate::http::NODE_FIELD;
use crate::http::media_type::MediaType;
use crate::http::token::Token;
use crate::time_limit::TimeLimit;

/// Bytes of an answer that is read as a whole, beside ids that it repeats.
const MOST_READ: u64 = 1 << 20;

/// A response may repeat the names in a request twice: as missing and as removed.
const MOST_REPEATED: u64 = 2;

/// A request to an owner.
pub(super) struct HttpRequest<'a> {
    pub(super) method: &'a str,
    pub(super) path: &'a str,
    pub(super) accepts: MediaType,
    /// The form of the body, where there is one.
    pub(super) content: Option<MediaType>,
    /// Parts of the body, one behind the other.
    pub(super) body: &'a [&'a [u8]],
    /// The node that this process says it runs on.
    pub(super) node: Option<&'a str>,
}

impl<'a> HttpRequest<'a> {
    /// One whose answer is JSON.
    pub(super) fn new(method: &'a str, path: &'a str, body: &'a [&'a [u8]]) -> Self {
        let content = (!body.is_empty()).then_some(MediaType::Json);
        HttpRequest { method, path, accepts: MediaType::Json, content, body, node: None }
    }

    /// Bytes of the body.
    fn length(&self) -> usize {
        self.body.iter().map(|part| part.len()).sum()
    }

    /// Sends it.
    pub(super) fn send(
        &self,
        connection: &mut Connection,
        owner: &str,
        token: Option<&Token>,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(), ConnectionFailure> {
        let (method, path, accepts) = (self.method, self.path, self.accepts.name());
        let length = self.length();
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {owner}\r\nAccept: {accepts}\r\n");
        if let Some(content) = self.content {
            head += &format!("Content-Type: {}\r\n", content.name());
        }
        if self.method != "GET" {
            head += &format!("Content-Length: {length}\r\n");
        }
        if let Some(node) = self.node {
            head += &format!("{}: {node}\r\n", NODE_FIELD);
        }
        if let Some(token) = token {
            head += &format!("Authorization: {}\r\n", token.header());
        }
        head += "\r\n";
        let mut parts: Vec<_> = [head.as_bytes()].iter().chain(self.body).map(|part| IoSlice::new(part)).collect();
        connection.send(&mut parts, time_limit)
    }
}

/// The body of an answer to `request` that is small.
pub(super) fn read_small(
    connection: &mut Connection,
    head: &ResponseHead,
    request: &HttpRequest<'_>,
    owner: &Arc<str>,
    time_limit: &mut TimeLimit<'_>,
) -> Result<Vec<u8>, ConnectionFailure> {
    if head.content_length > MOST_READ + MOST_REPEATED * request.length() as u64 {
        let length = head.content_length;
        return Err(ConnectionFailure::Final(unusable_answer(
            owner,
            head.status,
            &format!("it announces an answer of {length} bytes"),
        )));
    }
    connection.collect(head.content_length, time_limit)
}

/// The error of an unusable response.
pub(super) fn unusable_answer(owner: &Arc<str>, status: u16, reason: &str) -> StoreError {
    StoreError::Refused { owner: Arc::clone(owner), status, reason: format!("its answer cannot be used: {reason}") }
}

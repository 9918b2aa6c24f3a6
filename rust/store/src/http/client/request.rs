//! `HttpRequest`: a request to an owner.

use std::io::IoSlice;

use super::connection::{Connection, ConnectionFailure};
use crate::http::NODE_FIELD;
use crate::http::media_type::MediaType;
use crate::http::token::Token;
use crate::time_limit::TimeLimit;

/// A request to an owner.
pub(super) struct HttpRequest<'a> {
    pub(super) method: &'a str,
    pub(super) path: &'a str,
    pub(super) accepts: MediaType,
    /// The body, in JSON; empty for none.
    pub(super) body: &'a [u8],
    /// The node that this process says it runs on.
    pub(super) node: Option<&'a str>,
}

impl<'a> HttpRequest<'a> {
    /// One whose answer is JSON.
    pub(super) fn new(method: &'a str, path: &'a str, body: &'a [u8]) -> Self {
        HttpRequest { method, path, accepts: MediaType::Json, body, node: None }
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
        let length = self.body.len();
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {owner}\r\nAccept: {accepts}\r\n");
        if length > 0 {
            head += &format!("Content-Type: {}\r\n", MediaType::Json.name());
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
        connection.send(&mut [IoSlice::new(head.as_bytes()), IoSlice::new(self.body)], time_limit)
    }
}

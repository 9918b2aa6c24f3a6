//! The body of a request: read as a whole where it is JSON, or into the memory where its shard is stored.

use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use hyper::body::{Body, Bytes, Incoming};
use tokio::time::timeout_at;

use super::connections::{Connection, WaitsFor};
use super::request_memory::{Reserved, reserve};
use super::timeouts::Timeouts;
use crate::checksum::Checksum;
use crate::http::refusal::Refusal;

/// Bytes of the longest body of JSON.
const LONGEST_JSON: u64 = 64 << 20;

/// Why a request is not answered as it asks.
#[derive(Debug)]
pub(super) enum Failure {
    /// It is refused.
    Refused(Refusal),
    /// The client is gone, or too slow: the connection is closed.
    Aborted,
}

impl<T: Into<Refusal>> From<T> for Failure {
    fn from(refusal: T) -> Self {
        Failure::Refused(refusal.into())
    }
}

pub(super) struct RequestBody {
    incoming: Incoming,
    /// What was received and is not used yet.
    rest: Bytes,
    connection: Arc<Connection>,
    timeouts: Timeouts,
}

impl RequestBody {
    pub(super) fn new(incoming: Incoming, connection: &Arc<Connection>, timeouts: Timeouts) -> Self {
        RequestBody { incoming, rest: Bytes::new(), connection: Arc::clone(connection), timeouts }
    }

    /// Bytes that the client announced.
    pub(super) fn length(&self) -> u64 {
        self.incoming.size_hint().exact().unwrap_or_default() + self.rest.len() as u64
    }

    /// The whole body, which is JSON, and the memory that is reserved for it and what is made of it.
    pub(super) async fn json(&mut self) -> Result<(Vec<u8>, Reserved), Failure> {
        let length = self.length();
        if length > LONGEST_JSON {
            let most = format!("a body of JSON has at most {LONGEST_JSON} bytes, not {length}");
            return Err(Refusal::new(413, most).into());
        }
        let reserved = reserve(length, self.timeouts.silence).await?;
        // It grows with what comes, not with what is announced.
        let mut body = Vec::new();
        self.connection.set(WaitsFor::Body(Instant::now()));
        while (body.len() as u64) < length {
            body.extend_from_slice(&self.next(self.timeouts.with_space()).await?);
        }
        self.connection.set(WaitsFor::Server);
        Ok((body, reserved))
    }

    /// The value that `parse` finds in the beginning of the body, which has at most `longest` bytes.
    pub(super) async fn beginning<T>(
        &mut self,
        longest: usize,
        parse: impl Fn(&[u8]) -> Result<Option<(T, usize)>, Refusal>,
    ) -> Result<T, Failure> {
        let mut begun = Vec::new();
        self.connection.set(WaitsFor::Body(Instant::now()));
        loop {
            if let Some((parsed, length)) = parse(&begun[..begun.len().min(longest)])? {
                begun.drain(..length);
                self.rest = begun.into();
                return Ok(parsed);
            }
            if begun.len() >= longest || self.length() == 0 {
                return Err(Refusal::new(400, "the body ends within the header of a shard").into());
            }
            begun.extend_from_slice(&self.next(self.timeouts.silence).await?);
        }
    }

    /// Fills `target`, for which space in the store is reserved, with the next bytes, and returns their checksum.
    pub(super) async fn fill(&mut self, target: &mut [u8]) -> Result<u64, Failure> {
        let mut checksum = Checksum::new();
        let mut filled = 0;
        self.connection.set(WaitsFor::Body(Instant::now()));
        while filled < target.len() {
            let mut some = if self.rest.is_empty() {
                self.next(self.timeouts.with_space()).await?
            } else {
                std::mem::take(&mut self.rest)
            };
            self.rest = some.split_off(some.len().min(target.len() - filled));
            target[filled..filled + some.len()].copy_from_slice(&some);
            // While they are in the processor's cache.
            checksum.update(&some);
            filled += some.len();
        }
        self.connection.set(WaitsFor::Server);
        Ok(checksum.value())
    }

    /// The next bytes, if the client goes on sending.
    async fn next(&mut self, silence: Duration) -> Result<Bytes, Failure> {
        loop {
            let deadline = (self.connection.last_of_body() + silence).into();
            match timeout_at(deadline, self.incoming.frame()).await {
                Ok(Some(Ok(frame))) => {
                    if let Ok(bytes) = frame.into_data() {
                        return Ok(bytes);
                    }
                }
                Ok(_) | Err(_) => return Err(Failure::Aborted),
            }
        }
    }
}

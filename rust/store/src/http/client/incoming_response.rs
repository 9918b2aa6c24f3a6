//! `IncomingResponse`: a response whose body is received piece by piece.
//!
//! Invariant: no piece is kept while the next one is received, so that hyper uses one buffer for all of them.

use http_body_util::BodyExt;
use hyper::body::{Body, Bytes, Incoming};

use super::connection::{Connection, ConnectionFailure, with_causes};
use crate::checksum::RunningChecksum;
use crate::error::StoreError;
use crate::http::shard_header::ShardHeader;
use crate::time_limit::TimeLimit;

/// A response whose body is received piece by piece.
pub(super) struct IncomingResponse<'a> {
    pub(super) status: u16,
    body: Incoming,
    /// Bytes that were received and not taken yet.
    piece: Bytes,
    connection: &'a mut Connection,
}

impl<'a> IncomingResponse<'a> {
    /// `body` tells its length.
    pub(super) fn new(status: u16, body: Incoming, connection: &'a mut Connection) -> Self {
        IncomingResponse { status, body, piece: Bytes::new(), connection }
    }

    /// Bytes of the body that were not taken yet.
    pub(super) fn left(&self) -> u64 {
        self.body.size_hint().exact().unwrap_or(0) + self.piece.len() as u64
    }

    /// The next piece of the body.
    fn receive(&mut self, time_limit: &mut TimeLimit<'_>) -> Result<Bytes, ConnectionFailure> {
        let ended = |reason: &str| {
            ConnectionFailure::Broken(format!("the connection ended in the middle of an answer: {reason}"))
        };
        match self.connection.run(self.body.frame(), time_limit)? {
            Some(Ok(frame)) => frame.into_data().map_err(|_| ended("trailers came in place of bytes")),
            Some(Err(error)) => Err(ended(&with_causes(&error))),
            None => Err(ended("no more bytes")),
        }
    }

    /// The header of the next shard; what `corrupt` makes of the reason if there is none.
    pub(super) fn shard_header(
        &mut self,
        corrupt: impl Fn(String) -> StoreError,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<ShardHeader, ConnectionFailure> {
        loop {
            match ShardHeader::read(&self.piece).map_err(|error| corrupt(error.to_string()))? {
                Some((header, length)) => {
                    let _ = self.piece.split_to(length);
                    return Ok(header);
                }
                None if self.piece.len() as u64 == self.left() => {
                    return Err(corrupt("its header does not end".to_owned()).into());
                }
                None => {
                    let begun = std::mem::take(&mut self.piece).to_vec();
                    self.piece = [&begun[..], &self.receive(time_limit)?[..]].concat().into();
                }
            }
        }
    }

    /// Fills `target` with the next bytes, and returns their checksum.
    pub(super) fn fill(&mut self, target: &mut [u8], time_limit: &mut TimeLimit<'_>) -> Result<u64, ConnectionFailure> {
        let (mut checksum, mut rest) = (RunningChecksum::new(), target);
        while !rest.is_empty() {
            if self.piece.is_empty() {
                self.piece = self.receive(time_limit)?;
            }
            let bytes = self.piece.split_to(rest.len().min(self.piece.len()));
            let (filled, unfilled) = rest.split_at_mut(bytes.len());
            filled.copy_from_slice(&bytes);
            checksum.update(filled);
            rest = unfilled;
        }
        Ok(checksum.value())
    }

    /// The rest of the body.
    pub(super) fn collect(mut self, time_limit: &mut TimeLimit<'_>) -> Result<Vec<u8>, ConnectionFailure> {
        let mut collected = std::mem::take(&mut self.piece).to_vec();
        while self.left() > 0 {
            collected.extend_from_slice(&self.receive(time_limit)?);
        }
        Ok(collected)
    }
}

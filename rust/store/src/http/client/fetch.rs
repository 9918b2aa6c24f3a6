//! Fetches a batch of shards from one owner.
//!
//! Shards arrive in the order in which they were asked for, so that after a failure the end of the list is left.
//!
//! Invariant: a shard is complete only when its checksum was found right.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use hyper::header::{ACCEPT, HeaderValue};
use tundish_shm::ShmError;

use super::Client;
use super::connection::json_request;
use super::connection::{Connection, ConnectionFailure};
use super::incoming_response::IncomingResponse;
use crate::error::{MissingShard, StoreError};
use crate::fetch::{FetchReceiver, Transport};
use crate::http::json::{self, ErrorAnswer};
use crate::http::route::MediaType;
use crate::http::shard_header::Payload;
use crate::http::{NODE_FIELD, this_node};
use crate::selection::ShardRows;
use crate::time_limit::TimeLimit;

/// Tries of a request that fails each time.
const MAX_FAILURES: u32 = 3;

/// Bytes of an error answer that are read, beside the ids that it repeats.
const MAX_ERROR_BYTES: u64 = 1 << 20;

/// An error answer may repeat the ids of a request twice: as missing and as removed.
const MAX_ID_REPEATS: u64 = 2;

/// Before the next try.
const PAUSE: Duration = Duration::from_millis(50);

/// The rest of a batch.
struct BatchFetch<'a, 'b> {
    owner: &'a Arc<str>,
    wanted: &'a [ShardRows],
    /// Shards that have arrived.
    done: usize,
    receiver: &'a mut FetchReceiver<'b>,
}

/// The failure of a batch.
enum FetchFailure {
    ConnectionFailure(ConnectionFailure),
    /// Memory that was referred to cannot be reached; whether any of that owner's can.
    MemoryUnreachable(bool),
}

impl<T: Into<ConnectionFailure>> From<T> for FetchFailure {
    fn from(failure: T) -> Self {
        FetchFailure::ConnectionFailure(failure.into())
    }
}

impl Transport for Client {
    fn fetch(
        &self,
        owner: &Arc<str>,
        wanted: &[ShardRows],
        receiver: &mut FetchReceiver<'_>,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(), StoreError> {
        let mut batch = BatchFetch { owner, wanted, done: 0, receiver };
        // Failures since something came last.
        let mut failures = 0;
        let mut reads_memory = self.reads_memory && !self.is_unreachable(owner);
        while batch.done < wanted.len() {
            let before = batch.done;
            let outcome =
                self.take_or_open(owner, time_limit).map_err(FetchFailure::from).and_then(|mut connection| {
                    self.fetch_some(&mut connection, &mut batch, reads_memory, time_limit)?;
                    self.idle_connections.give_back(owner, connection);
                    Ok(())
                });
            if batch.done > before {
                failures = 0;
            }
            match outcome {
                Ok(()) => {}
                // Once: references that were not asked for are refused.
                Err(FetchFailure::MemoryUnreachable(is_all)) => {
                    reads_memory = false;
                    if is_all {
                        self.unreachable.lock().unwrap_or_else(PoisonError::into_inner).insert(Arc::clone(owner));
                    }
                }
                Err(FetchFailure::ConnectionFailure(failure)) => {
                    // Connections that wait lead to the same process.
                    self.idle_connections.forget(owner);
                    failures += 1;
                    if failures == MAX_FAILURES || !matches!(failure, ConnectionFailure::Broken(_)) {
                        let id = &wanted[batch.done.min(wanted.len() - 1)].id;
                        return Err(failure.into_error(owner, Some(id)));
                    }
                    std::thread::sleep(PAUSE);
                }
            }
        }
        Ok(())
    }
}

impl Client {
    fn is_unreachable(&self, owner: &Arc<str>) -> bool {
        self.unreachable.lock().unwrap_or_else(PoisonError::into_inner).contains(owner)
    }

    /// Asks once for the rest, or as much of it as one request may name.
    fn fetch_some(
        &self,
        connection: &mut Connection,
        batch: &mut BatchFetch<'_, '_>,
        reads_memory: bool,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(), FetchFailure> {
        let end = batch.wanted.len().min(batch.done + json::MAX_IDS);
        let body = json::batch_body(&batch.wanted[batch.done..end]);
        let longest_error = MAX_ERROR_BYTES + MAX_ID_REPEATS * body.len() as u64;
        let token = self.trusted(batch.owner).token;
        let mut request = json_request(batch.owner, token.as_ref(), "POST", "/data/batch", body)?;
        request.headers_mut().insert(ACCEPT, HeaderValue::from_static(MediaType::Shards.name()));
        let node = if reads_memory { this_node() } else { None };
        if let Some(node) = node {
            request.headers_mut().insert(NODE_FIELD, HeaderValue::from_static(node));
        }
        let response = connection.send(request, time_limit)?;
        if response.status != 200 {
            let (status, length) = (response.status, response.left());
            if length > longest_error {
                let reason = format!("its answer of {length} bytes is too long to be read");
                return Err(StoreError::Refused { owner: Arc::clone(batch.owner), status, reason }.into());
            }
            return Err(self.refusal(batch.owner, status, &response.collect(time_limit)?).into());
        }
        batch.receive(response, end, node.is_some(), time_limit)
    }
}

impl BatchFetch<'_, '_> {
    /// Receives the shards up to `end`.
    fn receive(
        &mut self,
        mut response: IncomingResponse<'_>,
        end: usize,
        takes_references: bool,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(), FetchFailure> {
        while self.done < end {
            let id = &self.wanted[self.done].id;
            let corrupt =
                |reason: String| StoreError::Corrupt { id: id.clone(), owner: Arc::clone(self.owner), reason };
            let header = response.shard_header(corrupt, time_limit)?;
            match header.payload {
                Payload::Bytes(checksum) => {
                    if response.left() < header.meta.nbytes() {
                        return Err(corrupt("the answer is shorter than what it holds".to_owned()).into());
                    }
                    let space = self.receiver.space(self.done, &header.meta, time_limit)?;
                    if response.fill(space, time_limit)? != checksum {
                        return Err(corrupt("its checksum is another one".to_owned()).into());
                    }
                    self.receiver.complete(self.done)?;
                }
                Payload::SegmentRange(_) if !takes_references => {
                    return Err(corrupt("it was to be sent, and a reference to it came".to_owned()).into());
                }
                Payload::SegmentRange(reference) => match self.receiver.attach(self.done, &header.meta, &reference) {
                    Err(StoreError::Memory(error)) => return Err(FetchFailure::MemoryUnreachable(is_for_good(&error))),
                    attached => attached?,
                },
            }
            self.done += 1;
        }
        Ok(())
    }
}

/// Whether memory of an owner cannot be reached at all. A segment that was given back meanwhile says nothing about the
/// others; that this process has no descriptors or addresses left, passes.
fn is_for_good(error: &ShmError) -> bool {
    !matches!(error, ShmError::Gone { .. }) && !error.is_shortage()
}

/// The shards that an answer says are missing.
pub(super) fn missing(refused: &ErrorAnswer) -> Vec<MissingShard> {
    let removed: HashSet<&String> = refused.removed_shard_ids.iter().collect();
    let shards = refused.missing_shard_ids.iter().filter_map(|name| {
        let id = name.parse().ok()?;
        Some(MissingShard { id, was_removed: removed.contains(name) })
    });
    shards.collect()
}

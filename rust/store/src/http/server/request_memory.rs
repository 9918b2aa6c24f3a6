//! Bounds the memory that all requests together take beside that of the shards that they name.
//!
//! Memory is reserved before it is used, and for as long as any of it is in use. Requests that take little are not
//! counted: there are no more of them than connections.

use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::http::json;
use crate::http::refusal::Refusal;

/// Bytes for all requests together.
const LIMIT: usize = 256 << 20;

/// Bytes that one name in a body takes at most: read, looked up, and answered.
const PER_NAME: usize = 512;

/// Bytes of the shortest name in a list: `"a",`.
const SHORTEST_NAME: usize = 4;

/// A request that takes no more than this is not counted.
const UNCOUNTED: usize = 64 << 10;

static FREE: Semaphore = Semaphore::const_new(LIMIT >> 10);

/// Memory that is reserved as long as this lives.
#[derive(Debug)]
pub(super) struct Reserved {
    _permit: Option<SemaphorePermit<'static>>,
}

/// Reserves the memory for a body of JSON of `length` bytes, and for what is made of the names in it.
///
/// # Errors
/// 503 where so much is not free for `longest`.
pub(super) async fn reserve(length: u64, longest: Duration) -> Result<Reserved, Refusal> {
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    let names = (length / SHORTEST_NAME).min(json::MOST_IDS);
    let bytes = length.saturating_add(names * PER_NAME);
    if bytes <= UNCOUNTED {
        return Ok(Reserved { _permit: None });
    }
    let permit = FREE.acquire_many(u32::try_from(bytes >> 10).unwrap_or(u32::MAX));
    match timeout(longest, permit).await {
        Ok(Ok(permit)) => Ok(Reserved { _permit: Some(permit) }),
        _ => Err(Refusal::new(503, "too many large requests came at the same time; ask again")),
    }
}

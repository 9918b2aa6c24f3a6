//! Memory that requests take beside that of the shards that they are about.
//!
//! What always holds: it was set aside before it is taken, and is kept aside until nothing of it is left; all requests
//! together have no more of it than this. Those that take little are not counted: there are no more of them than
//! connections.

use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::http::json;
use crate::http::refusal::Refusal;

/// Of bodies that are read as a whole.
const OF_BODIES: usize = 256 << 20;

/// Of what is made of the names in them, up to the last byte of the answer.
const OF_LISTS: usize = 256 << 20;

/// Each name comes to this much at most: what is read, what is looked up, and what is answered.
const A_NAME: usize = 512;

/// What takes no more is not counted.
const LITTLE: usize = 64 << 10;

static BODIES: Semaphore = Semaphore::const_new(OF_BODIES >> 10);
static LISTS: Semaphore = Semaphore::const_new(OF_LISTS >> 10);

/// Memory that is set aside as long as this lives.
#[derive(Debug)]
pub(super) struct Aside {
    _permit: Option<SemaphorePermit<'static>>,
}

/// For a body of so many bytes.
pub(super) async fn for_body(bytes: u64, longest: Duration) -> Result<Aside, Refusal> {
    of(&BODIES, usize::try_from(bytes).unwrap_or(usize::MAX), longest).await
}

/// For what is made of the names in this body. Whoever waits for it has the room for the body already, and who has it
/// waits for nothing more: so it is had in the end.
pub(super) async fn for_names(body: &[u8], longest: Duration) -> Result<Aside, Refusal> {
    let names = 1 + body.iter().filter(|byte| **byte == b',').count();
    of(&LISTS, names.min(json::MOST_IDS) * A_NAME, longest).await
}

async fn of(room: &'static Semaphore, bytes: usize, longest: Duration) -> Result<Aside, Refusal> {
    if bytes <= LITTLE {
        return Ok(Aside { _permit: None });
    }
    let permit = room.acquire_many(u32::try_from(bytes >> 10).unwrap_or(u32::MAX));
    match timeout(longest, permit).await {
        Ok(Ok(permit)) => Ok(Aside { _permit: Some(permit) }),
        _ => Err(Refusal::new(503, "too many large requests came at the same time; ask again")),
    }
}

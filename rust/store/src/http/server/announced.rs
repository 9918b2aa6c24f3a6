//! What senders have announced: room was taken for it, and it has not all come.
//!
//! What always holds: beside the one that came first, all of it together is no more than a part of the store's limit.
//! However many announce much and send nothing, the rest of the store is for those who store and send.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// This part of the limit.
const PART: u64 = 4;

#[derive(Debug, Default)]
pub(super) struct Announced(Mutex<u64>);

/// Bytes that are announced, until all of them have come or nobody waits for them any more.
#[derive(Debug)]
pub(super) struct Awaited {
    announced: Arc<Announced>,
    bytes: u64,
}

impl Announced {
    /// `None` where so many more are not waited for now.
    pub(super) fn add(self: &Arc<Self>, bytes: u64, limit: u64) -> Option<Awaited> {
        let mut sum = self.lock();
        if *sum > 0 && sum.saturating_add(bytes) > limit / PART {
            return None;
        }
        *sum = sum.saturating_add(bytes);
        Some(Awaited { announced: Arc::clone(self), bytes })
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        let mut sum = self.announced.lock();
        *sum = sum.saturating_sub(self.bytes);
    }
}

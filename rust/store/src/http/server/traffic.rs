//! What a server counts.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};

/// What a server counts.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    pub(super) sent_bytes: AtomicU64,
    pub(super) received_bytes: AtomicU64,
    pub(super) connections: AtomicU64,
    answers: Mutex<BTreeMap<u16, u64>>,
}

impl Traffic {
    pub(super) fn answered(&self, status: u16) {
        *self.answers.lock().unwrap_or_else(PoisonError::into_inner).entry(status).or_default() += 1;
    }

    /// How many answers of each status.
    pub(super) fn answers(&self) -> BTreeMap<u16, u64> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn value(count: &AtomicU64) -> u64 {
        count.load(Relaxed)
    }
}

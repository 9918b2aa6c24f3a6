//! A locked state, and work on many of its entries in chunks.
//!
//! Invariants:
//!
//! - No thread works on more than [`CHUNK_LEN`] entries with the lock held: a drain of a million shards does not stall a
//!   fetch.
//! - Entries are dropped after the lock is released.

use std::sync::PoisonError;

use crate::entries::sync::{Mutex, MutexGuard, yield_now};

/// The most entries that are worked on with the lock held: some ten microseconds.
pub(crate) const CHUNK_LEN: usize = 128;

pub(crate) fn lock<T>(state: &Mutex<T>) -> MutexGuard<'_, T> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `work` with each chunk of `items`, and returns the results. Between two chunks other threads get the lock.
pub(crate) fn in_chunks<T, I, R>(state: &Mutex<T>, items: &[I], mut work: impl FnMut(&mut T, &[I]) -> R) -> Vec<R> {
    let mut results = Vec::with_capacity(items.len().div_ceil(CHUNK_LEN));
    for chunk in items.chunks(CHUNK_LEN) {
        if !results.is_empty() {
            yield_now();
        }
        results.push(work(&mut lock(state), chunk));
    }
    results
}

/// For a child made by `fork`. If a thread of the parent had the lock, the state is not touched.
pub(crate) fn forget<T>(state: &Mutex<T>, forget: impl FnOnce(&mut T)) {
    if let Ok(mut state) = state.try_lock() {
        forget(&mut state);
    }
}

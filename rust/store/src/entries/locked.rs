//! A locked state, and work on many of its entries in chunks.
//!
//! Invariants:
//!
//! - No thread works on more than [`CHUNK_LEN`] entries with the lock held: a drain of a million shards does not stall a
//!   fetch.
//! - Entries are dropped after the lock is released.

use crate::entries::sync::{StateMutex, lock, try_lock, unlock_fair};

/// The most entries that are worked on with the lock held: some ten microseconds.
pub(crate) const CHUNK_LEN: usize = 128;

/// Calls `work` with each chunk of `items`, and returns the results. Between two chunks a waiting thread gets the lock.
pub(crate) fn in_chunks<T, I, R>(
    state: &StateMutex<T>,
    items: &[I],
    mut work: impl FnMut(&mut T, &[I]) -> R,
) -> Vec<R> {
    let mut results = Vec::with_capacity(items.len().div_ceil(CHUNK_LEN));
    for chunk in items.chunks(CHUNK_LEN) {
        let mut locked = lock(state);
        results.push(work(&mut locked, chunk));
        unlock_fair(locked);
    }
    results
}

/// For a child made by `fork`. If a thread of the parent had the lock, the state is not touched.
pub(crate) fn forget<T>(state: &StateMutex<T>, forget: impl FnOnce(&mut T)) {
    if let Some(mut state) = try_lock(state) {
        forget(&mut state);
    }
}

//! A fair lock: a thread works on many items in chunks, and waiting threads get the lock between two chunks.
//!
//! Draining a million shards must not stall a fetch. With a plain mutex, the draining thread mostly gets the lock back
//! before any other thread.
//!
//! Invariant: no thread works on more than [`CHUNK_LEN`] entries with the lock held.

use std::sync::PoisonError;

use crate::entries::sync::{AtomicUsize, Mutex, MutexGuard, Ordering, yield_now};

/// The most entries that are worked on with the lock held: some ten microseconds.
pub(crate) const CHUNK_LEN: usize = 128;

/// A mutex that does not starve waiting threads while another one works in chunks.
pub(crate) struct FairLock<T> {
    state: Mutex<T>,
    waiting: AtomicUsize,
}

impl<T> FairLock<T> {
    pub(crate) fn new(state: T) -> Self {
        FairLock { state: Mutex::new(state), waiting: AtomicUsize::new(0) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        state
    }

    /// For a child made by `fork`. If a thread of the parent had the lock, the state is not touched.
    pub(crate) fn forget(&self, forget: impl FnOnce(&mut T)) {
        if let Ok(mut state) = self.state.try_lock() {
            forget(&mut state);
        }
    }

    /// Calls `work` with each chunk of `items`, and returns the results. Between two chunks all waiting threads get the
    /// lock.
    pub(crate) fn in_chunks<I, R>(&self, items: &[I], mut work: impl FnMut(&mut T, &[I]) -> R) -> Vec<R> {
        let mut results = Vec::with_capacity(items.len().div_ceil(CHUNK_LEN));
        for chunk in items.chunks(CHUNK_LEN) {
            self.yield_to_waiting();
            results.push(work(&mut self.lock(), chunk));
        }
        results
    }

    /// Yields until no thread waits for the lock, at most `MAX_YIELDS` times.
    fn yield_to_waiting(&self) {
        /// Limited, because there may be many waiting threads, and they may wait again.
        const MAX_YIELDS: usize = 1000;

        for _ in 0..MAX_YIELDS {
            if self.waiting.load(Ordering::SeqCst) == 0 {
                break;
            }
            yield_now();
        }
    }
}

//! A fair lock: a thread with much to do works in turns, and threads that wait get the lock between two of them.
//!
//! Draining a million shards must not stall a fetch. With a plain mutex, the draining thread mostly gets the lock back
//! before any other thread.
//!
//! Invariant: no thread works on more than [`TURN`] entries with the lock held.

use std::sync::PoisonError;

use crate::entries::sync::{AtomicUsize, Mutex, MutexGuard, Ordering, yield_now};

/// Entries that are worked on with the lock held, at most: some ten microseconds.
pub(crate) const TURN: usize = 128;

/// A lock with turns.
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

    /// Works on `items` in turns. Between two turns all waiting threads get the lock.
    pub(crate) fn in_turns<I, R>(&self, items: &[I], mut turn: impl FnMut(&mut T, &[I]) -> R) -> Vec<R> {
        let mut results = Vec::with_capacity(items.len().div_ceil(TURN));
        for some in items.chunks(TURN) {
            self.pass();
            results.push(turn(&mut self.lock(), some));
        }
        results
    }

    /// Yields until no thread waits for the lock, at most `PATIENCE` times.
    fn pass(&self) {
        /// There may be many waiting threads, and they may come back.
        const PATIENCE: usize = 1000;

        for _ in 0..PATIENCE {
            if self.waiting.load(Ordering::SeqCst) == 0 {
                break;
            }
            yield_now();
        }
    }
}

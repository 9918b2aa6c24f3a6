//! The sources of the crate's module `entries`, compiled over the locks of loom, the model checker.

#[path = "../../src/entries/by_step.rs"]
pub(crate) mod by_step;
#[path = "../../src/entries/fetch_buffer.rs"]
pub(crate) mod fetch_buffer;
#[path = "../../src/entries/locked.rs"]
pub(crate) mod locked;
#[path = "../../src/entries/storage.rs"]
pub(crate) mod storage;

pub(crate) mod sync {
    use std::sync::PoisonError;

    pub(crate) use loom::sync::{Condvar, Mutex, Mutex as StateMutex, MutexGuard as StateGuard};

    pub(crate) fn lock<T>(state: &StateMutex<T>) -> StateGuard<'_, T> {
        state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn try_lock<T>(state: &StateMutex<T>) -> Option<StateGuard<'_, T>> {
        state.try_lock().ok()
    }

    pub(crate) fn unlock_fair<T>(state: StateGuard<'_, T>) {
        drop(state);
        loom::thread::yield_now();
    }
}

//! Synchronization primitives. The model checker of `tests/races` replaces them.

pub(crate) use parking_lot::{Mutex as StateMutex, MutexGuard as StateGuard};
pub(crate) use std::sync::{Condvar, Mutex};

pub(crate) fn lock<T>(state: &StateMutex<T>) -> StateGuard<'_, T> {
    state.lock()
}

pub(crate) fn try_lock<T>(state: &StateMutex<T>) -> Option<StateGuard<'_, T>> {
    state.try_lock()
}

/// Hands the lock to the thread that waits longest, if any does. After a plain unlock, a thread that locks again at once
/// mostly gets it before one that has to be woken.
pub(crate) fn unlock_fair<T>(state: StateGuard<'_, T>) {
    StateGuard::unlock_fair(state);
}

//! Synchronization primitives. The model checker of `tests/races` replaces them.

pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
pub(crate) use std::thread::yield_now;

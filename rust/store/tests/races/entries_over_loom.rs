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
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
    pub(crate) use loom::thread::yield_now;
}

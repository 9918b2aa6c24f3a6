//! The stored and the fetched shards, by the step that they end with. This module knows nothing of their bytes.

pub(crate) mod by_step;
pub(crate) mod fair_lock;
pub(crate) mod fetch_buffer;
pub(crate) mod in_flight;
pub(crate) mod storage;
pub(crate) mod sync;

// Not in `fair_lock.rs`, which the model checker of `tests/races` compiles with locks of its own.
#[cfg(test)]
mod fair_lock_tests;

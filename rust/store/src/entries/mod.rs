//! The stored and the fetched shards, by the step that they end with. This module knows nothing of their bytes.

pub(crate) mod by_step;
pub(crate) mod fetch_buffer;
pub(crate) mod locked;
pub(crate) mod storage;
pub(crate) mod sync;

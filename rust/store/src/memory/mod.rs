//! The memory of shards: slabs of shared memory of this process, and attached segments of others.

pub(crate) mod attached_segments;
pub(crate) mod fetched_tensor;
pub(crate) mod slab;
pub(crate) mod slab_pool;
pub(crate) mod tensor;

//! The memory of shards: slabs of shared memory of this process, and attached segments of others.

pub(crate) mod attached_segments;
pub(crate) mod borrowed_tensors;
pub(crate) mod drop_thread;
pub(crate) mod fetched_tensor;
pub(crate) mod segment_range;
pub(crate) mod slab;
pub(crate) mod slab_pool;
pub(crate) mod tensor;

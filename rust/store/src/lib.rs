//! Tensor shards: stored by the process that owns them, fetched and buffered by those that use them.
//!
//! A [`TensorStore`] holds, as an owner, shards that were put into it; as a consumer it keeps the shards that it fetched
//! in a buffer. A process may have several.
//!
//! Invariants:
//!
//! 1. Every byte belongs to a step or counts as unclaimed. A drained step holds nothing: late arrivals are refused and
//!    counted.
//! 2. Memory is bounded in bytes on both sides. A caller at the limit waits, and then gets an error; no living entry is
//!    evicted.
//! 3. Tensors handed out are copy-on-write: no consumer sees what another one, or the owner, writes. Memory is used
//!    again only when its last view, in whichever process, has ended.
//! 4. A child made by `fork` does not use the stores of its parent: it forgets them, and makes its own.

#![deny(unsafe_code)]

mod checksum;
mod entries;
mod error;
mod fetch;
pub mod http;
mod memory;
mod selection;
mod shard_id;
mod stats;
mod step;
mod tensor_meta;
mod tensor_store;
mod time_limit;

pub use checksum::RunningChecksum;
pub use error::{MissingShard, StoreError};
pub use fetch::{FetchReceiver, Transport, Wanted};
pub use memory::attached_segments::SegmentRange;
pub use memory::fetched_tensor::FetchedTensor;
pub use memory::tensor::{OutgoingShard, TensorToStore};
pub use selection::{Selection, ShardRows};
pub use shard_id::{InvalidShardId, ShardId};
pub use stats::{
    BufferStats, Claimed, KeptCounts, Limits, MemoryStats, Number, Removed, Stats, StepStats, StorageStats, Value,
};
pub use step::Step;
pub use tensor_meta::{Dtype, Shape, TensorMeta};
pub use tensor_store::TensorStore;
pub use time_limit::{CheckCancelled, TimeLimit};

/// Begins steps and claims shards. Its claims hold as long as it lives.
pub type Claimant = u64;

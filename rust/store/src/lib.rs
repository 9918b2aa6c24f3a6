//! Tensor shards held for other processes: the bytes of one process, and what it has fetched of others'.
//!
//! A [`Node`] is a process's store. As an owner it holds what was put or sent to it; as a consumer it keeps what it
//! fetched, in a buffer. What always holds:
//!
//! 1. Every byte belongs to an epoch or is counted as unclaimed, and a drained epoch holds nothing: what comes for it
//!    later is refused and counted.
//! 2. Memory is bounded in bytes on both sides. At the limit who asks waits, and then gets an error; nothing that lives
//!    is evicted.
//! 3. What is handed out is copy-on-write: no consumer sees what another one, or the owner, writes. Memory is used
//!    again only when its last view, in whichever process, has ended.
//! 4. A child made by `fork` starts empty.

#![deny(unsafe_code)]

mod attached;
mod buffer;
mod checksum;
mod error;
mod fetch;
mod flight;
pub mod handles;
pub mod http;
mod keeps;
mod landing;
mod meta;
mod node;
mod parts;
mod passage;
mod patience;
mod pool;
mod reaper;
mod shard;
mod slab;
mod slice;
mod stats;
mod storage;
mod sync;
mod tensor;
mod transport;
mod turnstile;
// Not in the module itself, which the model of races compiles with locks of its own.
#[cfg(test)]
#[path = "turnstile/tests.rs"]
mod turnstile_tests;
mod view;

pub use checksum::Checksum;
pub use error::{MissingShard, StoreError};
pub use meta::{Dtype, Meta, Shape};
pub use node::Node;
pub use passage::{Incoming, Outgoing, Source};
pub use patience::{GoOn, Patience};
pub use shard::{Rows, Selection, ShardId};
pub use stats::{Account, BufferStats, Claimed, Dropped, EpochLedger, Kept, Limits, Removed, Stats, StorageStats};
pub use transport::{Receiver, Reference, Service, Transport, Wanted};
pub use view::View;

/// A step, as its controller numbers it. Nothing but equality is asked of the numbers.
pub type Epoch = u64;

/// Who begins epochs and claims shards: as long as it lives, and no longer, do its claims hold.
pub type Claimant = u64;

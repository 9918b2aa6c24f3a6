//! Counts of a process: what it stores, has fetched and may use.

use serde::{Deserialize, Serialize};

use crate::Step;
use crate::shard_id::ShardId;

/// The most bytes that a process holds, on either side: whole slabs, and those that still have a view somewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// For stored shards.
    pub storage_bytes: u64,
    /// For received shards. Shards that are read in the memory of an owner on this node count for the owner.
    pub buffer_bytes: u64,
}

/// The counts of a removal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Removed {
    /// Shards that were named and found in the storage.
    pub cleared_count: u64,
    /// Tensors that they held: one each.
    pub num_tensors: u64,
    /// Bytes that they took.
    pub total_bytes: u64,
}

/// The outcome of a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claimed {
    /// Shards that the step claimed now, without those that it had claimed before.
    pub claimed_count: u64,
    /// Their bytes.
    pub total_bytes: u64,
    /// Shards that are not stored here.
    pub missing: Vec<ShardId>,
    /// Shards of another step.
    pub taken: Vec<ShardId>,
    /// Claimed shards that somebody kept before: other processes may keep fetched entries of them.
    pub kept: Vec<ShardId>,
}

/// The counts of a request to keep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeptCounts {
    /// Shards that a step had claimed.
    pub shards: u64,
    /// Entries that were fetched in a step, or for the next one.
    pub entries: u64,
}

/// The memory of one side: of the storage or of the fetch buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryStats {
    /// The limit.
    pub limit_bytes: u64,
    /// Slabs in use.
    pub used_bytes: u64,
    /// Slabs that were given up while a view of them lived in some process.
    pub escaped_bytes: u64,
    /// Slabs that wait for the next use; they go back to the system when that does not come soon.
    pub idle_bytes: u64,
    /// The largest use so far.
    pub high_water_bytes: u64,
}

/// The counters of a process as an owner.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StorageStats {
    /// Stored shards.
    pub num_entries: u64,
    /// Bytes that they take.
    pub total_bytes: u64,
    /// The largest number of bytes so far.
    pub high_water_bytes: u64,
    /// Shards that no step has claimed.
    pub unclaimed_entries: u64,
    /// Their bytes.
    pub unclaimed_bytes: u64,
    /// Seconds since the oldest of them was stored.
    pub oldest_unclaimed_seconds: f64,
    /// Its memory.
    pub memory: MemoryStats,
}

/// The counters of a process as a consumer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct BufferStats {
    /// Tensors, or rows of them.
    pub num_entries: u64,
    /// Bytes that they take, also in the memory of owners on this node.
    pub total_bytes: u64,
    /// Entries of the current step, or of the next one while there is none.
    pub current_entries: u64,
    /// Their bytes.
    pub current_bytes: u64,
    /// Entries that were kept: they end with no step until they are claimed again.
    pub kept_entries: u64,
    /// Their bytes.
    pub kept_bytes: u64,
    /// The largest number of bytes so far.
    pub high_water_bytes: u64,
    /// Tensors that were found.
    pub hits: u64,
    /// Tensors that had to be fetched.
    pub misses: u64,
    /// Tensors that came after their step had ended or after they were drained by id.
    pub late_inserts_refused: u64,
    /// Tensors that are being fetched.
    pub in_flight: u64,
    /// The step that holds bytes for the longest time.
    pub oldest_step: Option<Step>,
    /// Its memory.
    pub memory: MemoryStats,
}

/// The counts of one step in one process. `stored + fetched = held + freed` always; after its end nothing is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepStats {
    /// The step.
    pub step: Step,
    /// Whether it has ended.
    pub has_ended: bool,
    /// Bytes of stored shards that it claimed.
    pub stored_bytes: u64,
    /// Bytes that were fetched in it.
    pub fetched_bytes: u64,
    /// Bytes that it holds.
    pub held_bytes: u64,
    /// Bytes that it has freed or carried over.
    pub freed_bytes: u64,
    /// Entries that it holds, or held when it ended.
    pub num_entries: u64,
    /// Bytes of tensors that were handed out in it and are in use.
    pub viewed_bytes: u64,
    /// `viewed_bytes` after the end of the step; 0 before.
    pub escaped_bytes: u64,
}

/// All counts of a process.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Stats {
    /// The tensors that the process owns.
    pub storage: StorageStats,
    /// The tensors that it fetched.
    pub buffer: BufferStats,
    /// The step that fetches belong to now.
    pub current_step: Option<Step>,
    /// Every step that has begun or claimed and has not ended, and the last that have, newest last.
    pub steps: Vec<StepStats>,
}

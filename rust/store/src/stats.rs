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

/// One number of a process, as its `/metrics` shows it. The name says the unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Number {
    /// Its name.
    pub name: &'static str,
    /// Its meaning.
    pub help: &'static str,
    /// Its value.
    pub value: Value,
}

/// The value of a [`Number`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// A count that rises and falls.
    Gauge(u64),
    /// A count that only rises.
    Counter(u64),
    /// A time.
    Seconds(f64),
}

impl Stats {
    /// All counts of the process in one flat list.
    pub fn numbers(&self) -> Vec<Number> {
        use Value::{Counter, Gauge, Seconds};

        let Stats { storage, buffer, steps, .. } = self;
        let open = || steps.iter().filter(|step_stats| !step_stats.has_ended);
        let (held, escaped) = (
            open().map(|step_stats| step_stats.held_bytes).sum(),
            steps.iter().map(|step_stats| step_stats.escaped_bytes).sum(),
        );
        let number = |(name, help, value)| Number { name, help, value };
        [
            ("stored_tensors", "Tensors stored", Gauge(storage.num_entries)),
            ("stored_bytes", "Bytes of tensors stored", Gauge(storage.total_bytes)),
            ("stored_high_water_bytes", "The most bytes of tensors ever stored", Gauge(storage.high_water_bytes)),
            ("unclaimed_tensors", "Stored tensors that no step has claimed", Gauge(storage.unclaimed_entries)),
            ("unclaimed_bytes", "Bytes of stored tensors that no step has claimed", Gauge(storage.unclaimed_bytes)),
            (
                "oldest_unclaimed_seconds",
                "Age of the oldest tensor that no step has claimed",
                Seconds(storage.oldest_unclaimed_seconds),
            ),
            ("storage_limit_bytes", "The most memory for stored tensors", Gauge(storage.memory.limit_bytes)),
            ("storage_used_bytes", "Memory in use for stored tensors", Gauge(storage.memory.used_bytes)),
            (
                "storage_escaped_bytes",
                "Memory of stored tensors that was released while a tensor over it lived",
                Gauge(storage.memory.escaped_bytes),
            ),
            ("storage_idle_bytes", "Memory kept for the next stored tensors", Gauge(storage.memory.idle_bytes)),
            (
                "storage_high_water_bytes",
                "The most memory ever in use for stored tensors",
                Gauge(storage.memory.high_water_bytes),
            ),
            ("fetched_tensors", "Tensors in the fetch buffer", Gauge(buffer.num_entries)),
            ("fetched_bytes", "Bytes of tensors in the fetch buffer", Gauge(buffer.total_bytes)),
            (
                "fetched_high_water_bytes",
                "The most bytes of tensors ever in the fetch buffer",
                Gauge(buffer.high_water_bytes),
            ),
            ("kept_tensors", "Fetched tensors that outlive their step", Gauge(buffer.kept_entries)),
            ("kept_bytes", "Bytes of fetched tensors that outlive their step", Gauge(buffer.kept_bytes)),
            ("fetching_tensors", "Tensors being fetched", Gauge(buffer.in_flight)),
            ("buffer_limit_bytes", "The most memory for fetched tensors", Gauge(buffer.memory.limit_bytes)),
            ("buffer_used_bytes", "Memory in use for fetched tensors", Gauge(buffer.memory.used_bytes)),
            (
                "buffer_escaped_bytes",
                "Memory of fetched tensors that was released while a tensor over it lived",
                Gauge(buffer.memory.escaped_bytes),
            ),
            ("buffer_idle_bytes", "Memory kept for the next fetched tensors", Gauge(buffer.memory.idle_bytes)),
            (
                "buffer_high_water_bytes",
                "The most memory ever in use for fetched tensors",
                Gauge(buffer.memory.high_water_bytes),
            ),
            ("buffer_hits", "Tensors that the fetch buffer had", Counter(buffer.hits)),
            ("buffer_misses", "Tensors that had to be fetched", Counter(buffer.misses)),
            (
                "late_tensors_refused",
                "Tensors that came after their step had ended",
                Counter(buffer.late_inserts_refused),
            ),
            ("open_steps", "Steps that have begun and not ended", Gauge(open().count() as u64)),
            ("open_steps_held_bytes", "Bytes that open steps hold", Gauge(held)),
            ("ended_steps_escaped_bytes", "Bytes of tensors that outlived their step", Gauge(escaped)),
        ]
        .map(number)
        .to_vec()
    }
}

//! `TensorStore`: the shards that a store owns, and those that it fetched.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use rustix::rand::{GetRandomFlags, getrandom};
use tundish_copying as copying;
use tundish_shm::{Segment, ShmError, arena};

use crate::entries::fetch_buffer::FetchBuffer;
use crate::entries::storage::Storage;
use crate::error::StoreError;
use crate::memory::attached_segments::AttachedSegments;
use crate::memory::slab::allocate;
use crate::memory::slab_pool::SlabPool;
use crate::memory::tensor::{Location, Tensor};
use crate::memory::tensor::{OutgoingShard, TensorToStore};
use crate::selection::ShardRows;
use crate::shard_id::ShardId;
use crate::stats::{BufferStats, Claimed, KeptCounts, Limits, Removed, Stats, StepStats, StorageStats};
use crate::time_limit::TimeLimit;
use crate::{Claimant, Step};

/// Stores tensors for other stores, and fetches theirs. A process may have several, each with its own shards, fetch
/// buffer, limits, addresses and steps.
pub struct TensorStore {
    pub(crate) storage: Arc<Storage<Tensor>>,
    pub(crate) buffer: FetchBuffer<Tensor>,
    pub(crate) storage_pool: Arc<SlabPool>,
    pub(crate) buffer_pool: Arc<SlabPool>,
    pub(crate) attached_segments: AttachedSegments,
    /// Addresses of this store. Another one may have served at one of them before, or may do so by now.
    pub(crate) own_addresses: Mutex<HashSet<Arc<str>>>,
}

/// Copies of at least so many bytes go past the caches: another process reads them, from a cache of its own.
const UNCACHED_COPY_BYTES: usize = 128 << 10;

/// Threads of one such copy: more do not make memory faster.
const MAX_THREADS: usize = 4;

impl TensorStore {
    /// An empty store.
    ///
    /// # Panics
    /// If the kernel gives no random number, which does not happen.
    pub fn new(limits: Limits) -> Arc<TensorStore> {
        let mut nonce = [0; 8];
        // Eight bytes come whole or not at all.
        rustix::io::retry_on_intr(|| getrandom(&mut nonce, GetRandomFlags::empty())).expect("a random number");
        let storage_pool = SlabPool::new("storage", limits.storage_bytes);
        let buffer_pool = SlabPool::new("fetch buffer", limits.buffer_bytes);
        Arc::new(TensorStore {
            storage: Arc::new(Storage::new(u64::from_ne_bytes(nonce))),
            buffer: FetchBuffer::new(),
            storage_pool,
            buffer_pool,
            attached_segments: AttachedSegments::default(),
            own_addresses: Mutex::default(),
        })
    }

    /// Releases the memory that a child made by `fork` inherited with this store. The child must not use it otherwise:
    /// a thread of the parent may have held one of its locks.
    pub fn forget_inherited(self: &Arc<Self>) {
        self.storage.forget();
        self.buffer.forget();
        self.storage_pool.forget();
        self.buffer_pool.forget();
        // Its destructors take locks.
        std::mem::forget(Arc::clone(self));
    }

    /// Changes the limits of later allocations.
    pub fn set_limits(&self, limits: Limits) {
        self.storage_pool.set_limit(limits.storage_bytes);
        self.buffer_pool.set_limit(limits.buffer_bytes);
    }

    /// Declares `owner` an address of this store. Shards at this address are looked up here instead of fetched, unless
    /// another store named them.
    pub fn add_own_address(&self, owner: Arc<str>) {
        self.own_addresses.lock().unwrap_or_else(PoisonError::into_inner).insert(owner);
    }

    /// Whether a shard at an address of this store is looked up here. A shard that another store named is not: that one
    /// served at the same address before, or does so by now.
    pub(crate) fn owns(&self, id: &ShardId) -> bool {
        id.as_numbered().is_none_or(|(nonce, _)| nonce == self.nonce()) || self.storage.has(id)
    }

    /// The number with which the ids of this store's shards begin.
    pub fn nonce(&self) -> u64 {
        self.storage.nonce()
    }

    /// Stores copies of these tensors, unclaimed, under new ids: all of them or none.
    ///
    /// # Errors
    /// [`StoreError::Full`] if the limit was reached until `time_limit` ended, [`StoreError::TooLarge`],
    /// [`StoreError::Memory`], and the errors of `time_limit`.
    pub fn put(
        &self,
        sources: &[TensorToStore<'_>],
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<Vec<ShardId>, StoreError> {
        Ok(self.storage.put(self.copy_into_slabs(sources, time_limit)?))
    }

    /// Stores a copy of a tensor, unclaimed, under this name.
    ///
    /// # Errors
    /// [`StoreError::Exists`] if the name is taken, [`StoreError::Invalid`] if it has the form of ids that stores give;
    /// and the errors of [`put`](TensorStore::put).
    pub fn put_as(
        &self,
        id: &ShardId,
        source: TensorToStore<'_>,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(), StoreError> {
        let copied = self.copy_into_slabs(&[source], time_limit)?;
        copied.into_iter().try_for_each(|(tensor, charge)| self.storage.insert(id, tensor, charge))
    }

    /// Copies tensors into slabs; returns each with the bytes that it counts for.
    fn copy_into_slabs(
        &self,
        sources: &[TensorToStore<'_>],
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<Vec<(Tensor, u64)>, StoreError> {
        let full: Vec<usize> = (0..sources.len()).filter(|index| sources[*index].meta.nbytes() > 0).collect();
        let sizes: Vec<u64> = full.iter().map(|index| sources[*index].meta.nbytes()).collect();
        let mut is_filled = vec![false; full.len()];
        let mut prepare =
            |segment: &mut Segment, members: &[(usize, u64)], _: u64, time_limit: Option<&mut TimeLimit<'_>>| {
                members.iter().for_each(|(index, _)| is_filled[*index] = true);
                self.fill(segment, members.iter().map(|(index, offset)| (&sources[full[*index]], *offset)), time_limit)
            };
        let spaces = allocate(&self.storage_pool, &sizes, Some(time_limit), &mut prepare)?;
        let mut locations: Vec<Location> = sources.iter().map(|_| Location::Nowhere).collect();
        for ((mut space, index), is_filled) in spaces.into_iter().zip(full).zip(is_filled) {
            if !is_filled {
                // SAFETY: the maker of the `TensorToStore` promised that its bytes can be read.
                unsafe { space.copy_from(sources[index].start) };
            }
            locations[index] = Location::Here(space.into_range());
        }
        let tensors = sources.iter().zip(locations).map(|(source, location)| {
            let tensor = Tensor::stored(source.meta.clone(), location);
            let charge = tensor.charge();
            (tensor, charge)
        });
        Ok(tensors.collect())
    }

    /// Removes all stored and fetched shards with their claims. Shards that are being fetched will not be kept. Returns
    /// the counts of the storage.
    pub fn clear_all(&self) -> Removed {
        let (removed, stored) = self.storage.flush();
        drop(stored);
        self.clear_buffer(None);
        // Nothing will be used again soon.
        self.storage_pool.free_idle();
        self.buffer_pool.free_idle();
        removed
    }

    /// The step that fetches belong to now.
    pub fn current_step(&self) -> Option<Step> {
        self.buffer.current()
    }

    /// The counts of a step; `None` if it never began here, or ended too long ago.
    pub fn step_stats(&self, step: impl Into<Step>) -> Option<StepStats> {
        let step = step.into();
        let mut step_stats = StepStats { step, ..StepStats::default() };
        let stored = self.storage.lock().by_step.step_status(step);
        let fetched = self.buffer.lock().by_step.step_status(step);
        step_stats.stored_bytes = stored.as_ref().map_or(0, |step_status| step_status.step_counts.added_bytes);
        step_stats.fetched_bytes = fetched.as_ref().map_or(0, |step_status| step_status.step_counts.added_bytes);
        if stored.is_none() && fetched.is_none() {
            return None;
        }
        for step_status in [stored, fetched].into_iter().flatten() {
            step_stats.has_ended |= step_status.has_ended;
            step_stats.held_bytes += step_status.step_counts.held_bytes;
            step_stats.freed_bytes += step_status.step_counts.freed_bytes;
            step_stats.num_entries += step_status.step_counts.num_entries;
            step_stats.viewed_bytes += step_status.viewed_bytes;
        }
        step_stats.escaped_bytes = if step_stats.has_ended { step_stats.viewed_bytes } else { 0 };
        Some(step_stats)
    }

    /// Returns memory to the system that was idle ever since the last call.
    pub fn trim(&self) {
        self.storage_pool.trim();
        self.buffer_pool.trim();
    }

    fn storage_stats(&self) -> StorageStats {
        let memory = self.storage_pool.memory_stats();
        let oldest_unclaimed_seconds = self.storage.oldest_unclaimed_seconds();
        let mut state = self.storage.lock();
        let (total_bytes, num_entries) = state.by_step.held();
        let unclaimed = state.by_step.unclaimed().step_counts;
        StorageStats {
            num_entries,
            total_bytes,
            high_water_bytes: state.by_step.high_water_bytes,
            unclaimed_entries: unclaimed.num_entries,
            unclaimed_bytes: unclaimed.held_bytes,
            oldest_unclaimed_seconds,
            memory,
        }
    }

    /// The counts of the fetch buffer.
    pub fn buffer_stats(&self) -> BufferStats {
        let memory = self.buffer_pool.memory_stats();
        let mut state = self.buffer.lock();
        let (total_bytes, num_entries) = state.by_step.held();
        let kept = state.by_step.unclaimed().step_counts;
        let current = state.current_entries().step_counts;
        let holding = state
            .by_step
            .iter()
            .filter(|(step, step_entries)| step.is_some() && step_entries.step_counts.num_entries > 0);
        BufferStats {
            num_entries,
            total_bytes,
            current_entries: current.num_entries,
            current_bytes: current.held_bytes,
            kept_entries: kept.num_entries,
            kept_bytes: kept.held_bytes,
            high_water_bytes: state.by_step.high_water_bytes,
            hits: state.counts.hits,
            misses: state.counts.misses,
            late_inserts_refused: state.counts.late,
            in_flight: state.counts.in_flight,
            oldest_step: holding.min_by_key(|(_, step_entries)| step_entries.token).and_then(|(step, _)| step),
            memory,
        }
    }

    /// Copies sources to their offsets.
    fn fill<'a>(
        &self,
        segment: &mut Segment,
        members: impl Iterator<Item = (&'a TensorToStore<'a>, u64)>,
        mut time_limit: Option<&mut TimeLimit<'_>>,
    ) -> Result<(), StoreError> {
        let ranges: Vec<_> = members
            .map(|(source, offset)| copying::CopyRange {
                source: source.start,
                target: segment.data().wrapping_add(offset as usize),
                length: source.meta.nbytes() as usize,
            })
            .collect();
        let (mut check, mut failure) = (|| time_limit.as_deref_mut().map_or(Ok(()), TimeLimit::check_cancelled), None);
        let total: usize = ranges.iter().map(|range| range.length).sum();
        if segment.is_used() && total >= UNCACHED_COPY_BYTES {
            segment.populate(segment.capacity());
            let threads = thread::available_parallelism().map_or(1, |count| count.get().min(MAX_THREADS));
            // SAFETY: the makers of the sources promised it; the offsets lie within the segment, which nobody else has,
            // and it is nobody's source.
            return unsafe { copying::copy(&ranges, threads, |_| check()) };
        }
        let mut check_cancelled = || {
            check().map_err(|error| {
                failure = Some(error);
                ShmError::Interrupted
            })
        };
        let filled = ranges.iter().try_for_each(|range| {
            let offset = range.target.addr() - segment.data().addr();
            // SAFETY: the maker of the source promised it.
            unsafe { segment.fill_at(offset, range.source, range.length, &mut check_cancelled) }
        });
        filled.map_err(|error| failure.unwrap_or_else(|| error.into()))
    }

    /// Carries these shards over: fetched entries and stored shards end with no step until one claims them.
    pub fn keep(&self, ids: &[ShardId]) -> KeptCounts {
        KeptCounts { shards: self.storage.keep(ids), entries: self.buffer.keep(ids) }
    }

    /// The bytes of these shards, in order. The result keeps them alive.
    ///
    /// # Errors
    /// [`StoreError::Missing`] with all missing shards, [`StoreError::Invalid`] for rows that a shard does not have.
    pub fn look_up(&self, wanted: &[ShardRows]) -> Result<Vec<OutgoingShard>, StoreError> {
        let ids: Vec<ShardId> = wanted.iter().map(|selection| selection.id.clone()).collect();
        let found = self.storage.get(&ids).map_err(|shards| StoreError::Missing { owner: None, shards })?;
        let cut = found.into_iter().zip(wanted).map(|(tensor, selection)| {
            tensor.select(&selection.rows).map(OutgoingShard).map_err(|error| match error {
                StoreError::Invalid(reason) => StoreError::Invalid(format!("shard {}: {reason}", selection.id)),
                other => other,
            })
        });
        cut.collect()
    }

    /// Removes these shards from the storage and from the fetch buffer. Missing and repeated ids do not
    /// count.
    pub fn remove(&self, ids: &[ShardId]) -> Removed {
        let (removed, stored) = self.storage.remove(ids);
        drop(stored);
        self.clear_buffer(Some(ids));
        removed
    }

    /// Drops the fetched entries of these shards, or all if `None`. Returns their number.
    pub fn clear_buffer(&self, ids: Option<&[ShardId]>) -> u64 {
        match ids {
            Some(ids) => {
                let fetched = self.buffer.remove(ids);
                fetched.iter().flatten().map(|of_shard| of_shard.len() as u64).sum()
            }
            None => {
                let fetched = self.buffer.flush();
                fetched.iter().map(|step_entries| step_entries.step_counts.num_entries).sum()
            }
        }
    }

    /// From here on fetches belong to this step, and those that belonged to none.
    ///
    /// # Errors
    /// [`StoreError::StepEnded`] where it has ended already, [`StoreError::StepTaken`] where it is another claimant's.
    pub fn begin_step(&self, step: impl Into<Step>, claimant: Claimant) -> Result<(), StoreError> {
        self.buffer.begin(step.into(), claimant)
    }

    /// Claims stored shards for a step, with which they end.
    ///
    /// # Errors
    /// As of [`begin_step`](TensorStore::begin_step).
    pub fn claim(&self, step: impl Into<Step>, claimant: Claimant, ids: &[ShardId]) -> Result<Claimed, StoreError> {
        self.storage.claim(step.into(), claimant, ids)
    }

    /// Ends a step: drops its claimed shards and its fetched entries. A second call only returns the counts.
    pub fn end_step(&self, step: impl Into<Step>) -> StepStats {
        let step = step.into();
        drop(self.storage.end(step));
        drop(self.buffer.end(step));
        self.step_stats(step).unwrap_or(StepStats { step, has_ended: true, ..StepStats::default() })
    }

    /// Unclaims the shards of a claimant, and drops the entries that were fetched in its steps.
    pub fn release_claimant(&self, claimant: Claimant) {
        let claiming = self.storage.lock().by_step.of_claimant(claimant);
        claiming.iter().for_each(|step| self.storage.unclaim_all(*step));
        let fetching = self.buffer.lock().by_step.of_claimant(claimant);
        for step in claiming.into_iter().chain(fetching) {
            self.end_step(step);
        }
    }

    /// All counts, and those of each step.
    pub fn stats(&self) -> Stats {
        let (mut ended, mut open) = self.storage.lock().by_step.steps();
        let fetching = self.buffer.lock().by_step.steps();
        ended.extend(fetching.0);
        open.extend(fetching.1);
        let mut seen = HashSet::new();
        let steps = ended.into_iter().chain(open).filter(|step| seen.insert(*step));
        Stats {
            storage: self.storage_stats(),
            buffer: self.buffer_stats(),
            current_step: self.current_step(),
            steps: steps.filter_map(|step| self.step_stats(step)).collect(),
        }
    }
}

impl Default for Limits {
    /// A quarter of the memory that the process can have, on either side.
    fn default() -> Self {
        let quarter = 4 * arena::default_limit() as u64;
        Limits { storage_bytes: quarter, buffer_bytes: quarter }
    }
}

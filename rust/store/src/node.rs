//! The store of one process: what it holds as an owner, what it fetched as a consumer, and the account of both.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::rand::{GetRandomFlags, getrandom};
use tundish_copying::{self as copying, AdaptiveCopy};
use tundish_shm::{PerProcess, Segment, ShmError, arena};

use crate::entries::fetch_buffer::{Buffer, Key};
use crate::entries::storage::Storage;
use crate::error::StoreError;
use crate::memory::attached_segments::Attachments;
use crate::memory::drop_thread::{DropThread, Last};
use crate::memory::slab::{Allocation, allocate};
use crate::memory::slab_pool::Pool;
use crate::memory::tensor::{Location, Tensor};
use crate::memory::transfers::{Incoming, Outgoing, Source, Store};
use crate::meta::Meta;
use crate::shard_id::{Rows, Selection, ShardId};
use crate::stats::{BufferStats, Claimed, Dropped, EpochLedger, Kept, Limits, Removed, Stats, StorageStats};
use crate::time_limit::TimeLimit;
use crate::transport::Service;
use crate::{Claimant, Epoch};

/// The store of one process.
pub struct Node {
    pub(crate) storage: Arc<Store>,
    pub(crate) buffer: Buffer<Tensor>,
    pub(crate) storage_pool: Arc<Pool>,
    pub(crate) buffer_pool: Arc<Pool>,
    pub(crate) attachments: Attachments,
    /// Addresses that this node's own handles name. Another process may serve at one of them by now, or did before.
    pub(crate) owners: Mutex<HashSet<Arc<str>>>,
    drop_thread: DropThread,
    /// To anyone who fetches on this node.
    handover: AdaptiveCopy,
}

/// So much is worth a look at how it had best be copied, and several threads where it is very much.
const WORTH_A_LOOK: usize = 128 << 10;

/// Threads of one such copy: more do not make memory faster.
const MOST_THREADS: usize = 4;

/// How long anyone who clears a node waits for what is freed in the background.
const SETTLING: Duration = Duration::from_secs(5);

/// How long who ends a step waits for who keeps something of its shards to hear of that: some turns of an interpreter.
const HEARING: Duration = Duration::from_millis(200);

/// Anyone who keeps something of shards beside the nodes of this process.
static LISTENER: OnceLock<fn()> = OnceLock::new();

static OF_PROCESS: PerProcess<Arc<Node>> = PerProcess::new(|| Node::new(Limits::default()));

impl Node {
    /// A store of its own, for as long as it lives. What a process uses is [`of_process`](Node::of_process).
    ///
    /// # Panics
    /// Where the kernel draws no random number, which is never.
    pub fn new(limits: Limits) -> Arc<Node> {
        let mut nonce = [0; 8];
        // Eight bytes come whole or not at all.
        rustix::io::retry_on_intr(|| getrandom(&mut nonce, GetRandomFlags::empty())).expect("a random number");
        let storage_pool = Pool::new("storage", limits.storage_bytes);
        let buffer_pool = Pool::new("fetch buffer", limits.buffer_bytes);
        Arc::new(Node {
            storage: Arc::new(Storage::new(u64::from_ne_bytes(nonce))),
            buffer: Buffer::new(),
            drop_thread: DropThread::new(&[&storage_pool, &buffer_pool]),
            storage_pool,
            buffer_pool,
            attachments: Attachments::default(),
            owners: Mutex::default(),
            handover: AdaptiveCopy::default(),
        })
    }

    /// The store of this process: the same one always, and in a child made by `fork` a new one, which is empty. Ask
    /// anew each time instead of keeping it.
    pub fn of_process() -> Arc<Node> {
        Arc::clone(OF_PROCESS.get())
    }

    /// Lets go of what the parent's store kept at the fork, and would keep alive here. For a child.
    pub fn forget_inherited() {
        if let Some(inherited) = OF_PROCESS.inherited() {
            inherited.storage.forget();
            inherited.buffer.forget();
            inherited.storage_pool.forget();
            inherited.buffer_pool.forget();
        }
    }

    /// Changes the limits, for what is asked for from here on.
    pub fn set_limits(&self, limits: Limits) {
        self.storage_pool.set_limit(limits.storage_bytes);
        self.buffer_pool.set_limit(limits.buffer_bytes);
    }

    /// Handles that name this owner are this node's own: they are looked up, not fetched. But for those that another
    /// node named, whose address this was before, or is by now.
    pub fn announce(&self, owner: Arc<str>) {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner).insert(owner);
    }

    /// Whether a shard is stored here, of an owner that was announced, or these rows of another's are in the buffer.
    pub fn has(&self, owner: &Arc<str>, id: &ShardId, rows: Option<&Rows>) -> bool {
        let is_announced = self.owners.lock().unwrap_or_else(PoisonError::into_inner).contains(owner);
        if is_announced && self.would_be_here(id) {
            return self.storage.has(id);
        }
        self.buffer.has(&Key { id: id.clone(), owner: Arc::clone(owner), rows: rows.cloned() })
    }

    /// Whether a shard of an owner that was announced is this node's own: looked up here, and nowhere else.
    ///
    /// What another node named is that one's, unless it was sent here: it served at the same address before, or does by
    /// now.
    pub(crate) fn would_be_here(&self, id: &ShardId) -> bool {
        id.as_numbered().is_none_or(|(nonce, _)| nonce == self.nonce()) || self.storage.has(id)
    }

    /// Has `listener` called, by a thread of the node's and soon, after each drain or removal from here on: for who
    /// keeps something as long as the node [`has`](Node::has) the shard that it is of. There is one a process.
    pub fn after_drains(listener: fn()) {
        let _ = LISTENER.set(listener);
    }

    fn tell_of_drain(&self) {
        if let Some(listener) = LISTENER.get() {
            self.drop_thread.drop_later(Last(*listener), u64::MAX);
        }
    }

    /// The number that begins the names of this node's shards.
    pub fn nonce(&self) -> u64 {
        self.storage.nonce()
    }

    /// Stores copies of these tensors, unclaimed, under names of their own: all of them or none.
    ///
    /// # Errors
    /// [`StoreError::Full`] where the limit was reached until time_limit ended, [`StoreError::TooLarge`],
    /// [`StoreError::Memory`], and what time_limit says.
    pub fn put(&self, sources: &[Source<'_>], time_limit: &mut TimeLimit<'_>) -> Result<Vec<ShardId>, StoreError> {
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
                // SAFETY: who made the source says so.
                unsafe { space.copy_from(sources[index].start) };
            }
            locations[index] = Location::Here(space.into_place());
        }
        let tensors = sources.iter().zip(locations).map(|(source, location)| {
            let tensor = Tensor::stored(source.meta.clone(), location);
            let charge = tensor.charge();
            (tensor, charge)
        });
        Ok(self.storage.put(tensors.collect()))
    }

    /// Removes all that is stored and all that was fetched, and what is being fetched will not be kept; claims end with
    /// what they claimed. Says what the storage held.
    pub fn clear_node(&self) -> Removed {
        let (removed, stored) = self.storage.flush();
        self.drop_thread.drop_later(stored, removed.num_tensors);
        self.flush_buffer();
        self.tell_of_drain();
        // Nothing is to be used again soon: what nobody has any more goes back to the system.
        if self.drop_thread.settle(SETTLING) {
            self.storage_pool.let_idle_go();
            self.buffer_pool.let_idle_go();
        }
        removed
    }

    fn flush_buffer(&self) -> Dropped {
        let fetched = self.buffer.flush();
        // The part of no step is the oldest.
        let kept = fetched.first().map_or(0, |part| part.step_counts.num_entries);
        let entries = fetched.iter().map(|part| part.step_counts.num_entries).sum();
        self.drop_thread.drop_later(fetched, entries);
        Dropped { entries, kept }
    }

    /// The step that fetches belong to now.
    pub fn current_epoch(&self) -> Option<Epoch> {
        self.buffer.current()
    }

    /// The account of a step; `None` where it never began here, or ended too long ago.
    pub fn ledger(&self, epoch: Epoch) -> Option<EpochLedger> {
        let mut ledger = EpochLedger { epoch, ..EpochLedger::default() };
        let stored = self.storage.state.lock().parts.standing(epoch);
        let fetched = self.buffer.state.lock().parts.standing(epoch);
        ledger.stored_bytes = stored.as_ref().map_or(0, |standing| standing.step_counts.brought_bytes);
        ledger.fetched_bytes = fetched.as_ref().map_or(0, |standing| standing.step_counts.brought_bytes);
        if stored.is_none() && fetched.is_none() {
            return None;
        }
        for standing in [stored, fetched].into_iter().flatten() {
            ledger.has_ended |= standing.has_ended;
            ledger.held_bytes += standing.step_counts.held_bytes;
            ledger.freed_bytes += standing.step_counts.freed_bytes;
            ledger.num_entries += standing.step_counts.num_entries;
            ledger.late_inserts_refused += standing.step_counts.late;
            ledger.viewed_bytes += standing.viewed_bytes;
        }
        ledger.escaped_bytes = if ledger.has_ended { ledger.viewed_bytes } else { 0 };
        Some(ledger)
    }

    /// Waits until all that was given up is freed; `false` where that takes longer than `longest`.
    pub fn settle(&self, longest: Duration) -> bool {
        self.drop_thread.settle(longest)
    }

    fn storage_stats(&self) -> StorageStats {
        let memory = self.storage_pool.account();
        let oldest_unclaimed_seconds = self.storage.oldest_unclaimed_seconds();
        let mut state = self.storage.state.lock();
        let (total_bytes, num_entries) = state.parts.held();
        let unclaimed = state.parts.unclaimed().step_counts;
        StorageStats {
            num_entries,
            total_bytes,
            high_water_bytes: state.parts.high_water_bytes,
            unclaimed_entries: unclaimed.num_entries,
            unclaimed_bytes: unclaimed.held_bytes,
            oldest_unclaimed_seconds,
            memory,
        }
    }

    fn buffer_stats(&self) -> BufferStats {
        let memory = self.buffer_pool.account();
        let mut state = self.buffer.state.lock();
        let (total_bytes, num_entries) = state.parts.held();
        let kept = state.parts.unclaimed().step_counts;
        let current = state.current_part().step_counts;
        let holding = state.parts.iter().filter(|(epoch, part)| epoch.is_some() && part.step_counts.num_entries > 0);
        BufferStats {
            num_entries,
            total_bytes,
            current_entries: current.num_entries,
            current_bytes: current.held_bytes,
            kept_entries: kept.num_entries,
            kept_bytes: kept.held_bytes,
            high_water_bytes: state.parts.high_water_bytes,
            hits: state.counts.hits,
            misses: state.counts.misses,
            late_inserts_refused: state.counts.late,
            in_flight: state.counts.in_flight,
            oldest_epoch: holding.min_by_key(|(_, part)| part.age).and_then(|(epoch, _)| epoch),
            memory,
        }
    }

    /// Copies sources to their offsets.
    fn fill<'a>(
        &self,
        segment: &mut Segment,
        members: impl Iterator<Item = (&'a Source<'a>, u64)>,
        mut time_limit: Option<&mut TimeLimit<'_>>,
    ) -> Result<(), StoreError> {
        let copies: Vec<_> = members
            .map(|(source, offset)| copying::Copy {
                source: source.start,
                target: segment.data().wrapping_add(offset as usize),
                length: source.meta.nbytes() as usize,
            })
            .collect();
        let (mut look, mut said) = (|| time_limit.as_deref_mut().map_or(Ok(()), TimeLimit::look), None);
        let total: usize = copies.iter().map(|copy| copy.length).sum();
        if segment.is_used() && total >= WORTH_A_LOOK {
            segment.populate(segment.capacity());
            let threads = thread::available_parallelism().map_or(1, |count| count.get().min(MOST_THREADS));
            // SAFETY: who made the sources says so; the offsets lie within the segment, which nobody else has, and it
            // is nobody's source.
            return unsafe { self.handover.copy(&copies, threads, |_| look()) };
        }
        let mut go_on = || {
            look().map_err(|error| {
                said = Some(error);
                ShmError::Interrupted
            })
        };
        let filled = copies.iter().try_for_each(|copy| {
            let offset = copy.target.addr() - segment.data().addr();
            // SAFETY: who made the source says so.
            unsafe { segment.fill_at(offset, copy.source, copy.length, &mut go_on) }
        });
        filled.map_err(|error| said.unwrap_or_else(|| error.into()))
    }
}

impl Service for Node {
    fn keep(&self, claimant: Claimant, ids: &[ShardId]) -> Kept {
        Kept { shards: self.storage.keep(claimant, ids), entries: self.buffer.keep(claimant, ids) }
    }

    fn look_up(&self, wanted: &[Selection]) -> Result<Vec<Outgoing>, StoreError> {
        let ids: Vec<ShardId> = wanted.iter().map(|selection| selection.id.clone()).collect();
        let found = self.storage.get(&ids).map_err(|shards| StoreError::Missing { owner: None, shards })?;
        let cut = found.into_iter().zip(wanted).map(|(tensor, selection)| {
            tensor.cut(0, selection.rows.as_ref()).map(Outgoing).map_err(|error| match error {
                StoreError::Invalid(reason) => StoreError::Invalid(format!("shard {}: {reason}", selection.id)),
                other => other,
            })
        });
        cut.collect()
    }

    fn receive(&self, id: ShardId, meta: Meta) -> Result<Incoming, StoreError> {
        self.storage.check_new(&id)?;
        let mut space: Option<Allocation> = None;
        if meta.nbytes() > 0 {
            let made = allocate(&self.storage_pool, &[meta.nbytes()], None, &mut |segment, _, space, _| {
                segment.populate(space as usize);
                Ok(())
            });
            space = made?.pop();
        }
        Ok(Incoming { id, meta, space, store: Arc::clone(&self.storage) })
    }

    fn remove(&self, ids: &[ShardId]) -> Removed {
        let (removed, stored) = self.storage.remove(ids);
        self.drop_thread.drop_later(stored, removed.num_tensors);
        self.clear_buffer(Some(ids));
        removed
    }

    fn drop_fetched(&self, ids: Option<&[ShardId]>) -> Dropped {
        let dropped = match ids {
            Some(ids) => {
                let (dropped, fetched) = self.buffer.remove(ids);
                self.drop_thread.drop_later(fetched, dropped.entries);
                dropped
            }
            None => self.flush_buffer(),
        };
        self.tell_of_drain();
        dropped
    }

    fn begin_epoch(&self, epoch: Epoch, claimant: Claimant) -> Result<(), StoreError> {
        self.buffer.begin(epoch, claimant)
    }

    fn claim(&self, epoch: Epoch, claimant: Claimant, ids: &[ShardId]) -> Result<Claimed, StoreError> {
        self.storage.claim(epoch, claimant, ids)
    }

    fn close_epoch(&self, epoch: Epoch, claimant: Claimant) {
        self.storage.close(epoch, claimant);
    }

    fn end_epoch(&self, epoch: Epoch) -> EpochLedger {
        let stored = self.storage.end(epoch);
        let fetched = self.buffer.end(epoch);
        let entries = |count: Option<u64>| count.unwrap_or_default();
        let (claims, fetches) = (
            stored.as_ref().map(|part| part.step_counts.num_entries),
            fetched.as_ref().map(|part| part.step_counts.num_entries),
        );
        self.drop_thread.drop_later(stored, entries(claims));
        self.drop_thread.drop_later(fetched, entries(fetches));
        self.tell_of_drain();
        let ended = EpochLedger { epoch, has_ended: true, ..EpochLedger::default() };
        let ledger = self.ledger(epoch).unwrap_or(ended);
        // What is in use only by who is about to hear of the drain has not escaped.
        if ledger.viewed_bytes > 0 && LISTENER.get().is_some() && self.drop_thread.settle(HEARING) {
            return self.ledger(epoch).unwrap_or(ended);
        }
        ledger
    }

    fn give_up(&self, claimant: Claimant) {
        let claiming = self.storage.state.lock().parts.of_claimant(claimant);
        for epoch in &claiming {
            self.storage.unclaim_all(*epoch);
        }
        let fetching = self.buffer.state.lock().parts.of_claimant(claimant);
        let stored = self.storage.give_up_kept(claimant);
        let count = stored.iter().map(Vec::len).sum::<usize>() as u64;
        self.drop_thread.drop_later(stored, count);
        let fetched = self.buffer.give_up_kept(claimant);
        let entries = fetched.iter().map(Vec::len).sum::<usize>() as u64;
        self.drop_thread.drop_later(fetched, entries);
        if count + entries > 0 {
            self.tell_of_drain();
        }
        for epoch in claiming.into_iter().chain(fetching) {
            self.end_epoch(epoch);
        }
    }

    fn stats(&self) -> Stats {
        let (mut past, mut open) = self.storage.state.lock().parts.epochs();
        let fetching = self.buffer.state.lock().parts.epochs();
        past.extend(fetching.0);
        open.extend(fetching.1);
        let mut seen = HashSet::new();
        let epochs = past.into_iter().chain(open).filter(|epoch| seen.insert(*epoch));
        Stats {
            storage: self.storage_stats(),
            buffer: self.buffer_stats(),
            current_epoch: self.current_epoch(),
            epochs: epochs.filter_map(|epoch| self.ledger(epoch)).collect(),
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

#[cfg(test)]
mod tests {
    use std::thread::sleep;
    use std::time::Instant;

    use super::*;

    #[test]
    fn memory_of_either_side_that_nobody_uses_for_a_while_goes_back_to_the_system() {
        let mut node = Node::new(Limits { storage_bytes: 64 << 20, buffer_bytes: 64 << 20 });
        Arc::get_mut(&mut node).unwrap().drop_thread.quiet = Duration::from_millis(20);
        let pools = [&node.storage_pool, &node.buffer_pool];
        for pool in pools {
            let mut reserved = pool.reserve(Pool::size_for(1 << 20), None).unwrap();
            pool.give_back(reserved.take(1 << 20, None).unwrap());
            assert!(pool.account().idle_bytes > 1 << 20);
        }
        node.drop_thread.drop_later((), 0);
        let deadline = Instant::now() + Duration::from_secs(60);
        while pools.iter().any(|pool| pool.account().idle_bytes > 0) {
            assert!(Instant::now() < deadline, "it stays");
            sleep(Duration::from_millis(1));
        }
    }
}

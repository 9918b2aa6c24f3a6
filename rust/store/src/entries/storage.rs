//! The shards stored in this process, by the step that claimed them.
//!
//! Invariants:
//!
//! - A shard belongs to one step, or to none. Unclaimed shards live until they are removed.
//! - A claimed shard ends with its step, and is unclaimed again when the claimant is gone.

use std::time::Instant;

use crate::entries::by_step::{EntriesByStep, StepEntries};
use crate::entries::locked::{forget, in_chunks};
use crate::entries::sync::{StateGuard, StateMutex, lock};
use crate::error::{MissingShard, StoreError};
use crate::shard_id::ShardId;
use crate::stats::{Claimed, Removed};
use crate::{Claimant, Step};

/// A shard that is stored.
#[derive(Debug)]
pub(crate) struct StoredShard<P> {
    payload: P,
    bytes: u64,
    since: Instant,
    /// Whether it, or a fetched entry of it, was kept beyond a step.
    was_kept: bool,
}

pub(crate) struct State<P> {
    pub(crate) by_step: EntriesByStep<StoredShard<P>>,
    next_counter: u64,
}

/// The storage of one process.
pub(crate) struct Storage<P> {
    state: StateMutex<State<P>>,
    nonce: u64,
}

impl<P: Clone> Storage<P> {
    /// A storage whose shard ids begin with `nonce`.
    pub(crate) fn new(nonce: u64) -> Self {
        Storage { state: StateMutex::new(State { by_step: EntriesByStep::new(), next_counter: 0 }), nonce }
    }

    pub(crate) fn lock(&self) -> StateGuard<'_, State<P>> {
        lock(&self.state)
    }

    pub(crate) fn nonce(&self) -> u64 {
        self.nonce
    }

    /// Stores payloads, unclaimed, under new ids.
    pub(crate) fn put(&self, payloads: Vec<(P, u64)>) -> Vec<ShardId> {
        let since = Instant::now();
        let ids = in_chunks(&self.state, &payloads, |state, chunk| {
            let mut ids = Vec::with_capacity(chunk.len());
            for (payload, bytes) in chunk {
                let id = ShardId::numbered(self.nonce, state.next_counter);
                state.next_counter += 1;
                state.insert(&id, StoredShard { payload: payload.clone(), bytes: *bytes, since, was_kept: false });
                ids.push(id);
            }
            state.by_step.update_high_water();
            ids
        });
        ids.concat()
    }

    /// Stores a payload, unclaimed, under this id.
    ///
    /// # Errors
    /// [`StoreError::Exists`] if the id is taken, [`StoreError::Invalid`] if it has the form of ids that this storage
    /// gives itself.
    pub(crate) fn insert(&self, id: &ShardId, payload: P, bytes: u64) -> Result<(), StoreError> {
        let mut state = self.lock();
        if id.as_numbered().is_some_and(|(nonce, _)| nonce == self.nonce) {
            return Err(StoreError::Invalid(format!(
                "shard {id} cannot have this name: names that begin like it are given by the library"
            )));
        }
        if state.find(id).is_some() {
            return Err(StoreError::Exists { id: id.clone() });
        }
        state.insert(id, StoredShard { payload, bytes, since: Instant::now(), was_kept: false });
        state.by_step.update_high_water();
        Ok(())
    }

    /// Drops the parent's shards in a child made by `fork`.
    pub(crate) fn forget(&self) {
        forget(&self.state, |state| drop(state.by_step.flush()));
    }

    /// The shards of these names, in order, or the missing ones.
    pub(crate) fn get(&self, ids: &[ShardId]) -> Result<Vec<P>, Vec<MissingShard>> {
        let mut missing = Vec::new();
        let mut found = Vec::with_capacity(ids.len());
        in_chunks(&self.state, ids, |state, chunk| {
            for id in chunk {
                match state.find(id) {
                    Some(stored) => found.push(stored.payload.clone()),
                    None => missing.push(MissingShard { id: id.clone(), was_removed: self.was_here(state, id) }),
                }
            }
        });
        if missing.is_empty() { Ok(found) } else { Err(missing) }
    }

    /// Whether something is stored under this name.
    pub(crate) fn has(&self, id: &ShardId) -> bool {
        self.lock().find(id).is_some()
    }

    /// Whether this storage gave this id.
    fn was_here(&self, state: &State<P>, id: &ShardId) -> bool {
        id.as_numbered().is_some_and(|(nonce, counter)| nonce == self.nonce && counter < state.next_counter)
    }

    /// Removes shards, and returns them to be dropped.
    pub(crate) fn remove(&self, ids: &[ShardId]) -> (Removed, Vec<Vec<StoredShard<P>>>) {
        // A list for each chunk: one long list would be moved as it grows, with the lock held.
        let taken = in_chunks(&self.state, ids, |state, chunk| {
            let mut taken = Vec::with_capacity(chunk.len());
            taken.extend(chunk.iter().filter_map(|id| state.remove(id)));
            taken
        });
        let count = taken.iter().map(|chunk| chunk.len() as u64).sum();
        let total_bytes = taken.iter().flatten().map(|stored| stored.bytes).sum();
        (Removed { cleared_count: count, num_tensors: count, total_bytes }, taken)
    }

    /// Takes all shards out.
    pub(crate) fn flush(&self) -> (Removed, Vec<StepEntries<StoredShard<P>>>) {
        let mut state = self.lock();
        let (total_bytes, num_tensors) = state.by_step.held();
        let flushed = state.by_step.flush();
        (Removed { cleared_count: num_tensors, num_tensors, total_bytes }, flushed)
    }

    /// Claims for a step.
    ///
    /// # Errors
    /// [`StoreError::StepEnded`] if it has ended; [`StoreError::StepTaken`] if it is another claimant's.
    pub(crate) fn claim(&self, step: Step, claimant: Claimant, ids: &[ShardId]) -> Result<Claimed, StoreError> {
        let mut claimed = Claimed::default();
        self.lock().by_step.begin(step, claimant)?;
        let outcomes = in_chunks(&self.state, ids, |state, chunk| {
            if state.by_step.get(Some(step)).is_none() {
                return Err(StoreError::StepEnded { step });
            }
            chunk.iter().for_each(|id| state.claim(step, id, &mut claimed));
            Ok(())
        });
        outcomes.into_iter().collect::<Result<(), _>>()?;
        Ok(claimed)
    }

    /// Ends a step, and returns its shards to be dropped.
    pub(crate) fn end(&self, step: Step) -> Option<StepEntries<StoredShard<P>>> {
        self.lock().by_step.end(step)
    }

    /// Unclaims all shards of a step. The step goes on.
    pub(crate) fn unclaim_all(&self, step: Step) {
        let mut state = self.lock();
        let Some(step_entries) = state.by_step.get_mut(Some(step)) else { return };
        let claimed = std::mem::take(&mut step_entries.entries);
        claimed.values().for_each(|stored| step_entries.step_counts.remove(stored.bytes));
        claimed.into_iter().for_each(|(id, stored)| state.insert(&id, stored));
    }

    /// Unclaims these shards. Returns the number of those that were claimed.
    pub(crate) fn keep(&self, ids: &[ShardId]) -> u64 {
        let counts = in_chunks(&self.state, ids, |state, chunk| chunk.iter().filter(|id| state.keep(id)).count());
        counts.into_iter().sum::<usize>() as u64
    }

    /// Seconds since the oldest unclaimed shard was stored.
    pub(crate) fn oldest_unclaimed_seconds(&self) -> f64 {
        let mut state = self.lock();
        let oldest = state.by_step.unclaimed().entries.values().map(|stored| stored.since).min();
        oldest.map_or(0.0, |since| since.elapsed().as_secs_f64())
    }
}

impl<P> State<P> {
    fn find(&self, id: &ShardId) -> Option<&StoredShard<P>> {
        self.by_step.iter().find_map(|(_, step_entries)| step_entries.entries.get(id))
    }

    /// Adds a shard to the unclaimed ones. Its id is not taken.
    fn insert(&mut self, id: &ShardId, stored: StoredShard<P>) {
        let unclaimed = self.by_step.unclaimed();
        unclaimed.step_counts.add(stored.bytes);
        unclaimed.entries.insert(id.clone(), stored);
    }

    fn remove(&mut self, id: &ShardId) -> Option<StoredShard<P>> {
        self.by_step.iter_mut().find_map(|(_, step_entries)| take(step_entries, id))
    }

    /// Whether a step had claimed it.
    fn keep(&mut self, id: &ShardId) -> bool {
        if let Some(stored) = self.by_step.unclaimed().entries.get_mut(id) {
            stored.was_kept = true;
            return false;
        }
        let Some(stored) = self.remove(id) else { return false };
        self.insert(id, StoredShard { was_kept: true, ..stored });
        true
    }

    fn claim(&mut self, step: Step, id: &ShardId, claimed: &mut Claimed) {
        let unclaimed = take(self.by_step.unclaimed(), id);
        let step_entries = self.by_step.get_mut(Some(step)).expect("looked at with this lock");
        if let Some(stored) = unclaimed {
            claimed.claimed_count += 1;
            claimed.total_bytes += stored.bytes;
            claimed.kept.extend(stored.was_kept.then(|| id.clone()));
            step_entries.step_counts.add(stored.bytes);
            step_entries.entries.insert(id.clone(), stored);
            return;
        }
        if let Some(stored) = step_entries.entries.get(id) {
            claimed.kept.extend(stored.was_kept.then(|| id.clone()));
            return;
        }
        let is_there = self.find(id).is_some();
        if is_there { &mut claimed.taken } else { &mut claimed.missing }.push(id.clone());
    }
}

fn take<P>(step_entries: &mut StepEntries<StoredShard<P>>, id: &ShardId) -> Option<StoredShard<P>> {
    let stored = step_entries.entries.remove(id)?;
    step_entries.step_counts.remove(stored.bytes);
    Some(stored)
}

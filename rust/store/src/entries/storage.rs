//! The shards stored in this process, by the step that claimed them.
//!
//! Invariants:
//!
//! - A shard belongs to one step, or to none. Unclaimed shards live until they are removed.
//! - A claimed shard ends with its step, and is unclaimed again when the claimant is gone.
//! - A shard of another claimant's step that somebody keeps ends with both.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::entries::by_step::{EntriesByStep, StepEntries};
use crate::entries::fair_lock::{FairLock, TURN};
use crate::error::{MissingShard, StoreError};
use crate::shard_id::ShardId;
use crate::stats::{Claimed, Removed};
use crate::{Claimant, Epoch};

/// A shard that is stored.
#[derive(Debug)]
pub(crate) struct Stored<P> {
    payload: P,
    bytes: u64,
    /// Seconds after the storage was made.
    second: u32,
    /// Whether somebody kept it, or what was fetched of it, beyond a step.
    was_kept: bool,
}

pub(crate) struct State<P> {
    pub(crate) parts: EntriesByStep<Stored<P>>,
    /// How many unclaimed shards were stored in each second that has some.
    seconds: BTreeMap<u32, u64>,
    next_counter: u64,
}

/// The storage of one process.
pub(crate) struct Storage<P> {
    pub(crate) state: FairLock<State<P>>,
    nonce: u64,
    made: Instant,
}

impl<P: Clone> Storage<P> {
    /// One that names its shards by `nonce`.
    pub(crate) fn new(nonce: u64) -> Self {
        let state = State { parts: EntriesByStep::new(), seconds: BTreeMap::new(), next_counter: 0 };
        Storage { state: FairLock::new(state), nonce, made: Instant::now() }
    }

    pub(crate) fn nonce(&self) -> u64 {
        self.nonce
    }

    /// Stores under names of their own, unclaimed.
    pub(crate) fn put(&self, payloads: Vec<(P, u64)>) -> Vec<ShardId> {
        let second = self.second();
        let turns = self.state.in_turns(&payloads, |state, some| {
            let mut ids = Vec::with_capacity(some.len());
            for (payload, bytes) in some {
                let id = ShardId::numbered(self.nonce, state.next_counter);
                state.next_counter += 1;
                state.insert(&id, Stored { payload: payload.clone(), bytes: *bytes, second, was_kept: false });
                ids.push(id);
            }
            state.parts.saw_peak();
            ids
        });
        turns.concat()
    }

    /// Stores under a name that was given.
    ///
    /// # Errors
    /// [`StoreError::Exists`] where there is one of this name, [`StoreError::Invalid`] for one of those that this
    /// storage gives itself.
    pub(crate) fn insert(&self, id: &ShardId, payload: P, bytes: u64) -> Result<(), StoreError> {
        let second = self.second();
        let mut state = self.state.lock();
        self.check_free(&state, id)?;
        state.insert(id, Stored { payload, bytes, second, was_kept: false });
        state.parts.saw_peak();
        Ok(())
    }

    /// Whether a shard may be stored under a name that was given.
    ///
    /// # Errors
    /// As of [`insert`](Self::insert).
    pub(crate) fn check_new(&self, id: &ShardId) -> Result<(), StoreError> {
        self.check_free(&self.state.lock(), id)
    }

    fn check_free(&self, state: &State<P>, id: &ShardId) -> Result<(), StoreError> {
        if id.as_numbered().is_some_and(|(nonce, _)| nonce == self.nonce) {
            return Err(StoreError::Invalid(format!("shard {id} cannot be sent: names that begin so are given here")));
        }
        if state.find(id).is_some() {
            return Err(StoreError::Exists { id: id.clone() });
        }
        Ok(())
    }

    /// Lets go of what the parent stored. For a child.
    pub(crate) fn forget(&self) {
        self.state.forget(|state| drop(state.parts.flush()));
    }

    /// What is stored under these names, in order, or those that nothing is stored under, or nothing that is still given
    /// out.
    pub(crate) fn get(&self, ids: &[ShardId]) -> Result<Vec<P>, Vec<MissingShard>> {
        let mut missing = Vec::new();
        let mut found = Vec::with_capacity(ids.len());
        self.state.in_turns(ids, |state, some| {
            for id in some {
                match state.find_open(id) {
                    Some(stored) => found.push(stored.payload.clone()),
                    None => missing.push(MissingShard { id: id.clone(), was_removed: self.was_here(state, id) }),
                }
            }
        });
        if missing.is_empty() { Ok(found) } else { Err(missing) }
    }

    /// Whether something is stored under this name.
    pub(crate) fn has(&self, id: &ShardId) -> bool {
        self.state.lock().find(id).is_some()
    }

    /// A name that this storage gave.
    fn was_here(&self, state: &State<P>, id: &ShardId) -> bool {
        id.as_numbered().is_some_and(|(nonce, counter)| nonce == self.nonce && counter < state.next_counter)
    }

    /// Removes. What was stored is returned, to be let go of.
    pub(crate) fn remove(&self, ids: &[ShardId]) -> (Removed, Vec<Vec<Stored<P>>>) {
        // In pieces of a turn each: one long list would be moved as it grows, with the lock held.
        let taken = self.state.in_turns(ids, |state, some| {
            let mut taken = Vec::with_capacity(some.len());
            taken.extend(some.iter().filter_map(|id| state.remove(id)));
            taken
        });
        let count = taken.iter().map(|some| some.len() as u64).sum();
        let total_bytes = taken.iter().flatten().map(|stored| stored.bytes).sum();
        (Removed { cleared_count: count, num_tensors: count, total_bytes }, taken)
    }

    /// Takes all out.
    pub(crate) fn flush(&self) -> (Removed, Vec<StepEntries<Stored<P>>>) {
        let mut state = self.state.lock();
        let (total_bytes, num_tensors) = state.parts.held();
        state.seconds.clear();
        let flushed = state.parts.flush();
        (Removed { cleared_count: num_tensors, num_tensors, total_bytes }, flushed)
    }

    /// Claims for a step.
    ///
    /// # Errors
    /// [`StoreError::StepEnded`] where it has ended, and what it claimed before that is gone; [`StoreError::StepTaken`]
    /// where it is another claimant's.
    pub(crate) fn claim(&self, epoch: Epoch, claimant: Claimant, ids: &[ShardId]) -> Result<Claimed, StoreError> {
        let mut claimed = Claimed::default();
        self.state.lock().parts.begin(epoch, claimant)?;
        let turns = self.state.in_turns(ids, |state, some| {
            if state.parts.get(Some(epoch)).is_none() {
                return Err(StoreError::StepEnded { epoch });
            }
            some.iter().for_each(|id| state.claim(epoch, id, &mut claimed));
            Ok(())
        });
        turns.into_iter().collect::<Result<(), _>>()?;
        Ok(claimed)
    }

    /// A step of this claimant's is about to end: what it claimed is there until then, and given to nobody any more.
    pub(crate) fn close(&self, epoch: Epoch, claimant: Claimant) {
        let mut state = self.state.lock();
        if let Some(part) = state.parts.get_mut(Some(epoch)).filter(|part| part.claimant == Some(claimant)) {
            part.is_closed = true;
        }
    }

    /// Ends a step. What it had claimed is returned, to be let go of.
    pub(crate) fn end(&self, epoch: Epoch) -> Option<StepEntries<Stored<P>>> {
        self.state.lock().parts.end(epoch)
    }

    /// What this step claimed is unclaimed again, also what others keep of it; it goes on, or is ended by who called.
    pub(crate) fn unclaim_all(&self, epoch: Epoch) {
        let mut cursor = 0;
        self.state.turns_until_done(|state| {
            let part = state.parts.get(Some(epoch))?;
            let some = part.some_ids(&mut cursor, TURN);
            if part.step_counts.num_entries == 0 {
                // With the same lock: what somebody keeps later is not the step's any more.
                state.parts.keeps.forget_step(epoch);
                return None;
            }
            if some.is_empty() {
                // Somebody who kept something is gone, and it came back behind the cursor.
                cursor = 0;
            }
            some.iter().for_each(|id| {
                state.unclaim(id);
            });
            Some(())
        });
    }

    /// These are claimed by no step any more, as long as this claimant lives where it was another one's. How many were.
    pub(crate) fn keep(&self, claimant: Claimant, ids: &[ShardId]) -> u64 {
        let turns = self.state.in_turns(ids, |state, some| some.iter().filter(|id| state.keep(claimant, id)).count());
        turns.into_iter().sum::<usize>() as u64
    }

    /// What this claimant kept of others' steps ends with these. What was stored and ended before is returned, to be
    /// let go of.
    pub(crate) fn give_up_kept(&self, claimant: Claimant) -> Vec<Vec<Stored<P>>> {
        self.state.turns_until_done(|state| {
            let some = state.parts.keeps.give_up(claimant, TURN)?;
            let mut taken = Vec::with_capacity(some.len());
            taken.extend(some.iter().filter_map(|(id, epoch)| state.return_to(*epoch, id)));
            Some(taken)
        })
    }

    fn second(&self) -> u32 {
        u32::try_from(self.made.elapsed().as_secs()).unwrap_or(u32::MAX)
    }

    /// Seconds since the oldest unclaimed shard was stored.
    pub(crate) fn oldest_unclaimed_seconds(&self) -> f64 {
        let oldest = self.state.lock().seconds.first_key_value().map(|(second, _)| *second);
        oldest.map_or(0.0, |second| (self.made.elapsed().as_secs_f64() - f64::from(second)).max(0.0))
    }
}

impl<P> State<P> {
    fn find(&self, id: &ShardId) -> Option<&Stored<P>> {
        self.parts.iter().find_map(|(_, part)| part.get(id))
    }

    fn find_open(&self, id: &ShardId) -> Option<&Stored<P>> {
        self.parts.iter().filter(|(_, part)| !part.is_closed).find_map(|(_, part)| part.get(id))
    }

    /// Among the unclaimed; there is none of this name.
    fn insert(&mut self, id: &ShardId, stored: Stored<P>) {
        *self.seconds.entry(stored.second).or_default() += 1;
        let unclaimed = self.parts.unclaimed();
        unclaimed.step_counts.bring(stored.bytes);
        unclaimed.table(id).insert(id.clone(), stored);
    }

    /// Takes out of the unclaimed.
    fn take_unclaimed(&mut self, id: &ShardId) -> Option<Stored<P>> {
        let unclaimed = self.parts.unclaimed();
        let stored = unclaimed.take(id)?;
        unclaimed.step_counts.free(stored.bytes);
        self.parts.keeps.forget(id);
        if let Some(count) = self.seconds.get_mut(&stored.second) {
            *count -= 1;
            if *count == 0 {
                self.seconds.remove(&stored.second);
            }
        }
        Some(stored)
    }

    /// Takes out of the step that claimed it.
    fn take_claimed(&mut self, id: &ShardId) -> Option<Stored<P>> {
        self.parts.iter_mut().find_map(|(epoch, part)| {
            let stored = epoch.and_then(|_| part.take(id))?;
            part.step_counts.free(stored.bytes);
            Some(stored)
        })
    }

    fn remove(&mut self, id: &ShardId) -> Option<Stored<P>> {
        self.take_unclaimed(id).or_else(|| self.take_claimed(id))
    }

    fn unclaim(&mut self, id: &ShardId) -> bool {
        let taken = self.take_claimed(id);
        taken.map(|stored| self.insert(id, stored)).is_some()
    }

    fn keep(&mut self, claimant: Claimant, id: &ShardId) -> bool {
        let of = self.parts.iter().find_map(|(epoch, part)| epoch.filter(|_| part.get(id).is_some()));
        let is_claimed = self.unclaim(id);
        let unclaimed = self.parts.unclaimed();
        let Some(stored) = unclaimed.find_mut(id) else { return false };
        stored.was_kept = true;
        self.parts.keep(claimant, id, of);
        is_claimed
    }

    /// What nobody keeps any more is the step's again that it was of; it is returned where that is over.
    fn return_to(&mut self, epoch: Epoch, id: &ShardId) -> Option<Stored<P>> {
        let stored = self.take_unclaimed(id)?;
        match self.parts.get_mut(Some(epoch)) {
            Some(part) => {
                part.step_counts.bring(stored.bytes);
                part.table(id).insert(id.clone(), stored);
                None
            }
            None => Some(stored),
        }
    }

    fn claim(&mut self, epoch: Epoch, id: &ShardId, claimed: &mut Claimed) {
        if let Some(stored) = self.take_unclaimed(id) {
            claimed.claimed_count += 1;
            claimed.total_bytes += stored.bytes;
            claimed.kept.extend(stored.was_kept.then(|| id.clone()));
            let part = self.parts.get_mut(Some(epoch)).expect("looked at with this lock");
            part.step_counts.bring(stored.bytes);
            part.table(id).insert(id.clone(), stored);
            return;
        }
        match self.parts.get(Some(epoch)).and_then(|part| part.get(id)) {
            Some(stored) => claimed.kept.extend(stored.was_kept.then(|| id.clone())),
            None if self.find(id).is_some() => claimed.taken.push(id.clone()),
            None => claimed.missing.push(id.clone()),
        }
    }
}

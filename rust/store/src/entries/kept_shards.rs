//! Shards of other claimants' steps that a claimant keeps.
//!
//! Invariants: a shard is kept for as long as one of its keepers lives; then it ends with its step after all, which may
//! be over. Shards that a claimant keeps of its own steps, or of none, are not listed here: they outlive it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::shard_id::ShardId;
use crate::{Claimant, Epoch};

/// By who keeps it, the step of each.
#[derive(Debug, Default)]
pub(crate) struct KeptShards(HashMap<Claimant, HashMap<ShardId, Epoch>>);

impl KeptShards {
    /// The step that it ends with when nobody keeps it any more.
    pub(crate) fn step_of(&self, id: &ShardId) -> Option<Epoch> {
        self.0.values().find_map(|kept| kept.get(id)).copied()
    }

    pub(crate) fn note(&mut self, claimant: Claimant, id: &ShardId, epoch: Epoch) {
        self.0.entry(claimant).or_default().insert(id.clone(), epoch);
    }

    /// It was claimed anew, drained or removed.
    pub(crate) fn forget(&mut self, id: &ShardId) {
        self.0.retain(|_, kept| {
            kept.remove(id);
            !kept.is_empty()
        });
    }

    /// Nothing ends with this step any more: its claimant is gone.
    pub(crate) fn forget_step(&mut self, epoch: Epoch) {
        self.0.retain(|_, kept| {
            kept.retain(|_, of| *of != epoch);
            !kept.is_empty()
        });
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Up to `most` of what this claimant kept and nobody else does, with their steps: it keeps them no longer. `None`
    /// when that was all.
    pub(crate) fn give_up(&mut self, claimant: Claimant, most: usize) -> Option<Vec<(ShardId, Epoch)>> {
        let Entry::Occupied(mut its) = self.0.entry(claimant) else { return None };
        let some: Vec<ShardId> = its.get().keys().take(most).cloned().collect();
        let mut given_up: Vec<_> = some.into_iter().filter_map(|id| its.get_mut().remove_entry(&id)).collect();
        if its.get().is_empty() {
            its.remove();
        }
        given_up.retain(|(id, _)| self.step_of(id).is_none());
        Some(given_up)
    }
}

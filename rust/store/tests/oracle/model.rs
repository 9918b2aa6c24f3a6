//! The model of the entries of one store: the step of each, and the bytes that each step added and holds.

use std::collections::BTreeMap;

use tundish_store::ShardId;

/// In place of a step, of what is fetched while there is none.
pub(crate) const NEXT: u64 = u64::MAX;

/// Of a step, on one store.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StepCounts {
    pub(crate) added: u64,
    pub(crate) held: u64,
    pub(crate) has_ended: bool,
}

/// The entries of a store, each with its step and its bytes.
pub(crate) struct Model<K> {
    pub(crate) entries: BTreeMap<K, (Option<u64>, u64)>,
    pub(crate) all_counts: BTreeMap<u64, StepCounts>,
    pub(crate) next: StepCounts,
}

impl<K: Ord + Clone + Named> Model<K> {
    pub(crate) fn new() -> Self {
        Model { entries: BTreeMap::new(), all_counts: BTreeMap::new(), next: StepCounts::default() }
    }

    pub(crate) fn is_open(&self, step: u64) -> bool {
        self.all_counts.get(&step).is_some_and(|step_counts| !step_counts.has_ended)
    }

    pub(crate) fn of(&self, id: &ShardId, is_wanted: impl Fn(Option<u64>) -> bool) -> Vec<K> {
        let all = self.entries.iter().filter(|(key, (step, _))| key.id() == id && is_wanted(*step));
        all.map(|(key, _)| key.clone()).collect()
    }

    pub(crate) fn move_to(&mut self, step: Option<u64>, keys: &[K]) {
        for key in keys {
            let (_, bytes) = self.take(key).unwrap();
            self.put(key.clone(), step, bytes);
        }
    }

    /// How many were of steps.
    pub(crate) fn keep(&mut self, ids: &[ShardId]) -> u64 {
        let of_steps: Vec<_> = ids.iter().map(|id| self.of(id, |step| step.is_some())).collect();
        let mut count = 0;
        for keys in of_steps {
            // An id may be named twice.
            let keys: Vec<_> = keys.into_iter().filter(|key| self.entries[key].0.is_some()).collect();
            count += keys.len() as u64;
            self.move_to(None, &keys);
        }
        count
    }

    pub(crate) fn open_steps_of(&self, claimant: u64) -> Vec<u64> {
        self.all_counts.keys().copied().filter(|step| step % 2 == claimant && self.is_open(*step)).collect()
    }

    pub(crate) fn count(&mut self, step: Option<u64>, added: u64, freed: u64) {
        if let Some(step) = step {
            let step_counts = if step == NEXT { &mut self.next } else { self.all_counts.get_mut(&step).unwrap() };
            step_counts.added += added;
            step_counts.held = step_counts.held + added - freed;
        }
    }

    pub(crate) fn put(&mut self, key: K, step: Option<u64>, bytes: u64) {
        self.entries.insert(key, (step, bytes));
        self.count(step, bytes, 0);
    }

    pub(crate) fn take(&mut self, key: &K) -> Option<(Option<u64>, u64)> {
        let (step, bytes) = self.entries.remove(key)?;
        self.count(step, 0, bytes);
        Some((step, bytes))
    }

    pub(crate) fn begin(&mut self, step: u64) -> bool {
        if let Some(step_counts) = self.all_counts.get(&step) {
            return !step_counts.has_ended;
        }
        let next = self.entries.values_mut().filter(|(of, _)| *of == Some(NEXT));
        next.for_each(|(of, _)| *of = Some(step));
        self.all_counts.insert(step, std::mem::take(&mut self.next));
        true
    }

    pub(crate) fn end(&mut self, step: u64) {
        self.entries.retain(|_, (of, _)| *of != Some(step));
        let step_counts = self.all_counts.entry(step).or_default();
        (step_counts.has_ended, step_counts.held) = (true, 0);
    }

    pub(crate) fn held(&self) -> (u64, u64) {
        (self.entries.len() as u64, self.entries.values().map(|(_, bytes)| bytes).sum())
    }
}

/// Of the consumer's entries.
pub(crate) type FetchedRows = (ShardId, Option<(u64, u64)>);

pub(crate) trait Named {
    fn id(&self) -> &ShardId;
}

impl Named for ShardId {
    fn id(&self) -> &ShardId {
        self
    }
}

impl Named for FetchedRows {
    fn id(&self) -> &ShardId {
        &self.0
    }
}

//! Entries by the step that they end with, and the counts of each step. The owner guards it with a lock.
//!
//! Invariants:
//!
//! 1. Ending a step takes its entries out as a whole, however many there are: they are dropped later and elsewhere.
//!    Entries fetched between steps join the next step.
//! 2. A step that has ended does not begin again, as far back as ended steps are remembered.
//! 3. For each step, the bytes brought in are the bytes freed plus the bytes held.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::StoreError;
use crate::shard_id::ShardId;
use crate::{Claimant, Step};

/// Ended steps that are remembered.
const MAX_ENDED: usize = 256;

/// The token of the entries of no step.
pub(crate) const UNCLAIMED: u64 = 0;

/// Ended steps that the statistics list.
const ENDED_IN_STATS: usize = 8;

/// Bytes and entries of a step since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepCounts {
    pub(crate) added_bytes: u64,
    pub(crate) freed_bytes: u64,
    pub(crate) held_bytes: u64,
    pub(crate) num_entries: u64,
}

impl StepCounts {
    pub(crate) fn add(&mut self, bytes: u64) {
        self.added_bytes += bytes;
        self.held_bytes += bytes;
        self.num_entries += 1;
    }

    pub(crate) fn remove(&mut self, bytes: u64) {
        self.freed_bytes += bytes;
        self.held_bytes -= bytes;
        self.num_entries -= 1;
    }
}

/// Bytes of tensors that were handed out in a step and live.
pub(crate) type Viewed = Arc<AtomicU64>;

/// The entries of one step, or those of none.
pub(crate) struct StepEntries<V> {
    /// Identifies it; a later one has a larger token.
    pub(crate) token: u64,
    pub(crate) claimant: Option<Claimant>,
    pub(crate) step_counts: StepCounts,
    pub(crate) viewed: Viewed,
    pub(crate) entries: HashMap<ShardId, V>,
}

impl<V> StepEntries<V> {
    fn new(token: u64, claimant: Option<Claimant>) -> Self {
        let (step_counts, viewed, entries) = (StepCounts::default(), Viewed::default(), HashMap::new());
        StepEntries { token, claimant, step_counts, viewed, entries }
    }

    /// Takes the entries out and leaves the counts.
    fn empty(&mut self) -> Self {
        let mut empty = StepEntries::new(self.token, self.claimant);
        empty.step_counts = self.step_counts;
        empty.step_counts.freed_bytes += std::mem::take(&mut empty.step_counts.held_bytes);
        empty.step_counts.num_entries = 0;
        empty.viewed = Arc::clone(&self.viewed);
        std::mem::replace(self, empty)
    }
}

/// A step that ended.
pub(crate) struct EndedStep {
    pub(crate) step: Step,
    /// The token of its entries; `None` if it had none.
    token: Option<u64>,
    pub(crate) step_counts: StepCounts,
    pub(crate) viewed: Viewed,
}

/// The counts of a step, and whether it has ended.
pub(crate) struct StepAccount {
    pub(crate) step_counts: StepCounts,
    pub(crate) viewed_bytes: u64,
    pub(crate) has_ended: bool,
}

/// All entries: those of no step, of each step that has begun, and of the next one.
pub(crate) struct EntriesByStep<V> {
    by_step: HashMap<Option<Step>, StepEntries<V>>,
    /// The entries that the next step begins with.
    next: StepEntries<V>,
    ended: VecDeque<EndedStep>,
    next_token: u64,
    pub(crate) high_water_bytes: u64,
}

impl<V> EntriesByStep<V> {
    pub(crate) fn new() -> Self {
        let by_step = HashMap::from([(None, StepEntries::new(UNCLAIMED, None))]);
        EntriesByStep {
            by_step,
            next: StepEntries::new(1, None),
            ended: VecDeque::new(),
            next_token: 2,
            high_water_bytes: 0,
        }
    }

    /// The entries of a step. If the step has not begun, it begins for `claimant` with the entries of the next step.
    pub(crate) fn begin(&mut self, step: Step, claimant: Claimant) -> Result<&mut StepEntries<V>, StoreError> {
        if self.ended_step(step).is_some() {
            return Err(StoreError::StepEnded { step });
        }
        match self.by_step.entry(Some(step)) {
            Entry::Occupied(begun) if begun.get().claimant == Some(claimant) => Ok(begun.into_mut()),
            Entry::Occupied(_) => Err(StoreError::StepTaken { step }),
            Entry::Vacant(place) => {
                let next = StepEntries::new(self.next_token, None);
                self.next_token += 1;
                let mut begun = std::mem::replace(&mut self.next, next);
                begun.claimant = Some(claimant);
                Ok(place.insert(begun))
            }
        }
    }

    /// Takes the step's entries out; `None` if it had none. It does not begin again.
    pub(crate) fn end(&mut self, step: Step) -> Option<StepEntries<V>> {
        let step_entries = self.by_step.remove(&Some(step));
        if self.ended_step(step).is_none() {
            let (mut step_counts, viewed) = step_entries.as_ref().map_or_else(Default::default, |step_entries| {
                (step_entries.step_counts, Arc::clone(&step_entries.viewed))
            });
            step_counts.freed_bytes += std::mem::take(&mut step_counts.held_bytes);
            let token = step_entries.as_ref().map(|step_entries| step_entries.token);
            self.ended.push_back(EndedStep { step, token, step_counts, viewed });
            if self.ended.len() > MAX_ENDED {
                self.ended.pop_front();
            }
        }
        step_entries
    }

    /// Takes all entries out, those of the oldest step first; steps go on, with nothing in them.
    pub(crate) fn flush(&mut self) -> Vec<StepEntries<V>> {
        let mut flushed: Vec<_> = self.iter_mut().map(|(_, step_entries)| step_entries.empty()).collect();
        flushed.sort_unstable_by_key(|step_entries| step_entries.token);
        flushed
    }

    pub(crate) fn get(&self, step: Option<Step>) -> Option<&StepEntries<V>> {
        self.by_step.get(&step)
    }

    pub(crate) fn get_mut(&mut self, step: Option<Step>) -> Option<&mut StepEntries<V>> {
        self.by_step.get_mut(&step)
    }

    /// The entries of no step, which are always there.
    pub(crate) fn unclaimed(&mut self) -> &mut StepEntries<V> {
        self.by_step.get_mut(&None).expect("it was made first and is never taken out")
    }

    /// The entries that the next step begins with.
    pub(crate) fn next(&self) -> &StepEntries<V> {
        &self.next
    }

    pub(crate) fn with_token(&self, token: u64) -> Option<&StepEntries<V>> {
        self.iter().map(|(_, step_entries)| step_entries).find(|step_entries| step_entries.token == token)
    }

    pub(crate) fn with_token_mut(&mut self, token: u64) -> Option<&mut StepEntries<V>> {
        self.iter_mut().map(|(_, step_entries)| step_entries).find(|step_entries| step_entries.token == token)
    }

    /// The ended step whose entries had this token.
    pub(crate) fn ended_with_token(&self, token: u64) -> Option<&EndedStep> {
        self.ended.iter().rev().find(|ended| ended.token == Some(token))
    }

    pub(crate) fn ended_step(&self, step: Step) -> Option<&EndedStep> {
        self.ended.iter().rev().find(|ended| ended.step == step)
    }

    /// The counts of a step; `None` if it never began, or ended too long ago.
    pub(crate) fn step_status(&self, step: Step) -> Option<StepAccount> {
        let (step_counts, viewed, has_ended) = match self.get(Some(step)) {
            Some(step_entries) => (step_entries.step_counts, &step_entries.viewed, false),
            None => self.ended_step(step).map(|ended| (ended.step_counts, &ended.viewed, true))?,
        };
        Some(StepAccount { step_counts, viewed_bytes: viewed.load(Ordering::Relaxed), has_ended })
    }

    /// The last steps that have ended, and those that have not, the newest last.
    pub(crate) fn steps(&self) -> (Vec<Step>, Vec<Step>) {
        let mut open: Vec<_> =
            self.iter().filter_map(|(step, step_entries)| Some((step_entries.token, step?))).collect();
        open.sort_unstable_by_key(|(token, _)| *token);
        let ended = self.ended.iter().skip(self.ended.len().saturating_sub(ENDED_IN_STATS)).map(|ended| ended.step);
        (ended.collect(), open.into_iter().map(|(_, step)| step).collect())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Option<Step>, &StepEntries<V>)> {
        self.by_step.iter().map(|(step, step_entries)| (*step, step_entries)).chain([(None, &self.next)])
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (Option<Step>, &mut StepEntries<V>)> {
        self.by_step.iter_mut().map(|(step, step_entries)| (*step, step_entries)).chain([(None, &mut self.next)])
    }

    /// Steps of this claimant.
    pub(crate) fn of_claimant(&self, claimant: Claimant) -> Vec<Step> {
        let its = self.iter().filter(|(_, step_entries)| step_entries.claimant == Some(claimant));
        its.filter_map(|(step, _)| step).collect()
    }

    /// Bytes and entries of all.
    pub(crate) fn held(&self) -> (u64, u64) {
        self.iter().fold((0, 0), |(bytes, entries), (_, step_entries)| {
            (bytes + step_entries.step_counts.held_bytes, entries + step_entries.step_counts.num_entries)
        })
    }

    pub(crate) fn update_high_water(&mut self) {
        self.high_water_bytes = self.high_water_bytes.max(self.held().0);
    }
}

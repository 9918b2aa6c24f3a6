//! Entries by the step that they end with, and the account of each step. The owner guards it with a lock.
//!
//! Invariants:
//!
//! 1. Ending a step takes its entries out as a whole, however many there are: they are dropped later and elsewhere.
//!    Likewise a step begins with all entries that came for it beforehand.
//! 2. A step that has ended does not begin again, as far back as ended steps are remembered.
//! 3. For each step, the bytes brought in are the bytes freed plus the bytes held.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::StoreError;
use crate::shard_id::ShardId;
use crate::{Claimant, Step};

/// Steps that ended and are remembered.
const REMEMBERED: usize = 256;

/// The token of the part of no step.
pub(crate) const UNCLAIMED: u64 = 0;

/// Ended steps in the statistics.
const TOLD: usize = 8;

/// Bytes and entries of a part since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepCounts {
    pub(crate) brought_bytes: u64,
    pub(crate) freed_bytes: u64,
    pub(crate) held_bytes: u64,
    pub(crate) num_entries: u64,
}

impl StepCounts {
    pub(crate) fn bring(&mut self, bytes: u64) {
        self.brought_bytes += bytes;
        self.held_bytes += bytes;
        self.num_entries += 1;
    }

    pub(crate) fn free(&mut self, bytes: u64) {
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

    /// Takes the entries out and leaves the account.
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
    /// Of its part, where it had one.
    token: Option<u64>,
    pub(crate) step_counts: StepCounts,
    pub(crate) viewed: Viewed,
}

/// The account of a step.
pub(crate) struct StepStatus {
    pub(crate) step_counts: StepCounts,
    pub(crate) viewed_bytes: u64,
    pub(crate) has_ended: bool,
}

/// All entries: those of no step, of each step that has begun, and of the next one.
pub(crate) struct EntriesByStep<V> {
    parts: HashMap<Option<Step>, StepEntries<V>>,
    /// The entries that the next step begins with.
    next: StepEntries<V>,
    past: VecDeque<EndedStep>,
    next_token: u64,
    pub(crate) high_water_bytes: u64,
}

impl<V> EntriesByStep<V> {
    pub(crate) fn new() -> Self {
        let parts = HashMap::from([(None, StepEntries::new(UNCLAIMED, None))]);
        EntriesByStep {
            parts,
            next: StepEntries::new(1, None),
            past: VecDeque::new(),
            next_token: 2,
            high_water_bytes: 0,
        }
    }

    /// The part of a step. If the step has not begun, it begins for `claimant` with the entries of the next step.
    pub(crate) fn begin(&mut self, step: Step, claimant: Claimant) -> Result<&mut StepEntries<V>, StoreError> {
        if self.past(step).is_some() {
            return Err(StoreError::StepEnded { step });
        }
        match self.parts.entry(Some(step)) {
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

    /// Takes the step's part out; `None` where it had none. It does not begin again.
    pub(crate) fn end(&mut self, step: Step) -> Option<StepEntries<V>> {
        let part = self.parts.remove(&Some(step));
        if self.past(step).is_none() {
            let (mut step_counts, viewed) =
                part.as_ref().map_or_else(Default::default, |part| (part.step_counts, Arc::clone(&part.viewed)));
            step_counts.freed_bytes += std::mem::take(&mut step_counts.held_bytes);
            let token = part.as_ref().map(|part| part.token);
            self.past.push_back(EndedStep { step, token, step_counts, viewed });
            if self.past.len() > REMEMBERED {
                self.past.pop_front();
            }
        }
        part
    }

    /// Takes all entries out, those of the oldest step first; steps go on, with nothing in them.
    pub(crate) fn flush(&mut self) -> Vec<StepEntries<V>> {
        let mut parts: Vec<_> = self.iter_mut().map(|(_, part)| part.empty()).collect();
        parts.sort_unstable_by_key(|part| part.token);
        parts
    }

    pub(crate) fn get(&self, step: Option<Step>) -> Option<&StepEntries<V>> {
        self.parts.get(&step)
    }

    pub(crate) fn get_mut(&mut self, step: Option<Step>) -> Option<&mut StepEntries<V>> {
        self.parts.get_mut(&step)
    }

    /// The part of no step, which is always there.
    pub(crate) fn unclaimed(&mut self) -> &mut StepEntries<V> {
        self.parts.get_mut(&None).expect("it was made first and is never taken out")
    }

    /// The part for entries that arrive while there is no step.
    pub(crate) fn next(&self) -> &StepEntries<V> {
        &self.next
    }

    pub(crate) fn with_token(&self, token: u64) -> Option<&StepEntries<V>> {
        self.iter().map(|(_, part)| part).find(|part| part.token == token)
    }

    pub(crate) fn with_token_mut(&mut self, token: u64) -> Option<&mut StepEntries<V>> {
        self.iter_mut().map(|(_, part)| part).find(|part| part.token == token)
    }

    /// The step that ended with the part of this token.
    pub(crate) fn past_of_token(&self, token: u64) -> Option<&EndedStep> {
        self.past.iter().rev().find(|past| past.token == Some(token))
    }

    pub(crate) fn past(&self, step: Step) -> Option<&EndedStep> {
        self.past.iter().rev().find(|past| past.step == step)
    }

    /// How a step stands; `None` where it never began, or ended too long ago.
    pub(crate) fn step_status(&self, step: Step) -> Option<StepStatus> {
        let (step_counts, viewed, has_ended) = match self.get(Some(step)) {
            Some(part) => (part.step_counts, &part.viewed, false),
            None => self.past(step).map(|past| (past.step_counts, &past.viewed, true))?,
        };
        Some(StepStatus { step_counts, viewed_bytes: viewed.load(Ordering::Relaxed), has_ended })
    }

    /// The last steps that have ended, and those that have not, the newest last.
    pub(crate) fn steps(&self) -> (Vec<Step>, Vec<Step>) {
        let mut open: Vec<_> = self.iter().filter_map(|(step, part)| Some((part.token, step?))).collect();
        open.sort_unstable();
        let past = self.past.iter().skip(self.past.len().saturating_sub(TOLD)).map(|past| past.step);
        (past.collect(), open.into_iter().map(|(_, step)| step).collect())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Option<Step>, &StepEntries<V>)> {
        self.parts.iter().map(|(step, part)| (*step, part)).chain([(None, &self.next)])
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (Option<Step>, &mut StepEntries<V>)> {
        self.parts.iter_mut().map(|(step, part)| (*step, part)).chain([(None, &mut self.next)])
    }

    /// Steps of this claimant.
    pub(crate) fn of_claimant(&self, claimant: Claimant) -> Vec<Step> {
        let its = self.iter().filter(|(_, part)| part.claimant == Some(claimant));
        its.filter_map(|(step, _)| step).collect()
    }

    /// Bytes and entries of all.
    pub(crate) fn held(&self) -> (u64, u64) {
        self.iter().fold((0, 0), |(bytes, entries), (_, part)| {
            (bytes + part.step_counts.held_bytes, entries + part.step_counts.num_entries)
        })
    }

    pub(crate) fn saw_peak(&mut self) {
        self.high_water_bytes = self.high_water_bytes.max(self.held().0);
    }
}

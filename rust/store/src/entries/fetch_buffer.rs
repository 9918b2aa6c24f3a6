//! The shards that this process fetched, by step, and those that it is fetching.
//!
//! Invariants:
//!
//! 1. A shard that several threads want at once is fetched by the first of them. The others get its result, or its
//!    failure. If the failure may concern the first thread alone, they fetch for themselves.
//! 2. A fetched shard is kept only if nothing drained it meanwhile: its step has not ended, the buffer was not cleared,
//!    and it was not drained by its id. Otherwise it is refused and counted, and the fetching thread gets an error.
//! 3. A failure is not remembered: a later request fetches again.
//! 4. A shard that is fetched between two steps belongs to the next one: everything ends with a step, unless somebody
//!    keeps it.
//! 5. A fetch is settled once, and every waiting thread learns the outcome.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use smallvec::SmallVec;

use crate::entries::by_step::{EntriesByStep, StepEntries, UNCLAIMED, Viewed};
use crate::entries::locked::{forget, in_chunks};
use crate::entries::sync::{Condvar, Mutex, StateGuard, StateMutex, lock};
use crate::error::StoreError;
use crate::selection::Selection;
use crate::shard_id::ShardId;
use crate::{Claimant, Step};

/// A fetched shard, or some of its rows.
#[derive(Debug)]
pub(crate) struct FetchedShard<P> {
    owner: Arc<str>,
    rows: Selection,
    bytes: u64,
    payload: P,
}

/// The entries of one shard id: several if rows were chosen, or if two owners have shards of one name.
pub(crate) type ShardEntries<P> = SmallVec<[FetchedShard<P>; 1]>;

/// The step under which a call began.
#[derive(Clone, Debug)]
pub(crate) struct CallStep {
    /// `None` for the next step.
    step: Option<Step>,
    /// Identifies the entries that it adds to.
    token: u64,
    pub(crate) viewed: Viewed,
}

/// A wanted shard, or some of its rows.
#[derive(Clone, Debug)]
pub(crate) struct ShardKey {
    pub(crate) id: ShardId,
    pub(crate) owner: Arc<str>,
    pub(crate) rows: Selection,
}

/// A fetched tensor, and its rows of the shard.
pub(crate) type Found<P> = (P, Selection);

/// The outcome of a look-up in the buffer.
#[derive(Debug)]
pub(crate) enum BufferLookup<P> {
    /// The buffer has it, with these rows.
    Hit(P, Selection),
    /// Another thread is fetching it.
    Pending(Arc<InFlight<P>>),
    /// The caller must fetch it, and then call either `insert` or `fail`.
    Miss(Arc<InFlight<P>>),
}

/// Counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FetchCounts {
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    pub(crate) late: u64,
    pub(crate) in_flight: u64,
}

pub(crate) struct State<P> {
    pub(crate) by_step: EntriesByStep<ShardEntries<P>>,
    in_flight: HashMap<ShardId, SmallVec<[Arc<InFlight<P>>; 1]>>,
    current: Option<Step>,
    pub(crate) counts: FetchCounts,
}

/// The buffer of one process.
pub(crate) struct FetchBuffer<P> {
    state: StateMutex<State<P>>,
}

impl<P: Clone> FetchBuffer<P> {
    pub(crate) fn new() -> Self {
        let state = State {
            by_step: EntriesByStep::new(),
            in_flight: HashMap::new(),
            current: None,
            counts: FetchCounts::default(),
        };
        FetchBuffer { state: StateMutex::new(state) }
    }

    pub(crate) fn lock(&self) -> StateGuard<'_, State<P>> {
        lock(&self.state)
    }

    /// Begins a step: later calls belong to it.
    pub(crate) fn begin(&self, step: Step, claimant: Claimant) -> Result<(), StoreError> {
        let mut state = self.lock();
        state.by_step.begin(step, claimant)?;
        state.current = Some(step);
        Ok(())
    }

    pub(crate) fn current(&self) -> Option<Step> {
        self.lock().current
    }

    /// The step of a call that begins now.
    pub(crate) fn call_step(&self) -> CallStep {
        let state = self.lock();
        let step = state.current;
        let step_entries = state.current_entries();
        CallStep { step, token: step_entries.token, viewed: Arc::clone(&step_entries.viewed) }
    }

    /// Looks up at most [`CHUNK_LEN`](crate::entries::locked::CHUNK_LEN) shards. `is_first` if the caller looks them
    /// up for the first time.
    ///
    /// # Errors
    /// [`StoreError::StepEnded`] where the call's step has.
    pub(crate) fn look_up(
        &self,
        call_step: &CallStep,
        wanted: &[ShardKey],
        is_first: bool,
    ) -> Result<Vec<BufferLookup<P>>, StoreError> {
        let mut state = self.lock();
        let token = state.entries_for(call_step)?.token;
        Ok(wanted.iter().map(|key| state.look_up(call_step.step, token, key, is_first)).collect())
    }

    /// Keeps a shard that has arrived, and gives it to all threads that wait for it.
    ///
    /// # Errors
    /// [`StoreError::StepEnded`] and [`StoreError::Drained`] where it came too late.
    pub(crate) fn insert(&self, in_flight: &Arc<InFlight<P>>, payload: P, bytes: u64) -> Result<(), StoreError> {
        let mut state = self.lock();
        let is_wanted = state.forget_in_flight(in_flight);
        let Some(step_entries) = state.by_step.with_token_mut(in_flight.token).filter(|_| is_wanted) else {
            return Err(state.refuse_late(in_flight));
        };
        let InFlight { owner, rows, .. } = &**in_flight;
        let fetched = FetchedShard { owner: Arc::clone(owner), rows: rows.clone(), bytes, payload: payload.clone() };
        step_entries.step_counts.add(bytes);
        step_entries.entries.entry(in_flight.id.clone()).or_default().push(fetched);
        state.by_step.update_high_water();
        drop(state);
        in_flight.finish(Outcome::Arrived(payload, in_flight.rows.clone()));
        Ok(())
    }

    /// A fetch has failed.
    pub(crate) fn fail(&self, in_flight: &Arc<InFlight<P>>, outcome: Outcome<P>) {
        self.lock().forget_in_flight(in_flight);
        in_flight.finish(outcome);
    }

    /// Ends a step, and returns its entries to be dropped.
    pub(crate) fn end(&self, step: Step) -> Option<StepEntries<ShardEntries<P>>> {
        let mut state = self.lock();
        let step_entries = state.by_step.end(step);
        if state.current == Some(step) {
            state.current = state.newest();
        }
        step_entries
    }

    /// Takes all entries out, to be dropped. Fetches under way will not be kept.
    pub(crate) fn flush(&self) -> Vec<StepEntries<ShardEntries<P>>> {
        let mut state = self.lock();
        let (flushed, cancelled) = (state.by_step.flush(), std::mem::take(&mut state.in_flight));
        drop(state);
        cancelled.into_values().flatten().for_each(|in_flight| in_flight.cancel());
        flushed
    }

    /// Takes the entries of these shards out, to be dropped. Fetches of them that are under way will not be kept.
    pub(crate) fn remove(&self, ids: &[ShardId]) -> Vec<Vec<ShardEntries<P>>> {
        // A list for each chunk: one long list would be moved as it grows, with the lock held.
        let chunks = in_chunks(&self.state, ids, |state, chunk| {
            let mut removed = Vec::with_capacity(chunk.len());
            for id in chunk {
                state.by_step.iter_mut().for_each(|(_, step_entries)| removed.extend(take(step_entries, id)));
            }
            let cancelled: Vec<_> = chunk.iter().filter_map(|id| state.in_flight.remove(id)).flatten().collect();
            (removed, cancelled)
        });
        let (removed, cancelled): (Vec<_>, Vec<_>) = chunks.into_iter().unzip();
        cancelled.into_iter().flatten().for_each(|in_flight| in_flight.cancel());
        removed
    }

    /// Drops the parent's entries in a child made by `fork`.
    pub(crate) fn forget(&self) {
        forget(&self.state, |state| drop(state.by_step.flush()));
    }

    /// Keeps the entries of these shards beyond their step. Returns their number.
    pub(crate) fn keep(&self, ids: &[ShardId]) -> u64 {
        let counts = in_chunks(&self.state, ids, |state, chunk| chunk.iter().map(|id| state.keep(id)).sum::<u64>());
        counts.into_iter().sum()
    }
}

impl<P: Clone> State<P> {
    /// The entries of the step under way, or of the next one.
    pub(crate) fn current_entries(&self) -> &StepEntries<ShardEntries<P>> {
        self.by_step.get(self.current).filter(|_| self.current.is_some()).unwrap_or_else(|| self.by_step.next())
    }

    /// The entries that a call's fetches are added to.
    fn entries_for(&self, call_step: &CallStep) -> Result<&StepEntries<ShardEntries<P>>, StoreError> {
        self.by_step.with_token(call_step.token).ok_or_else(|| self.ended(call_step.token, call_step.step))
    }

    /// The error of a call whose step has ended.
    fn ended(&self, token: u64, step: Option<Step>) -> StoreError {
        let step = self.by_step.ended_with_token(token).map(|ended| ended.step).or(step);
        StoreError::StepEnded { step: step.unwrap_or_default() }
    }

    fn look_up(&mut self, step: Option<Step>, token: u64, key: &ShardKey, is_first: bool) -> BufferLookup<P> {
        if let Some(fetched) = self.find(key) {
            let hit = BufferLookup::Hit(fetched.payload.clone(), fetched.rows.clone());
            self.counts.hits += u64::from(is_first);
            return hit;
        }
        if let Some(in_flight) = self.find_in_flight(key) {
            let pending = BufferLookup::Pending(Arc::clone(in_flight));
            self.counts.hits += u64::from(is_first);
            return pending;
        }
        self.counts.misses += 1;
        self.counts.in_flight += 1;
        let in_flight = InFlight::new(key.id.clone(), Arc::clone(&key.owner), key.rows.clone(), step, token);
        let in_flight = Arc::new(in_flight);
        self.in_flight.entry(key.id.clone()).or_default().push(Arc::clone(&in_flight));
        BufferLookup::Miss(in_flight)
    }

    fn find(&self, key: &ShardKey) -> Option<&FetchedShard<P>> {
        let of_shard = self.by_step.iter().filter_map(|(_, step_entries)| step_entries.entries.get(&key.id)).flatten();
        let mut fitting = of_shard.filter(|fetched| fetched.owner == key.owner && fetched.rows.covers(&key.rows));
        fitting.next()
    }

    /// A fetch under way whose result will be kept.
    fn find_in_flight(&self, key: &ShardKey) -> Option<&Arc<InFlight<P>>> {
        let of_shard = self.in_flight.get(&key.id)?.iter();
        let mut fitting = of_shard.filter(|in_flight| in_flight.owner == key.owner && in_flight.rows.covers(&key.rows));
        fitting.find(|in_flight| self.by_step.with_token(in_flight.token).is_some())
    }

    /// Forgets a fetch under way; `false` if it was forgotten before.
    fn forget_in_flight(&mut self, in_flight: &Arc<InFlight<P>>) -> bool {
        self.counts.in_flight -= 1;
        let Some(of_shard) = self.in_flight.get_mut(&in_flight.id) else { return false };
        let Some(place) = of_shard.iter().position(|other| Arc::ptr_eq(other, in_flight)) else { return false };
        of_shard.swap_remove(place);
        if of_shard.is_empty() {
            self.in_flight.remove(&in_flight.id);
        }
        true
    }

    fn refuse_late(&mut self, in_flight: &Arc<InFlight<P>>) -> StoreError {
        self.counts.late += 1;
        if self.by_step.with_token(in_flight.token).is_none() {
            // Waiters of another step have to ask anew. Waiters of this step learn then that it ended.
            in_flight.finish(Outcome::Again);
            return self.ended(in_flight.token, in_flight.step);
        }
        in_flight.cancel();
        StoreError::Drained { id: in_flight.id.clone() }
    }

    fn newest(&self) -> Option<Step> {
        let begun = self.by_step.iter().filter(|(step, _)| step.is_some());
        begun.max_by_key(|(_, step_entries)| step_entries.token).and_then(|(step, _)| step)
    }

    /// Moves the entries of a shard to those of no step. Returns their number.
    fn keep(&mut self, id: &ShardId) -> u64 {
        let mut kept = ShardEntries::new();
        for (_, step_entries) in self.by_step.iter_mut() {
            if step_entries.token != UNCLAIMED {
                kept.extend(take(step_entries, id).into_iter().flatten());
            }
        }
        let count = kept.len() as u64;
        if count > 0 {
            let unclaimed = self.by_step.unclaimed();
            kept.iter().for_each(|fetched| unclaimed.step_counts.add(fetched.bytes));
            unclaimed.entries.entry(id.clone()).or_default().extend(kept);
        }
        count
    }
}

fn take<P>(step_entries: &mut StepEntries<ShardEntries<P>>, id: &ShardId) -> Option<ShardEntries<P>> {
    let entries = step_entries.entries.remove(id)?;
    entries.iter().for_each(|fetched| step_entries.step_counts.remove(fetched.bytes));
    Some(entries)
}

/// The outcome of a fetch for the threads that wait for it.
#[derive(Clone, Debug)]
pub(crate) enum Outcome<P> {
    /// It arrived, with these rows.
    Arrived(P, Selection),
    /// It failed, and would fail for all.
    Failed(StoreError),
    /// It failed for a reason that may be the fetcher's own: the others ask again.
    Again,
}

/// A fetch of a shard, or of some of its rows, by the first thread that asked for it.
#[derive(Debug)]
pub(crate) struct InFlight<P> {
    pub(crate) id: ShardId,
    pub(crate) owner: Arc<str>,
    pub(crate) rows: Selection,
    /// The step under which it began, and the token of that step's entries.
    pub(crate) step: Option<Step>,
    pub(crate) token: u64,
    outcome: Mutex<Option<Outcome<P>>>,
    finished: Condvar,
}

impl<P: Clone> InFlight<P> {
    pub(crate) fn new(id: ShardId, owner: Arc<str>, rows: Selection, step: Option<Step>, token: u64) -> Self {
        InFlight { id, owner, rows, step, token, outcome: Mutex::new(None), finished: Condvar::new() }
    }

    /// Sets the outcome, unless it is set, and wakes all waiting threads.
    pub(crate) fn finish(&self, outcome: Outcome<P>) {
        let mut current = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        if current.is_none() {
            *current = Some(outcome);
            self.finished.notify_all();
        }
    }

    /// Fails it, since it was drained.
    pub(crate) fn cancel(&self) {
        self.finish(Outcome::Failed(StoreError::Drained { id: self.id.clone() }));
    }

    /// The outcome; `None` if there is none after `longest`.
    pub(crate) fn wait(&self, longest: Duration) -> Option<Outcome<P>> {
        let mut current = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        if current.is_none() {
            current = self.finished.wait_timeout(current, longest).unwrap_or_else(PoisonError::into_inner).0;
        }
        current.clone()
    }
}

//! The shards that this process fetched, by step, and those that it is fetching.
//!
//! Invariants:
//!
//! 1. A shard that several threads want at once is fetched by the first of them. The others get its result, or its
//!    failure; if the failure may be the first one's own, they fetch for themselves.
//! 2. A fetched shard is kept only if nothing drained it meanwhile: its step has not ended, the buffer was not cleared,
//!    and it was not drained by its id. Else it is refused and counted, and the fetching thread gets an error.
//! 3. A failure is not remembered: a later request fetches again.
//! 4. A shard that is fetched between two steps belongs to the next one: everything ends with a step, unless somebody
//!    keeps it.

use std::collections::HashMap;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::entries::by_step::{EntriesByStep, StepEntries, UNCLAIMED, Viewed};
use crate::entries::fair_lock::FairLock;
use crate::entries::in_flight::{InFlight, Outcome, covers};
use crate::error::StoreError;
use crate::shard_id::{Rows, ShardId};
use crate::{Claimant, Step};

/// A fetched shard, or some of its rows.
#[derive(Debug)]
pub(crate) struct FetchedShard<P> {
    owner: Arc<str>,
    rows: Option<Rows>,
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
    /// The token of its part.
    token: u64,
    pub(crate) viewed: Viewed,
}

/// A wanted shard, or some of its rows.
#[derive(Clone, Debug)]
pub(crate) struct ShardKey {
    pub(crate) id: ShardId,
    pub(crate) owner: Arc<str>,
    pub(crate) rows: Option<Rows>,
}

/// A fetched tensor, and its rows of the shard.
pub(crate) type Found<P> = (P, Option<Rows>);

/// The answer to a question for a shard.
#[derive(Debug)]
pub(crate) enum BufferLookup<P> {
    /// The buffer has it, with these rows.
    Hit(P, Option<Rows>),
    /// Another thread fetches it.
    Joined(Arc<InFlight<P>>),
    /// The caller must fetch it, and then call either `land` or `fail`.
    Leads(Arc<InFlight<P>>),
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
    pub(crate) parts: EntriesByStep<ShardEntries<P>>,
    flights: HashMap<ShardId, SmallVec<[Arc<InFlight<P>>; 1]>>,
    current: Option<Step>,
    pub(crate) counts: FetchCounts,
}

/// The buffer of one process.
pub(crate) struct FetchBuffer<P> {
    pub(crate) state: FairLock<State<P>>,
}

impl<P: Clone> FetchBuffer<P> {
    pub(crate) fn new() -> Self {
        let state = State {
            parts: EntriesByStep::new(),
            flights: HashMap::new(),
            current: None,
            counts: FetchCounts::default(),
        };
        FetchBuffer { state: FairLock::new(state) }
    }

    /// Begins a step: later calls belong to it.
    pub(crate) fn begin(&self, step: Step, claimant: Claimant) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        state.parts.begin(step, claimant)?;
        state.current = Some(step);
        Ok(())
    }

    pub(crate) fn current(&self) -> Option<Step> {
        self.state.lock().current
    }

    /// The step of a call that begins now.
    pub(crate) fn call_step(&self) -> CallStep {
        let state = self.state.lock();
        let step = state.current;
        let part = state.current_part();
        CallStep { step, token: part.token, viewed: Arc::clone(&part.viewed) }
    }

    /// Asks for at most [`TURN`](crate::entries::fair_lock) shards. `is_first` if the caller asks for the first time.
    ///
    /// # Errors
    /// [`StoreError::StepEnded`] where the call's step has.
    pub(crate) fn ask(
        &self,
        call_step: &CallStep,
        wanted: &[ShardKey],
        is_first: bool,
    ) -> Result<Vec<BufferLookup<P>>, StoreError> {
        let mut state = self.state.lock();
        let token = state.part_of(call_step)?.token;
        Ok(wanted.iter().map(|key| state.ask(call_step.step, token, key, is_first)).collect())
    }

    /// A fetched shard has arrived: keeps it, and gives it to all threads that wait for it.
    ///
    /// # Errors
    /// [`StoreError::StepEnded`] and [`StoreError::Drained`] where it came too late.
    pub(crate) fn land(&self, flight: &Arc<InFlight<P>>, payload: P, bytes: u64) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        let is_wanted = state.take_off(flight);
        let Some(part) = state.parts.with_token_mut(flight.token).filter(|_| is_wanted) else {
            return Err(state.refuse(flight));
        };
        let InFlight { owner, rows, .. } = &**flight;
        let fetched = FetchedShard { owner: Arc::clone(owner), rows: rows.clone(), bytes, payload: payload.clone() };
        part.step_counts.bring(bytes);
        part.entries.entry(flight.id.clone()).or_default().push(fetched);
        state.parts.saw_peak();
        drop(state);
        flight.land(Outcome::Landed(payload, flight.rows.clone()));
        Ok(())
    }

    /// A fetch has failed.
    pub(crate) fn fail(&self, flight: &Arc<InFlight<P>>, outcome: Outcome<P>) {
        self.state.lock().take_off(flight);
        flight.land(outcome);
    }

    /// Ends a step, and returns its entries to be dropped.
    pub(crate) fn end(&self, step: Step) -> Option<StepEntries<ShardEntries<P>>> {
        let mut state = self.state.lock();
        let part = state.parts.end(step);
        if state.current == Some(step) {
            state.current = state.newest();
        }
        part
    }

    /// Takes all entries out, to be dropped. Fetches under way will not be kept.
    pub(crate) fn flush(&self) -> Vec<StepEntries<ShardEntries<P>>> {
        let mut state = self.state.lock();
        let (flushed, cancelled) = (state.parts.flush(), std::mem::take(&mut state.flights));
        drop(state);
        cancelled.into_values().flatten().for_each(|flight| flight.cancel());
        flushed
    }

    /// Takes the entries of these shards out, to be dropped. Fetches of them that are under way will not be kept.
    pub(crate) fn remove(&self, ids: &[ShardId]) -> Vec<Vec<ShardEntries<P>>> {
        // In pieces of a turn each: one long list would be moved as it grows, with the lock held.
        let turns = self.state.in_turns(ids, |state, some| {
            let mut removed = Vec::with_capacity(some.len());
            for id in some {
                state.parts.iter_mut().for_each(|(_, part)| removed.extend(take(part, id)));
            }
            let cancelled: Vec<_> = some.iter().filter_map(|id| state.flights.remove(id)).flatten().collect();
            (removed, cancelled)
        });
        let (removed, cancelled): (Vec<_>, Vec<_>) = turns.into_iter().unzip();
        cancelled.into_iter().flatten().for_each(|flight| flight.cancel());
        removed
    }

    /// Drops the parent's entries in a child made by `fork`.
    pub(crate) fn forget(&self) {
        self.state.forget(|state| drop(state.parts.flush()));
    }

    /// Keeps the entries of these shards beyond their step. Returns their number.
    pub(crate) fn keep(&self, ids: &[ShardId]) -> u64 {
        let turns = self.state.in_turns(ids, |state, some| some.iter().map(|id| state.keep(id)).sum::<u64>());
        turns.into_iter().sum()
    }
}

impl<P: Clone> State<P> {
    /// That of the step under way, or of the next one.
    pub(crate) fn current_part(&self) -> &StepEntries<ShardEntries<P>> {
        self.parts.get(self.current).filter(|_| self.current.is_some()).unwrap_or_else(|| self.parts.next())
    }

    /// The part that a call's fetches go to.
    fn part_of(&self, call_step: &CallStep) -> Result<&StepEntries<ShardEntries<P>>, StoreError> {
        self.parts.with_token(call_step.token).ok_or_else(|| self.ended(call_step.token, call_step.step))
    }

    /// The step of this part has ended.
    fn ended(&self, token: u64, step: Option<Step>) -> StoreError {
        let step = self.parts.past_of_token(token).map(|past| past.step).or(step);
        StoreError::StepEnded { step: step.unwrap_or_default() }
    }

    fn ask(&mut self, step: Option<Step>, token: u64, key: &ShardKey, is_first: bool) -> BufferLookup<P> {
        if let Some(held) = self.find(key) {
            let hit = BufferLookup::Hit(held.payload.clone(), held.rows.clone());
            self.counts.hits += u64::from(is_first);
            return hit;
        }
        if let Some(flight) = self.under_way(key) {
            let joined = BufferLookup::Joined(Arc::clone(flight));
            self.counts.hits += u64::from(is_first);
            return joined;
        }
        self.counts.misses += 1;
        self.counts.in_flight += 1;
        let flight = InFlight::new(key.id.clone(), Arc::clone(&key.owner), key.rows.clone(), step, token);
        let flight = Arc::new(flight);
        self.flights.entry(key.id.clone()).or_default().push(Arc::clone(&flight));
        BufferLookup::Leads(flight)
    }

    fn find(&self, key: &ShardKey) -> Option<&FetchedShard<P>> {
        let of_shard = self.parts.iter().filter_map(|(_, part)| part.entries.get(&key.id)).flatten();
        let mut fitting =
            of_shard.filter(|held| held.owner == key.owner && covers(held.rows.as_ref(), key.rows.as_ref()));
        fitting.next()
    }

    /// A flight that will be kept when it lands.
    fn under_way(&self, key: &ShardKey) -> Option<&Arc<InFlight<P>>> {
        let of_shard = self.flights.get(&key.id)?.iter();
        let mut fitting =
            of_shard.filter(|flight| flight.owner == key.owner && covers(flight.rows.as_ref(), key.rows.as_ref()));
        fitting.find(|flight| self.parts.with_token(flight.token).is_some())
    }

    /// Takes a flight off the list; `false` where it was not on it any more.
    fn take_off(&mut self, flight: &Arc<InFlight<P>>) -> bool {
        self.counts.in_flight -= 1;
        let Some(flights) = self.flights.get_mut(&flight.id) else { return false };
        let Some(place) = flights.iter().position(|other| Arc::ptr_eq(other, flight)) else { return false };
        flights.swap_remove(place);
        if flights.is_empty() {
            self.flights.remove(&flight.id);
        }
        true
    }

    fn refuse(&mut self, flight: &Arc<InFlight<P>>) -> StoreError {
        self.counts.late += 1;
        if self.parts.with_token(flight.token).is_none() {
            // Those of another step have to ask anew, and those of this one will learn then that it ended.
            flight.land(Outcome::Again);
            return self.ended(flight.token, flight.step);
        }
        flight.cancel();
        StoreError::Drained { id: flight.id.clone() }
    }

    fn newest(&self) -> Option<Step> {
        let begun = self.parts.iter().filter(|(step, _)| step.is_some());
        begun.max_by_key(|(_, part)| part.token).and_then(|(step, _)| step)
    }

    /// Moves the entries of a shard to those of no step. Returns their number.
    fn keep(&mut self, id: &ShardId) -> u64 {
        let mut kept = ShardEntries::new();
        for (_, part) in self.parts.iter_mut() {
            if part.token != UNCLAIMED {
                kept.extend(take(part, id).into_iter().flatten());
            }
        }
        let count = kept.len() as u64;
        if count > 0 {
            let unclaimed = self.parts.unclaimed();
            kept.iter().for_each(|held| unclaimed.step_counts.bring(held.bytes));
            unclaimed.entries.entry(id.clone()).or_default().extend(kept);
        }
        count
    }
}

fn take<P>(part: &mut StepEntries<ShardEntries<P>>, id: &ShardId) -> Option<ShardEntries<P>> {
    let entries = part.entries.remove(id)?;
    entries.iter().for_each(|held| part.step_counts.free(held.bytes));
    Some(entries)
}

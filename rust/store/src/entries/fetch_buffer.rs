//! The shards that this process fetched, by step, and those that it is fetching.
//!
//! Invariants:
//!
//! 1. A shard that several threads want at once is fetched by the first of them. The others get its result, or its
//!    failure, unless the failure is about what the first one declared and they did not.
//! 2. A fetched shard is kept only if nothing drained it meanwhile: its step has not ended, the buffer was not cleared,
//!    and it was not drained by its id. Else it is refused and counted, and the fetching thread gets an error.
//! 3. A failure is not remembered: a later request fetches again.
//! 4. A shard that is fetched between two steps belongs to the next one: everything ends with a step, unless somebody
//!    keeps it. A kept shard of another claimant's step ends with both.

use std::collections::HashMap;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::entries::by_step::{EntriesByStep, StepEntries, Viewed};
use crate::entries::fair_lock::{FairLock, TURN};
use crate::entries::in_flight::{InFlight, Outcome, covers};
use crate::error::StoreError;
use crate::shard_id::{Rows, ShardId};
use crate::stats::Dropped;
use crate::{Claimant, Epoch};

/// What was fetched of a shard.
#[derive(Debug)]
pub(crate) struct Held<P> {
    owner: Arc<str>,
    rows: Option<Rows>,
    bytes: u64,
    payload: P,
}

/// Of most shards one entry: several where rows were chosen, or two owners have shards of one name.
pub(crate) type Entries<P> = SmallVec<[Held<P>; 1]>;

/// The step under which a call began.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    /// None: the one that was to come.
    epoch: Option<Epoch>,
    /// Of its part.
    token: u64,
    pub(crate) viewed: Viewed,
}

/// What is wanted.
#[derive(Clone, Debug)]
pub(crate) struct Key {
    pub(crate) id: ShardId,
    pub(crate) owner: Arc<str>,
    pub(crate) rows: Option<Rows>,
}

/// What is here, and which rows of the shard it is.
pub(crate) type Found<P> = (P, Option<Rows>);

/// What became of a question.
#[derive(Debug)]
pub(crate) enum Asked<P> {
    /// It is here; of these rows.
    Hit(P, Option<Rows>),
    /// Somebody fetches it.
    Joined(Arc<InFlight<P>>),
    /// Who asked is to fetch it, and then to call `land` or `fail`, one of them, once.
    Leads(Arc<InFlight<P>>),
}

/// Counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    pub(crate) late: u64,
    pub(crate) in_flight: u64,
}

pub(crate) struct State<P> {
    pub(crate) parts: EntriesByStep<Entries<P>>,
    flights: HashMap<ShardId, SmallVec<[Arc<InFlight<P>>; 1]>>,
    current: Option<Epoch>,
    pub(crate) counts: Counts,
}

/// The buffer of one process.
pub(crate) struct Buffer<P> {
    pub(crate) state: FairLock<State<P>>,
}

impl<P: Clone> Buffer<P> {
    pub(crate) fn new() -> Self {
        let state =
            State { parts: EntriesByStep::new(), flights: HashMap::new(), current: None, counts: Counts::default() };
        Buffer { state: FairLock::new(state) }
    }

    /// From here on calls belong to this step.
    pub(crate) fn begin(&self, epoch: Epoch, claimant: Claimant) -> Result<(), StoreError> {
        let mut state = self.state.lock();
        state.parts.begin(epoch, claimant)?;
        state.current = Some(epoch);
        Ok(())
    }

    pub(crate) fn current(&self) -> Option<Epoch> {
        self.state.lock().current
    }

    /// Under which step a call begins.
    pub(crate) fn ticket(&self) -> Ticket {
        let state = self.state.lock();
        let epoch = state.current;
        let part = state.current_part();
        Ticket { epoch, token: part.token, viewed: Arc::clone(&part.viewed) }
    }

    /// Asks for some, few enough to hold the lock for; `is_first` where the caller has not asked for them before.
    ///
    /// # Errors
    /// [`StoreError::StepEnded`] where the call's step has.
    pub(crate) fn ask(&self, ticket: &Ticket, wanted: &[Key], is_first: bool) -> Result<Vec<Asked<P>>, StoreError> {
        let mut state = self.state.lock();
        let token = state.part_of(ticket)?.token;
        Ok(wanted.iter().map(|key| state.ask(ticket.epoch, token, key, is_first)).collect())
    }

    /// Whether it is here, in whichever step.
    pub(crate) fn has(&self, key: &Key) -> bool {
        self.state.lock().find(key).is_some()
    }

    /// What is here of some, with the rows that it has; nobody is asked for the rest.
    ///
    /// # Errors
    /// As of [`ask`](Self::ask).
    pub(crate) fn find(&self, ticket: &Ticket, wanted: &[Key]) -> Result<Vec<Option<Found<P>>>, StoreError> {
        let state = self.state.lock();
        state.part_of(ticket)?;
        let found = wanted.iter().map(|key| state.find(key).map(|held| (held.payload.clone(), held.rows.clone())));
        Ok(found.collect())
    }

    /// What was fetched has come: it is kept, and everybody who waits for it gets it.
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
        let held = Held { owner: Arc::clone(owner), rows: rows.clone(), bytes, payload: payload.clone() };
        part.step_counts.bring(bytes);
        part.table(&flight.id).entry(flight.id.clone()).or_default().push(held);
        state.parts.saw_peak();
        drop(state);
        flight.land(Outcome::Landed(payload, flight.rows.clone()));
        Ok(())
    }

    /// What was to be fetched does not come.
    pub(crate) fn fail(&self, flight: &Arc<InFlight<P>>, outcome: Outcome<P>) {
        self.state.lock().take_off(flight);
        flight.land(outcome);
    }

    /// Ends a step. What it held is returned, to be let go of.
    pub(crate) fn end(&self, epoch: Epoch) -> Option<StepEntries<Entries<P>>> {
        let mut state = self.state.lock();
        let part = state.parts.end(epoch);
        if state.current == Some(epoch) {
            state.current = state.newest();
        }
        part
    }

    /// Drains all; what was held, and what is under way will not be kept.
    pub(crate) fn flush(&self) -> Vec<StepEntries<Entries<P>>> {
        self.state.lock().parts.flush()
    }

    /// Drains what was fetched of these shards; what is under way of them will not be kept. How many entries, and what
    /// was held, to be let go of.
    pub(crate) fn remove(&self, ids: &[ShardId]) -> (Dropped, Vec<Vec<Entries<P>>>) {
        let mut dropped = Dropped::default();
        // In pieces of a turn each: one long list would be moved as it grows, with the lock held.
        let turns = self.state.in_turns(ids, |state, some| {
            let mut removed = Vec::with_capacity(some.len());
            some.iter().for_each(|id| dropped.kept += state.remove(id, &mut removed));
            let cancelled: Vec<_> = some.iter().filter_map(|id| state.flights.remove(id)).flatten().collect();
            (removed, cancelled)
        });
        let (removed, cancelled): (Vec<_>, Vec<_>) = turns.into_iter().unzip();
        for flight in cancelled.into_iter().flatten() {
            flight.land(Outcome::Failed(StoreError::Drained { id: flight.id.clone() }));
        }
        dropped.entries = removed.iter().flatten().map(|entries: &Entries<P>| entries.len() as u64).sum();
        (dropped, removed)
    }

    /// Lets go of what the parent fetched. For a child.
    pub(crate) fn forget(&self) {
        self.state.forget(|state| drop(state.parts.flush()));
    }

    /// What was fetched of these shards ends with no step any more, as long as this claimant lives where it was
    /// another one's. How many entries.
    pub(crate) fn keep(&self, claimant: Claimant, ids: &[ShardId]) -> u64 {
        let turns = self.state.in_turns(ids, |state, some| some.iter().map(|id| state.keep(claimant, id)).sum::<u64>());
        turns.into_iter().sum()
    }

    /// What this claimant kept of others' steps ends with these. What ended before is returned, to be let go of.
    pub(crate) fn give_up_kept(&self, claimant: Claimant) -> Vec<Vec<Entries<P>>> {
        self.state.turns_until_done(|state| {
            let some = state.parts.keeps.give_up(claimant, TURN)?;
            let mut taken = Vec::with_capacity(some.len());
            taken.extend(some.iter().filter_map(|(id, epoch)| state.return_to(*epoch, id)));
            Some(taken)
        })
    }
}

impl<P: Clone> State<P> {
    /// That of the step under way, or of the next one.
    pub(crate) fn current_part(&self) -> &StepEntries<Entries<P>> {
        self.parts.get(self.current).filter(|_| self.current.is_some()).unwrap_or_else(|| self.parts.next())
    }

    /// The part that a call's fetches go to.
    fn part_of(&self, ticket: &Ticket) -> Result<&StepEntries<Entries<P>>, StoreError> {
        let ended = |epoch| StoreError::StepEnded { epoch };
        if let Some(part) = self.parts.with_token(ticket.token) {
            return Ok(part);
        }
        // Ended, or flushed and then another one.
        match (self.parts.past_of_token(ticket.token), ticket.epoch) {
            (Some(past), _) => Err(ended(past.epoch)),
            (None, Some(epoch)) => self.parts.get(Some(epoch)).ok_or_else(|| ended(epoch)),
            (None, None) => Ok(self.current_part()),
        }
    }

    fn ask(&mut self, epoch: Option<Epoch>, token: u64, key: &Key, is_first: bool) -> Asked<P> {
        if let Some(held) = self.find(key) {
            let hit = Asked::Hit(held.payload.clone(), held.rows.clone());
            self.counts.hits += u64::from(is_first);
            return hit;
        }
        if let Some(flight) = self.under_way(key) {
            let joined = Asked::Joined(Arc::clone(flight));
            self.counts.hits += u64::from(is_first);
            return joined;
        }
        self.counts.misses += 1;
        self.counts.in_flight += 1;
        let flight = InFlight::new(key.id.clone(), Arc::clone(&key.owner), key.rows.clone(), epoch, token);
        let flight = Arc::new(flight);
        self.flights.entry(key.id.clone()).or_default().push(Arc::clone(&flight));
        Asked::Leads(flight)
    }

    fn find(&self, key: &Key) -> Option<&Held<P>> {
        let of_shard = self.parts.iter().filter_map(|(_, part)| part.get(&key.id)).flatten();
        let mut fitting =
            of_shard.filter(|held| held.owner == key.owner && covers(held.rows.as_ref(), key.rows.as_ref()));
        fitting.next()
    }

    /// A flight that will be kept when it lands.
    fn under_way(&self, key: &Key) -> Option<&Arc<InFlight<P>>> {
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
        let mut ended = flight.epoch.filter(|epoch| self.parts.get(Some(*epoch)).is_none());
        if let Some(part) = self.parts.with_token_mut(flight.token) {
            part.step_counts.late += 1;
        } else if let Some(past) = self.parts.past_mut(flight.token, flight.epoch) {
            past.step_counts.late += 1;
            ended = Some(past.epoch);
        } else if let Some(part) = self.parts.get_mut(flight.epoch) {
            part.step_counts.late += 1;
        }
        match ended {
            Some(epoch) => {
                // Those of another step have to ask anew, and those of this one will learn then that it ended.
                flight.land(Outcome::Again);
                StoreError::StepEnded { epoch }
            }
            None => {
                let error = StoreError::Drained { id: flight.id.clone() };
                flight.land(Outcome::Failed(error.clone()));
                error
            }
        }
    }

    fn newest(&self) -> Option<Epoch> {
        let begun = self.parts.iter().filter(|(epoch, _)| epoch.is_some());
        begun.max_by_key(|(_, part)| part.age).and_then(|(epoch, _)| epoch)
    }

    /// How many of the entries somebody had kept.
    fn remove(&mut self, id: &ShardId, removed: &mut Vec<Entries<P>>) -> u64 {
        let kept = self.take_kept(id);
        let count = kept.as_ref().map_or(0, |entries| entries.len() as u64);
        removed.extend(kept);
        for part in self.parts.ending_mut() {
            removed.extend(take(part, id));
        }
        count
    }

    fn take_kept(&mut self, id: &ShardId) -> Option<Entries<P>> {
        self.parts.keeps.forget(id);
        take(self.parts.unclaimed(), id)
    }

    fn keep(&mut self, claimant: Claimant, id: &ShardId) -> u64 {
        let of = self.parts.iter().filter(|(epoch, part)| epoch.is_some() && part.get(id).is_some());
        let others = of.filter_map(|(epoch, part)| epoch.filter(|_| part.claimant != Some(claimant)));
        let of = others.max();
        let mut kept = Entries::new();
        for part in self.parts.ending_mut() {
            kept.extend(take(part, id).into_iter().flatten());
        }
        let count = kept.len() as u64;
        if count > 0 {
            bring(self.parts.unclaimed(), id, kept);
        }
        if self.parts.unclaimed().get(id).is_some() {
            self.parts.keep(claimant, id, of);
        }
        count
    }

    /// What nobody keeps any more is the step's again that it was of; it is returned where that is over.
    fn return_to(&mut self, epoch: Epoch, id: &ShardId) -> Option<Entries<P>> {
        let entries = self.take_kept(id)?;
        match self.parts.get_mut(Some(epoch)) {
            Some(part) => {
                bring(part, id, entries);
                None
            }
            None => Some(entries),
        }
    }
}

fn take<P>(part: &mut StepEntries<Entries<P>>, id: &ShardId) -> Option<Entries<P>> {
    let entries = part.take(id)?;
    entries.iter().for_each(|held| part.step_counts.free(held.bytes));
    Some(entries)
}

fn bring<P>(part: &mut StepEntries<Entries<P>>, id: &ShardId, entries: Entries<P>) {
    entries.iter().for_each(|held| part.step_counts.bring(held.bytes));
    part.table(id).entry(id.clone()).or_default().extend(entries);
}

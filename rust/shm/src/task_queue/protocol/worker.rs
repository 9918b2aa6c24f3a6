//! A worker's side: takes a task, leaves its result.

use super::super::atomic::{Acquire, Relaxed, Release};
use super::slot_state::{self as state, Ticket};
use super::spin::Spin;
use super::wait::Wait;
use super::{Words, idle_workers, results, ring};

/// The outcome of a wait for a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken<T> {
    /// A task, this worker's until it is finished.
    Task(T),
    /// No task is left, and the parent wants the workers to stop.
    Stop,
    /// The time was over.
    Nothing,
    /// The check of the wait ended it.
    Interrupted,
}

/// A queue as its workers see it.
pub(crate) struct Worker<W> {
    words: W,
    /// How many workers wait awake at most.
    most_awake: u64,
    spin: Spin,
}

impl<W: Words> Worker<W> {
    pub(crate) fn new(words: W, most_awake: u64) -> Self {
        Self { words, most_awake, spin: Spin::default() }
    }

    pub(crate) fn words(&self) -> &W {
        &self.words
    }

    /// The first task that is queued, if there is one. A worker has one thread at it.
    pub(crate) fn try_take(&self, worker: u16) -> Option<Ticket> {
        ring::take(&self.words, worker)
    }

    /// The first task that is queued, waited for.
    pub(crate) fn take(&self, worker: u16, wait: &mut Wait<'_>) -> Taken<Ticket> {
        if let Some(ticket) = self.try_take(worker) {
            return Taken::Task(ticket);
        }
        idle_workers::begin_search(&self.words, worker);
        let found = self.seek(worker, wait);
        idle_workers::end_search(&self.words, worker);
        found
    }

    /// Whether `finish` would take the result: the task was taken and is not finished.
    pub(crate) fn has(&self, ticket: Ticket) -> bool {
        let slot = ticket.slot();
        slot < self.words.slots() && {
            let state = self.words.state(slot).load(Relaxed);
            state::is_taken(state) && ticket.is_in(state)
        }
    }

    /// Leave the result of a task that this worker has.
    pub(crate) fn finish(&self, ticket: Ticket, kind: u32, payload: &[u8]) {
        let slot = ticket.slot();
        self.words.write(slot, kind, payload);
        let state = self.words.state(slot);
        state.store(state::done(state.load(Relaxed)), Release);
        results::mark(&self.words, slot);
        results::tell(&self.words);
    }

    fn seek(&self, worker: u16, wait: &mut Wait<'_>) -> Taken<Ticket> {
        let started = self.spin.begin();
        loop {
            if idle_workers::searching(&self.words) <= self.most_awake {
                self.spin.look(&started, wait, || ring::backlog(&self.words) > 0 || self.is_stopped());
            }
            // Read before the queue: tasks that were put before the stop are still done.
            let is_stopped = self.is_stopped();
            if let Some(ticket) = ring::take(&self.words, worker) {
                self.spin.end(&started);
                return Taken::Task(ticket);
            }
            if is_stopped {
                return Taken::Stop;
            }
            if wait.is_over() {
                return Taken::Nothing;
            }
            if !idle_workers::sleep(&self.words, worker, wait) && !wait.goes_on() {
                return Taken::Interrupted;
            }
        }
    }

    fn is_stopped(&self) -> bool {
        self.words.stopped().load(Acquire) != 0
    }
}

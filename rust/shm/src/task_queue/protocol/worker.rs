//! A worker's side: takes a task, leaves its result.

use super::super::atomic::{Acquire, Relaxed, Release};
use super::SpinHistory;
use super::TimeLimit;
use super::slots::{self as state, TaskId};
use super::{QueueWords, slots, wakeups};

/// The outcome of a wait for a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeOutcome<T> {
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
pub(crate) struct WorkerProtocol<W> {
    words: W,
    /// How many workers wait awake at most.
    max_spinning: u64,
    spin: SpinHistory,
}

impl<W: QueueWords> WorkerProtocol<W> {
    pub(crate) fn new(words: W, max_spinning: u64) -> Self {
        Self { words, max_spinning, spin: SpinHistory::default() }
    }

    pub(crate) fn words(&self) -> &W {
        &self.words
    }

    /// The first task that is queued, if there is one. A worker has one thread at it.
    pub(crate) fn try_take(&self, worker: u16) -> Option<TaskId> {
        slots::take(&self.words, worker)
    }

    /// The first task that is queued, waited for.
    pub(crate) fn take(&self, worker: u16, limit: &mut TimeLimit<'_>) -> TakeOutcome<TaskId> {
        if let Some(task_id) = self.try_take(worker) {
            return TakeOutcome::Task(task_id);
        }
        wakeups::begin_search(&self.words, worker);
        let found = self.search(worker, limit);
        wakeups::end_search(&self.words, worker);
        found
    }

    /// Whether `finish` would take the result: the task was taken and is not finished.
    pub(crate) fn has(&self, task_id: TaskId) -> bool {
        let slot = task_id.slot();
        slot < self.words.slots() && {
            let state = self.words.state(slot).load(Relaxed);
            state::is_taken(state) && task_id.is_in(state)
        }
    }

    /// Leave the result of a task that this worker has.
    pub(crate) fn finish(&self, task_id: TaskId, kind: u32, payload: &[u8]) {
        let slot = task_id.slot();
        self.words.write(slot, kind, payload);
        let state = self.words.state(slot);
        state.store(state::done(state.load(Relaxed)), Release);
        wakeups::mark(&self.words, slot);
        wakeups::wake_for_result(&self.words);
    }

    fn search(&self, worker: u16, limit: &mut TimeLimit<'_>) -> TakeOutcome<TaskId> {
        let started = self.spin.begin();
        loop {
            if wakeups::count_searching(&self.words) <= self.max_spinning {
                self.spin.spin_until(&started, limit, || slots::backlog(&self.words) > 0 || self.is_stopped());
            }
            // Read before the queue: tasks that were put before the stop are still done.
            let is_stopped = self.is_stopped();
            if let Some(task_id) = slots::take(&self.words, worker) {
                self.spin.end(&started);
                return TakeOutcome::Task(task_id);
            }
            if is_stopped {
                return TakeOutcome::Stop;
            }
            if limit.is_over() {
                return TakeOutcome::Nothing;
            }
            if !wakeups::sleep(&self.words, worker, limit) && !limit.may_continue() {
                return TakeOutcome::Interrupted;
            }
        }
    }

    fn is_stopped(&self) -> bool {
        self.words.stopped().load(Acquire) != 0
    }
}

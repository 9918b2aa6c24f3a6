//! The slots of tasks: the state word of each, and the ring of their numbers, with one producer and many consumers.
//!
//! A state has the phase of a slot's task, its worker, and its position. A position is counted up with each task and
//! never comes back: 46 bits are a million tasks a second for two years. So a state that was read before can be
//! exchanged only if the slot still holds the same task in the same phase.
//!
//! Invariants: a worker takes a task by exchanging the state of its slot, which holds its position and the worker's
//! number, and by nothing else. The head follows: a process that finds the task at the head taken or revoked moves the
//! head on. So no process waits for the worker that took it.
//!
//! The parent reuses an entry only after the head has passed it. A consumer that read an old head may still read the
//! new entry; the slot in it is queued under another position, and both its exchanges fail.

use super::super::atomic::{AcqRel, Acquire, Relaxed, Release};
use super::QueueWords;

/// No task; the parent's.
pub(crate) const FREE: u64 = 0;

const QUEUED: u64 = 1;
const TAKEN: u64 = 2;
const DONE: u64 = 3;

const PHASE: u64 = 3;
const WORKER_SHIFT: u32 = 2;
const POSITION_SHIFT: u32 = 18;
const SLOT_BITS: u32 = 16;

/// Where a task is: in the queue, not with any worker.
pub(crate) fn queued(position: u64) -> u64 {
    position << POSITION_SHIFT | QUEUED
}

/// With `worker`.
pub(crate) fn taken(position: u64, worker: u16) -> u64 {
    position << POSITION_SHIFT | u64::from(worker) << WORKER_SHIFT | TAKEN
}

/// The state in which a worker leaves a slot that it had taken.
pub(crate) fn done(taken: u64) -> u64 {
    taken & !PHASE | DONE
}

pub(crate) fn is_taken(state: u64) -> bool {
    state & PHASE == TAKEN
}

pub(crate) fn is_done(state: u64) -> bool {
    state & PHASE == DONE
}

/// Returns whether this worker has taken or done the task in the slot.
pub(crate) fn is_of(state: u64, worker: u16) -> bool {
    (is_taken(state) || is_done(state)) && (state >> WORKER_SHIFT) as u16 == worker
}

/// One task from `put` until its result is collected: its slot and its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId(u64);

impl TaskId {
    /// The task at `position` in the queue.
    pub(crate) fn new(position: u64, slot: usize) -> Self {
        Self::of(queued(position), slot)
    }

    /// The task that a slot in this state holds.
    pub(crate) fn of(state: u64, slot: usize) -> Self {
        Self(state >> POSITION_SHIFT << SLOT_BITS | slot as u64)
    }

    /// Whether this is the task that a slot in this state holds.
    pub(crate) fn is_in(self, state: u64) -> bool {
        state != FREE && self.0 >> SLOT_BITS == state >> POSITION_SHIFT
    }

    pub(crate) fn slot(self) -> usize {
        (self.0 & ((1 << SLOT_BITS) - 1)) as usize
    }

    pub(crate) fn position(self) -> u64 {
        self.0 >> SLOT_BITS
    }

    /// As a number below 2⁶².
    pub fn number(self) -> u64 {
        self.0
    }

    /// The task id of this number. One that was never given belongs to no task.
    pub fn from_number(number: u64) -> Self {
        Self(number & ((1 << 62) - 1))
    }
}

/// Put the slot, which is the parent's and holds the message, behind the others. Consumers see it from `publish` on.
pub(super) fn push(words: &impl QueueWords, position: u64, slot: usize) -> TaskId {
    words.state(slot).store(queued(position), Relaxed);
    words.entry(position).store(slot as u32, Relaxed);
    TaskId::new(position, slot)
}

/// Show consumers everything below `tail`.
pub(super) fn publish(words: &impl QueueWords, tail: u64) {
    words.tail().store(tail, Release);
}

/// How many positions lie before the tail, those of revoked tasks among them.
pub(super) fn backlog(words: &impl QueueWords) -> u64 {
    let head = words.head().load(Acquire);
    words.tail().load(Acquire).saturating_sub(head)
}

/// Take the first task that is queued.
pub(super) fn take(words: &impl QueueWords, worker: u16) -> Option<TaskId> {
    loop {
        let position = words.head().load(Acquire);
        if words.tail().load(Acquire) <= position {
            return None;
        }
        let slot = words.entry(position).load(Relaxed) as usize;
        let is_mine = slot < words.slots()
            && words.state(slot).compare_exchange(queued(position), taken(position, worker), AcqRel, Relaxed).is_ok();
        advance_head(words, position);
        if is_mine {
            return Some(TaskId::new(position, slot));
        }
    }
}

/// Take a task back that no worker has: its slot is the parent's again. Its entry stays until the head passes it.
pub(super) fn revoke(words: &impl QueueWords, task_id: TaskId) -> bool {
    let queued = queued(task_id.position());
    task_id.slot() < words.slots()
        && words.state(task_id.slot()).compare_exchange(queued, FREE, AcqRel, Relaxed).is_ok()
}

/// Move the head over revoked tasks.
pub(super) fn skip_revoked(words: &impl QueueWords) {
    while backlog(words) > 0 {
        let position = words.head().load(Acquire);
        let slot = words.entry(position).load(Relaxed) as usize;
        if slot < words.slots() && words.state(slot).load(Relaxed) == queued(position) {
            return;
        }
        advance_head(words, position);
    }
}

fn advance_head(words: &impl QueueWords, position: u64) {
    // If the exchange fails, another process has moved the head.
    let _ = words.head().compare_exchange(position, position + 1, AcqRel, Relaxed);
}

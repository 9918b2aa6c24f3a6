//! The state word of a slot: the phase of its task, its worker, and its position.
//!
//! A position is counted up with each task and never comes back: 46 bits are a million tasks a second for two years. So
//! a state that was read before can be exchanged only if the slot still holds the same task in the same phase.

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

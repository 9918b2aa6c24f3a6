//! The ring of slot numbers, with one producer and many consumers.
//!
//! Invariants: a worker takes a task by exchanging the state of its slot, which holds its position and the worker's
//! number, and by nothing else. The head follows: a process that finds the task at the head taken or revoked moves the
//! head on. So no process waits for the worker that took it.
//!
//! The parent reuses an entry only after the head has passed it. A consumer that read an old head may still read the
//! new entry; the slot in it is queued under another position, and both its exchanges fail.

use super::super::atomic::{AcqRel, Acquire, Relaxed, Release};
use super::QueueWords;
use super::slot_state::{self as state, FREE, TaskId};

/// Put the slot, which is the parent's and holds the message, behind the others. Consumers see it from `publish` on.
pub(super) fn push(words: &impl QueueWords, position: u64, slot: usize) -> TaskId {
    words.state(slot).store(state::queued(position), Relaxed);
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
            && words
                .state(slot)
                .compare_exchange(state::queued(position), state::taken(position, worker), AcqRel, Relaxed)
                .is_ok();
        advance_head(words, position);
        if is_mine {
            return Some(TaskId::new(position, slot));
        }
    }
}

/// Take a task back that no worker has: its slot is the parent's again. Its entry stays until the head passes it.
pub(super) fn revoke(words: &impl QueueWords, task_id: TaskId) -> bool {
    let queued = state::queued(task_id.position());
    task_id.slot() < words.slots()
        && words.state(task_id.slot()).compare_exchange(queued, FREE, AcqRel, Relaxed).is_ok()
}

/// Move the head over revoked tasks.
pub(super) fn skip_revoked(words: &impl QueueWords) {
    while backlog(words) > 0 {
        let position = words.head().load(Acquire);
        let slot = words.entry(position).load(Relaxed) as usize;
        if slot < words.slots() && words.state(slot).load(Relaxed) == state::queued(position) {
            return;
        }
        advance_head(words, position);
    }
}

fn advance_head(words: &impl QueueWords, position: u64) {
    // If the exchange fails, another process has moved the head.
    let _ = words.head().compare_exchange(position, position + 1, AcqRel, Relaxed);
}

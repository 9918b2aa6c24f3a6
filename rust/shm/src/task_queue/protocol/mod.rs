//! How a parent and its workers pass tasks and results through words in shared memory.
//!
//! The protocol reaches its words, the payloads and the two calls that sleep and wake through [`QueueWords`], so that a
//! model can check it.
//!
//! Invariants, whichever worker is killed between whichever two instructions:
//!
//! 1. A slot's state names its owner ([`slot_state`]): the parent when free, none while queued, a worker while taken,
//!    and the parent again when done. Only the owner touches the payload.
//! 2. A taken slot carries its worker's number, so a death loses the task that the worker had, and nothing else
//!    ([`ring`]).
//! 3. A bit that is set after the state says done marks a result; where a dead worker did not set it, reaping does
//!    ([`results`]).
//! 4. A process that goes to sleep says so first and looks again afterwards; a process that makes something to do looks
//!    for sleepers afterwards. Sequentially consistent fences stand between the two steps of each, so one of them sees
//!    the other ([`idle_workers`], [`results`]). Reaping a worker wakes all threads that it may have failed to wake.

pub(crate) mod idle_workers;
pub(crate) mod parent;
mod result_wakeups;
mod ring;
pub(crate) mod slot_state;
pub(crate) mod spin;
pub(crate) mod time_limit;
pub(crate) mod worker;

use std::time::Duration;

use super::atomic::{AtomicU32, AtomicU64};

/// The role of a thread that waits for results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaiterRole {
    /// A thread that needs a result now. While one waits, results wake only callers.
    Caller,
    /// The thread that collects results that no caller waits for.
    Background,
}

/// The words of a queue, where its payloads are, and how to sleep on a word.
pub(crate) trait QueueWords {
    /// How many slots there are, at most 65536.
    fn slots(&self) -> usize;
    /// How many entries the queue has: no fewer than slots.
    fn entries(&self) -> u64;
    /// How many workers there can be.
    fn workers(&self) -> u16;
    /// The state of a slot below `slots()`.
    fn state(&self, slot: usize) -> &AtomicU64;
    /// Where the queue holds the slot of the task at this position.
    fn entry(&self, position: u64) -> &AtomicU32;
    /// The position of the next task to take. Never decreases.
    fn head(&self) -> &AtomicU64;
    /// The position behind the last task. Only the parent changes it, upwards.
    fn tail(&self) -> &AtomicU64;
    /// Word `word` of the bitmap of slots with a result, 64 slots each.
    fn finished(&self, word: usize) -> &AtomicU64;
    /// Word `number` of the bitmap of idle workers.
    fn idle_workers(&self, number: usize) -> &AtomicU64;
    /// The word on which a worker sleeps.
    fn wake_word(&self, worker: u16) -> &AtomicU32;
    /// One more than the highest number among the workers that ever found no task.
    fn worker_count(&self) -> &AtomicU32;
    /// Not zero once the workers are to stop.
    fn stopped(&self) -> &AtomicU32;
    /// How many threads of the parent wait as callers.
    fn callers(&self) -> &AtomicU32;
    /// The word on which threads in this role sleep.
    fn result_word(&self, role: WaiterRole) -> &AtomicU32;

    /// Put a message into a slot that is the caller's; `payload` fits into it.
    fn write(&self, slot: usize, kind: u32, payload: &[u8]);
    /// Read the message in a slot that is the caller's.
    fn read<R>(&self, slot: usize, with: impl FnOnce(u32, &[u8]) -> R) -> R;

    /// Sleep as long as `word` is `seen`, until it is woken, a signal comes or `longest` is over.
    fn sleep(&self, word: &AtomicU32, seen: u32, longest: Option<Duration>);
    /// Wakes all threads that sleep on `word`.
    fn wake_all(&self, word: &AtomicU32);
}

//! How a parent and its workers pass tasks and results through words in shared memory.
//!
//! The protocol reaches its words, the payloads and the two calls that sleep and wake through [`QueueWords`], so that a
//! model can check it.
//!
//! Invariants, whichever worker is killed between whichever two instructions:
//!
//! 1. A slot's state names its owner ([`slots`]): the parent when free, none while queued, a worker while taken,
//!    and the parent again when done. Only the owner touches the payload.
//! 2. A taken slot carries its worker's number, so a death loses the task that the worker had, and nothing else
//!    ([`slots`]).
//! 3. A bit that is set after the state says done marks a result; where a dead worker did not set it, reaping does
//!    ([`wakeups`]).
//! 4. A process that goes to sleep says so first and looks again afterwards; a process that makes something to do looks
//!    for sleepers afterwards. Sequentially consistent fences stand between the two steps of each, so one of them sees
//!    the other ([`wakeups`]). Reaping a worker wakes all threads that it may have failed to wake.

pub(crate) mod parent;
pub(crate) mod slots;
pub(crate) mod wakeups;
pub(crate) mod worker;

use core::sync::atomic::Ordering;
use std::time::{Duration, Instant};

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

/// The end of a wait.
pub struct TimeLimit<'a> {
    deadline: Option<Instant>,
    check_every: Option<Duration>,
    check: &'a mut dyn FnMut() -> bool,
}

impl<'a> TimeLimit<'a> {
    /// Wait for `timeout`, or for ever. `check` is called after a signal, and after each `check_every`; the wait ends
    /// when it says `false`.
    pub fn new(timeout: Option<Duration>, check_every: Option<Duration>, check: &'a mut dyn FnMut() -> bool) -> Self {
        // A time beyond the clock's range is no limit.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        Self { deadline, check_every, check }
    }

    /// How long to sleep at most before the next check.
    pub(crate) fn next_sleep(&self) -> Option<Duration> {
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        match (left, self.check_every) {
            (Some(left), Some(every)) => Some(left.min(every)),
            (left, every) => left.or(every),
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    pub(crate) fn may_continue(&mut self) -> bool {
        (self.check)()
    }
}

/// A shorter wait is spent awake. A receiver of a small batch waits a fifth of a millisecond for it.
const MAX_SPIN: Duration = Duration::from_micros(400);
/// Looks between two yields of the processor: the awaited process may need it.
const CHECKS_PER_YIELD: usize = 32;
/// After so many long waits in a row, the next one is expected to be long too.
const LONG_WAITS_BEFORE_SLEEP: u32 = 2;

/// The lengths of the last waits of one side.
#[derive(Debug, Default)]
pub(crate) struct SpinHistory {
    // No word of the queue, so no model looks at it.
    long_waits: core::sync::atomic::AtomicU32,
}

/// A wait that has begun.
pub(crate) struct StartedWait(Instant);

impl SpinHistory {
    pub(crate) fn begin(&self) -> StartedWait {
        StartedWait(Instant::now())
    }

    /// Look until `is_over` or it is time to sleep, or to go.
    pub(crate) fn spin_until(&self, started: &StartedWait, limit: &TimeLimit<'_>, is_over: impl Fn() -> bool) {
        if self.long_waits.load(Ordering::Relaxed) >= LONG_WAITS_BEFORE_SLEEP {
            return;
        }
        while started.0.elapsed() < MAX_SPIN && !limit.is_over() {
            for _ in 0..CHECKS_PER_YIELD {
                if is_over() {
                    return;
                }
                core::hint::spin_loop();
            }
            std::thread::yield_now();
        }
    }

    /// Learn from a wait that is over.
    pub(crate) fn end(&self, started: &StartedWait) {
        let is_long = started.0.elapsed() >= MAX_SPIN;
        let waits = if is_long { self.long_waits.load(Ordering::Relaxed).saturating_add(1) } else { 0 };
        self.long_waits.store(waits, Ordering::Relaxed);
    }
}

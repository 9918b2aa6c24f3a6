//! Which workers search for a task and which sleep, which slots have a result, and whom to wake.
//!
//! A worker that looks for a task *searches*. One that sleeps is *asleep* until it is woken, which makes it searching
//! in the same step. So no worker is woken twice, and the parent wakes only as many as the queue needs beyond those
//! that search already. A worker that stops searching wakes others if there are more tasks than searchers, so no task
//! is forgotten. Go's scheduler does the same with its spinning threads. A word holds 32 workers: its lower half has a
//! bit for each that is asleep, its upper half for each that searches.
//!
//! The lowest bit of a result word says that a thread of the parent sleeps on it, or is about to. A waker clears the bit
//! when it counts the word up, so each sleep costs one wake-up at most.
//!
//! Invariants: a result wakes the callers if there are any, else the background thread. A caller that leaves first
//! stops counting as one and then checks for results again, so a result for it is seen by it or wakes another thread.

use core::ops::Range;

use super::super::atomic::{AcqRel, Acquire, Relaxed, Release, SeqCst, fence};
use super::TimeLimit;
use super::{QueueWords, WaiterRole, slots};

const WORKERS: u16 = 32;

/// The number of words for so many workers.
pub(crate) const fn words_for(workers: u16) -> usize {
    workers.div_ceil(WORKERS) as usize
}

pub(super) fn begin_search(words: &impl QueueWords, worker: u16) {
    if words.worker_count().load(Relaxed) <= u32::from(worker) {
        words.worker_count().fetch_max(u32::from(worker) + 1, AcqRel);
    }
    exchange_bits(words, worker, 0, searching_bit(worker));
}

pub(super) fn end_search(words: &impl QueueWords, worker: u16) {
    exchange_bits(words, worker, searching_bit(worker), 0);
    wake_needed(words);
}

/// Returns the number of workers that search.
pub(super) fn count_searching(words: &impl QueueWords) -> u64 {
    word_numbers(words)
        .map(|number| u64::from((words.idle_workers(number).load(Relaxed) >> WORKERS).count_ones()))
        .sum()
}

/// Sleeps, unless there is something to do. Returns whether the worker was woken. It searches before and after.
pub(super) fn sleep(words: &impl QueueWords, worker: u16, limit: &TimeLimit<'_>) -> bool {
    let wake_word = words.wake_word(worker);
    let seen = wake_word.load(Acquire);
    exchange_bits(words, worker, searching_bit(worker), sleeping_bit(worker));
    fence(SeqCst);
    if slots::backlog(words) == 0 && words.stopped().load(Relaxed) == 0 {
        words.sleep(wake_word, seen, limit.next_sleep());
    }
    exchange_bits(words, worker, sleeping_bit(worker), searching_bit(worker));
    wake_word.load(Relaxed) != seen
}

/// Wakes as many workers as the queue needs; called after a put, or when a worker stops searching.
pub(super) fn wake_needed(words: &impl QueueWords) {
    fence(SeqCst);
    let mut wanted = None;
    for number in word_numbers(words) {
        let word = words.idle_workers(number);
        let mut seen = word.load(Relaxed);
        while seen as u32 != 0 {
            // The queue is read only if a worker sleeps.
            let wanted = wanted.get_or_insert_with(|| slots::backlog(words).saturating_sub(count_searching(words)));
            if *wanted == 0 {
                return;
            }
            let worker = number as u16 * WORKERS + seen.trailing_zeros() as u16;
            let next = seen & !sleeping_bit(worker) | searching_bit(worker);
            match word.compare_exchange(seen, next, AcqRel, Relaxed) {
                Ok(_) => {
                    wake_worker(words, worker);
                    *wanted -= 1;
                    seen = next;
                }
                Err(now) => seen = now,
            }
        }
    }
}

/// Wakes every worker, also those whose waker may have died before it woke them.
pub(super) fn wake_all_workers(words: &impl QueueWords) {
    fence(SeqCst);
    for worker in 0..worker_count(words) {
        wake_worker(words, worker);
    }
}

/// Forget a worker that has died.
pub(super) fn forget(words: &impl QueueWords, worker: u16) {
    exchange_bits(words, worker, sleeping_bit(worker) | searching_bit(worker), 0);
}

fn wake_worker(words: &impl QueueWords, worker: u16) {
    let wake_word = words.wake_word(worker);
    wake_word.fetch_add(1, AcqRel);
    words.wake_all(wake_word);
}

/// Take bits of a worker away and set others, in one step.
fn exchange_bits(words: &impl QueueWords, worker: u16, cleared: u64, set: u64) {
    let word = words.idle_workers(usize::from(worker / WORKERS));
    let mut seen = word.load(Relaxed);
    while let Err(now) = word.compare_exchange(seen, seen & !cleared | set, AcqRel, Relaxed) {
        seen = now;
    }
}

fn sleeping_bit(worker: u16) -> u64 {
    1 << (worker % WORKERS)
}

fn searching_bit(worker: u16) -> u64 {
    sleeping_bit(worker) << WORKERS
}

/// The numbers of the words that are in use.
fn word_numbers(words: &impl QueueWords) -> Range<usize> {
    0..words_for(worker_count(words))
}

fn worker_count(words: &impl QueueWords) -> u16 {
    (words.worker_count().load(Relaxed) as u16).min(words.workers())
}

/// A thread sleeps on the word, or is about to.
const ARMED: u32 = 1;

/// Say that a slot is done. Its state says so already.
pub(super) fn mark(words: &impl QueueWords, slot: usize) {
    words.finished(slot / 64).fetch_or(1 << (slot % 64), Release);
}

/// Whether there is a result.
pub(super) fn is_ready(words: &impl QueueWords) -> bool {
    (0..words.slots().div_ceil(64)).any(|word| words.finished(word).load(Relaxed) != 0)
}

/// Take all marks away, and call `each` with the slots that had one.
pub(super) fn take_marks(words: &impl QueueWords, mut each: impl FnMut(usize)) {
    for word in 0..words.slots().div_ceil(64) {
        if words.finished(word).load(Relaxed) == 0 {
            continue;
        }
        let mut marks = words.finished(word).swap(0, Acquire);
        while marks != 0 {
            let slot = word * 64 + marks.trailing_zeros() as usize;
            marks &= marks - 1;
            if slot < words.slots() {
                each(slot);
            }
        }
    }
}

/// Wakes a caller for a result that was marked before, or else the background thread.
pub(super) fn wake_for_result(words: &impl QueueWords) {
    fence(SeqCst);
    wake_if_armed(words, if words.callers().load(Relaxed) > 0 { WaiterRole::Caller } else { WaiterRole::Background });
}

/// Wakes the threads that sleep in this role, or are about to. The awaited change was written before.
pub(super) fn wake(words: &impl QueueWords, role: WaiterRole) {
    fence(SeqCst);
    wake_if_armed(words, role);
}

/// Wakes the threads for which a dead worker counted the word up without waking them.
pub(super) fn wake_again(words: &impl QueueWords) {
    for role in [WaiterRole::Caller, WaiterRole::Background] {
        words.wake_all(words.result_word(role));
    }
}

fn wake_if_armed(words: &impl QueueWords, role: WaiterRole) {
    let result_word = words.result_word(role);
    let seen = result_word.load(Relaxed);
    // If the exchange fails, another thread has woken the sleepers.
    let is_mine =
        seen & ARMED != 0 && result_word.compare_exchange(seen, seen.wrapping_add(1), AcqRel, Relaxed).is_ok();
    if is_mine {
        words.wake_all(result_word);
    }
}

/// Announces a sleep in this role; returns the value to sleep on. The caller checks for results again before it sleeps.
pub(super) fn arm(words: &impl QueueWords, role: WaiterRole) -> u32 {
    let seen = words.result_word(role).fetch_or(ARMED, AcqRel) | ARMED;
    fence(SeqCst);
    seen
}

pub(super) fn add_caller(words: &impl QueueWords) {
    words.callers().fetch_add(1, AcqRel);
}

pub(super) fn remove_caller(words: &impl QueueWords) {
    words.callers().fetch_sub(1, AcqRel);
    fence(SeqCst);
}

//! Which slots have a result, and which thread of the parent is woken for it.
//!
//! The lowest bit of a result word says that a thread sleeps on it, or is about to. A waker clears the bit when it
//! counts the word up, so each sleep costs one wake-up at most.
//!
//! Invariants: a result wakes the callers if there are any, else the background thread. A caller that leaves first
//! stops counting as one and then checks for results again, so a result for it is seen by it or wakes another thread.

use super::super::atomic::{AcqRel, Acquire, Relaxed, Release, SeqCst, fence};
use super::{QueueWords, WaiterRole};

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

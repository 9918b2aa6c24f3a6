//! Which slots have a result, and who is told.
//!
//! The lowest bit of a listener's word says that somebody sleeps on it, or is about to; whoever rings clears it by
//! counting the word up, so that each sleep costs one ring at most. What always holds: a result is told to the callers
//! if there are any, else to the background thread. A caller that leaves first stops counting as one and then looks
//! again, so that a result which was left to it is seen by it or told to another.

use super::super::atomic::{AcqRel, Acquire, Relaxed, Release, SeqCst, fence};
use super::{Role, Words};

/// Somebody sleeps on a listener's word.
const ARMED: u32 = 1;

/// Say that a slot is done. Its state says so already.
pub(super) fn mark(words: &impl Words, slot: usize) {
    words.finished(slot / 64).fetch_or(1 << (slot % 64), Release);
}

/// Whether there is a result.
pub(super) fn is_ready(words: &impl Words) -> bool {
    (0..words.slots().div_ceil(64)).any(|word| words.finished(word).load(Relaxed) != 0)
}

/// Take all marks away, and call `each` with the slots that had one.
pub(super) fn draw(words: &impl Words, mut each: impl FnMut(usize)) {
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

/// Wake whom a result, marked before, is for.
pub(super) fn tell(words: &impl Words) {
    fence(SeqCst);
    ring_armed(words, if words.callers().load(Relaxed) > 0 { Role::Caller } else { Role::Background });
}

/// Wake those who sleep in this role, or are about to: what they look for was written before.
pub(super) fn ring(words: &impl Words, role: Role) {
    fence(SeqCst);
    ring_armed(words, role);
}

/// Wake those for whom a dead worker counted the word up but did not ring.
pub(super) fn ring_anew(words: &impl Words) {
    for role in [Role::Caller, Role::Background] {
        words.ring(words.listener(role));
    }
}

fn ring_armed(words: &impl Words, role: Role) {
    let listener = words.listener(role);
    let seen = listener.load(Relaxed);
    // Whoever fails was forestalled by another who rang.
    let is_ringing =
        seen & ARMED != 0 && listener.compare_exchange(seen, seen.wrapping_add(1), AcqRel, Relaxed).is_ok();
    if is_ringing {
        words.ring(listener);
    }
}

/// Say that somebody is about to sleep in this role; returns what to sleep on. Look again before the sleep.
pub(super) fn arm(words: &impl Words, role: Role) -> u32 {
    let seen = words.listener(role).fetch_or(ARMED, AcqRel) | ARMED;
    fence(SeqCst);
    seen
}

pub(super) fn enter(words: &impl Words) {
    words.callers().fetch_add(1, AcqRel);
}

pub(super) fn leave(words: &impl Words) {
    words.callers().fetch_sub(1, AcqRel);
    fence(SeqCst);
}

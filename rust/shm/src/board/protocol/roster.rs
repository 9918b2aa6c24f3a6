//! Which workers look for a task and which sleep, and whom to wake.
//!
//! What always holds: a worker that looks for a task is *seeking*; one that sleeps is *asleep* until somebody rings for
//! it, which makes it seeking in the same step. So nobody is woken twice, and whoever puts tasks wakes only as many as
//! they need beyond those who seek already. A worker that stops seeking looks whether more is to be done than the other
//! seekers can do, and rings: a task that was left to it, because it was seeking, is not left to nobody. (Go's
//! scheduler hands its spinning threads on in the same way.)
//!
//! A word holds 32 workers: in its lower half who is asleep, in its upper half who seeks.

use core::ops::Range;

use super::super::atomic::{AcqRel, Acquire, Relaxed, SeqCst, fence};
use super::patience::Patience;
use super::{Words, queue};

const WORKERS: u16 = 32;

/// As many words hold a roster of so many workers.
pub(crate) const fn words_for(workers: u16) -> usize {
    workers.div_ceil(WORKERS) as usize
}

pub(super) fn begin_seeking(words: &impl Words, worker: u16) {
    if words.enrolled().load(Relaxed) <= u32::from(worker) {
        words.enrolled().fetch_max(u32::from(worker) + 1, AcqRel);
    }
    change(words, worker, 0, seeking(worker));
}

pub(super) fn end_seeking(words: &impl Words, worker: u16) {
    change(words, worker, seeking(worker), 0);
    ring(words);
}

/// How many look for a task.
pub(super) fn seekers(words: &impl Words) -> u64 {
    numbers(words).map(|number| u64::from((words.roster(number).load(Relaxed) >> WORKERS).count_ones())).sum()
}

/// Sleep, unless there is something to do; whether somebody rang. The worker seeks before and after.
pub(super) fn sleep(words: &impl Words, worker: u16, patience: &Patience<'_>) -> bool {
    let bell = words.bell(worker);
    let seen = bell.load(Acquire);
    change(words, worker, seeking(worker), asleep(worker));
    fence(SeqCst);
    if queue::backlog(words) == 0 && words.stopped().load(Relaxed) == 0 {
        words.sleep(bell, seen, patience.slice());
    }
    change(words, worker, asleep(worker), seeking(worker));
    bell.load(Relaxed) != seen
}

/// Wake as many workers as the queue needs; called after what was put, or after the end of seeking.
pub(super) fn ring(words: &impl Words) {
    fence(SeqCst);
    let mut wanted = None;
    for number in numbers(words) {
        let word = words.roster(number);
        let mut seen = word.load(Relaxed);
        while seen as u32 != 0 {
            // Only where somebody sleeps is it worth the look at the queue.
            let wanted = wanted.get_or_insert_with(|| queue::backlog(words).saturating_sub(seekers(words)));
            if *wanted == 0 {
                return;
            }
            let worker = number as u16 * WORKERS + seen.trailing_zeros() as u16;
            let next = seen & !asleep(worker) | seeking(worker);
            match word.compare_exchange(seen, next, AcqRel, Relaxed) {
                Ok(_) => {
                    wake(words, worker);
                    *wanted -= 1;
                    seen = next;
                }
                Err(now) => seen = now,
            }
        }
    }
}

/// Wake every worker, also those for which somebody rang who may have died over it.
pub(super) fn ring_all(words: &impl Words) {
    fence(SeqCst);
    for worker in 0..enrolled(words) {
        wake(words, worker);
    }
}

/// Forget a worker that has died.
pub(super) fn forget(words: &impl Words, worker: u16) {
    change(words, worker, asleep(worker) | seeking(worker), 0);
}

fn wake(words: &impl Words, worker: u16) {
    let bell = words.bell(worker);
    bell.fetch_add(1, AcqRel);
    words.ring(bell);
}

/// Take bits of a worker away and set others, in one step.
fn change(words: &impl Words, worker: u16, cleared: u64, set: u64) {
    let word = words.roster(usize::from(worker / WORKERS));
    let mut seen = word.load(Relaxed);
    while let Err(now) = word.compare_exchange(seen, seen & !cleared | set, AcqRel, Relaxed) {
        seen = now;
    }
}

fn asleep(worker: u16) -> u64 {
    1 << (worker % WORKERS)
}

fn seeking(worker: u16) -> u64 {
    asleep(worker) << WORKERS
}

/// The numbers of the words in which anybody stands.
fn numbers(words: &impl Words) -> Range<usize> {
    0..words_for(enrolled(words))
}

fn enrolled(words: &impl Words) -> u16 {
    (words.enrolled().load(Relaxed) as u16).min(words.workers())
}

//! Copies that another processor reads next: through the caches or past them, whichever was faster lately.
//!
//! If the reader shares a cache with this processor, a copy through it is better: the reader finds the bytes there.
//! On another chiplet or socket, or in a virtual machine that its host has spread out, the reader's cache still has the
//! lines of the old contents. Each is fetched back before it is written. That took twelve times as long as a copy past
//! the caches, which takes a fifth longer at worst. The reader may move to another processor, so the time of
//! each copy is measured.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::background_copy;
use crate::copy_queue::CopyRange;

/// Bytes that no cache keeps until they are read.
const LARGE: usize = 8 << 20;

/// Copies until the other way is tried again. The first trials come earlier, since fresh memory takes several times as
/// long.
const TRIED_EVERY: u32 = 64;

/// A slower copy lowers the rate by one part in this many: another process may have had the processor, or the memory
/// was fresh.
const DECAY: u32 = 8;

/// How much slower copies through the caches have to be: the reader, whose time is not measured, is faster after them.
const MUCH_SLOWER: u32 = 3;

/// Chooses the way of copies to one kind of readers.
#[derive(Debug, Default)]
pub struct AdaptiveCopy {
    /// Bytes per microsecond of the fastest recent copies each way; 0 before the first.
    through: AtomicU32,
    past: AtomicU32,
    copies: AtomicU32,
}

impl AdaptiveCopy {
    /// Copies as [`background_copy::copy`]. Only large copies use several threads and call `on_progress`.
    ///
    /// # Safety
    /// As for [`background_copy::copy`].
    pub unsafe fn copy<E>(
        &self,
        copies: &[CopyRange],
        threads: usize,
        on_progress: impl FnMut(usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let total: usize = copies.iter().map(|copy| copy.length).sum();
        if total >= LARGE {
            // SAFETY: the caller's promise.
            return unsafe { background_copy::copy(copies, threads, on_progress) };
        }
        let is_past = self.is_past();
        let begin = Instant::now();
        if is_past {
            // SAFETY: the caller's promise.
            unsafe { background_copy::copy(copies, 1, on_progress) }?;
        } else {
            for copy in copies {
                // SAFETY: the caller's promise.
                unsafe { copy.source.copy_to_nonoverlapping(copy.target, copy.length) };
            }
        }
        self.took(is_past, total, begin.elapsed());
        Ok(())
    }

    /// Whether the next copy goes past the caches.
    fn is_past(&self) -> bool {
        let (through, past) = (self.through.load(Ordering::Relaxed), self.past.load(Ordering::Relaxed));
        let is_better = through > 0 && through.saturating_mul(MUCH_SLOWER) < past;
        let number = self.copies.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let is_trial = number > 1 && (number.is_power_of_two() || number.is_multiple_of(TRIED_EVERY));
        is_better != is_trial
    }

    fn took(&self, is_past: bool, bytes: usize, time: Duration) {
        let rate = u32::try_from(bytes as u128 * 1000 / time.as_nanos().max(1)).unwrap_or(u32::MAX);
        let way = if is_past { &self.past } else { &self.through };
        let before = way.load(Ordering::Relaxed);
        way.store(rate.max(before - before / DECAY), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 1 << 20;

    /// How many of `copies` go past the caches, if a copy takes this many microseconds either way.
    fn count_past(adaptive: &AdaptiveCopy, copies: usize, through: u64, past: u64) -> usize {
        (0..copies)
            .filter(|_| {
                let is_past = adaptive.is_past();
                adaptive.took(is_past, BYTES, Duration::from_micros(if is_past { past } else { through }));
                is_past
            })
            .count()
    }

    const TRIES: usize = 10 * TRIED_EVERY as usize;
    /// The trials among them: the powers of two below `TRIED_EVERY`, and its multiples.
    const TRIALS: usize = 5 + 10;

    #[test]
    fn the_way_follows_what_copies_take() {
        let adaptive = AdaptiveCopy::default();
        assert_eq!(count_past(&adaptive, TRIES, 31, 37), TRIALS, "one cache: past it to try alone");
        let moved = count_past(&adaptive, TRIES, 430, 37);
        assert!(moved >= TRIES - TRIALS - 12, "the reader was moved to another processor: {moved} of {TRIES}");
        let back = count_past(&adaptive, TRIES, 31, 37);
        assert!(back <= TRIED_EVERY as usize + TRIALS, "and back: {back} of {TRIES}");
        assert!(
            count_past(&AdaptiveCopy::default(), TRIES, 430, 37) >= TRIES - TRIALS,
            "in another cache from the first"
        );
    }

    #[test]
    fn one_slow_copy_changes_nothing() {
        for (through, past, kept) in [(31, 37, false), (430, 37, true)] {
            let adaptive = AdaptiveCopy::default();
            count_past(&adaptive, TRIES, through, past);
            adaptive.took(kept, BYTES, Duration::from_millis(5));
            let followed = count_past(&adaptive, TRIED_EVERY as usize - 1, through, past);
            assert_eq!(followed, if kept { TRIED_EVERY as usize - 1 } else { 0 });
        }
    }

    #[test]
    fn copies_into_fresh_memory_are_forgotten_soon() {
        let adaptive = AdaptiveCopy::default();
        adaptive.is_past();
        adaptive.took(false, BYTES, Duration::from_micros(600));
        let past = count_past(&adaptive, TRIES, 31, 37);
        assert!(past <= TRIALS + 2, "{past}");
    }

    #[test]
    fn both_ways_copy_every_byte() {
        let source: Vec<u8> = (0..BYTES + 17).map(|at| (at % 251) as u8).collect();
        let adaptive = AdaptiveCopy::default();
        for _ in 0..3 {
            let mut target = vec![0u8; source.len()];
            let copies = [CopyRange { source: source.as_ptr(), target: target.as_mut_ptr(), length: source.len() }];
            // SAFETY: both are vectors that nobody else accesses.
            let copied: Result<(), ()> = unsafe { adaptive.copy(&copies, 1, |_| Ok(())) };
            assert_eq!(copied, Ok(()));
            assert!(target == source);
        }
        assert!(adaptive.past.load(Ordering::Relaxed) > 0, "the second tries the way past the caches");
    }
}

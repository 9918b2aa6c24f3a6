//! Finds samples that an order names twice: one bit a sample, marked while the lengths are read.
//!
//! Invariants: a sample that is named twice is found, whichever threads read the two entries.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::PackError;
use crate::memory;

/// What the bitmaps of all threads may take together.
const OWN_BYTES: usize = 32 << 20;

/// Bitmaps over the samples that an order names.
///
/// Each thread marks a bitmap of its own, and the bitmaps are compared at the end. Where they would take more than
/// `OWN_BYTES`, all threads mark one bitmap with atomic instructions, which take twice the time.
pub(crate) struct SeenSamples {
    bitmaps: Vec<Vec<AtomicU64>>,
    is_shared: bool,
}

/// Word and bit of a sample.
#[inline(always)]
fn word_and_bit(sample: u64) -> (usize, u64) {
    ((sample >> 6) as usize, 1 << (sample & 63))
}

/// The bitmap of one thread.
#[derive(Clone, Copy)]
pub(crate) struct Bitmap<'a> {
    words: &'a [AtomicU64],
    is_shared: bool,
}

impl Bitmap<'_> {
    /// Prefetch the bit of a sample.
    #[inline(always)]
    pub(crate) fn prefetch(self, sample: u64) {
        memory::prefetch(self.words, word_and_bit(sample).0);
    }

    /// Mark a sample, which is in range; not zero if it was marked before.
    #[inline(always)]
    pub(crate) fn mark(self, sample: u64) -> u64 {
        let (word, bit) = word_and_bit(sample);
        let word = &self.words[word];
        if self.is_shared {
            return word.fetch_or(bit, Ordering::Relaxed) & bit;
        }
        let before = word.load(Ordering::Relaxed);
        word.store(before | bit, Ordering::Relaxed);
        before & bit
    }
}

impl SeenSamples {
    /// For `samples` samples, marked by the threads numbered 0 … `threads` - 1.
    pub(crate) fn new(samples: usize, threads: usize) -> Result<Self, PackError> {
        Self::with_own_bytes(samples, threads, OWN_BYTES)
    }

    fn with_own_bytes(samples: usize, threads: usize, own_bytes: usize) -> Result<Self, PackError> {
        let is_shared = threads > 1 && samples.div_ceil(8).saturating_mul(threads) > own_bytes;
        let count = if is_shared { 1 } else { threads };
        let bitmaps = (0..count).map(|_| memory::zeroed(samples.div_ceil(64))).collect::<Result<_, _>>()?;
        Ok(Self { bitmaps, is_shared })
    }

    /// The bitmap that a thread marks.
    pub(crate) fn bitmap(&self, thread: usize) -> Bitmap<'_> {
        let words = if self.is_shared { &self.bitmaps[0] } else { &self.bitmaps[thread] };
        Bitmap { words, is_shared: self.is_shared }
    }

    /// Whether no sample is marked in two bitmaps.
    pub(crate) fn are_disjoint(self) -> bool {
        let mut bitmaps = self.bitmaps.into_iter();
        let Some(mut all) = bitmaps.next() else { return true };
        bitmaps.all(|bitmap| {
            let both = all.iter_mut().zip(bitmap).fold(0, |both, (all, word)| {
                let (all, word) = (all.get_mut(), word.into_inner());
                let common = *all & word;
                *all |= word;
                both | common
            });
            both == 0
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::Threads;

    /// Mark an order in pieces of four, each on any thread.
    fn is_distinct(order: &[u64], samples: usize, threads: usize, used: SeenSamples) -> bool {
        assert!(order.iter().all(|&sample| sample < samples as u64));
        let mut pieces: Vec<(&[u64], bool)> = order.chunks(4).map(|piece| (piece, false)).collect();
        Threads::new(threads).for_each(&mut pieces, |thread, (piece, is_distinct)| {
            let bitmap = used.bitmap(thread);
            *is_distinct = piece.iter().fold(0, |repeated, &sample| repeated | bitmap.mark(sample)) == 0;
        });
        pieces.iter().all(|&(_, is_distinct)| is_distinct) && used.are_disjoint()
    }

    #[test]
    fn a_sample_named_twice_is_found_whichever_threads_read_it() {
        let samples = 24usize;
        for (threads, own_bytes) in [(1, OWN_BYTES), (2, OWN_BYTES), (3, OWN_BYTES), (3, 0)] {
            for (first, second) in (0..samples).flat_map(|a| (0..samples).map(move |b| (a, b))) {
                let mut order: Vec<u64> = (0..samples as u64).rev().collect();
                order[first] = order[second];
                let used = SeenSamples::with_own_bytes(samples, threads, own_bytes).unwrap();
                assert_eq!(is_distinct(&order, samples, threads, used), first == second);
            }
        }
    }

    #[test]
    fn the_bitmaps_of_many_threads_stay_within_their_bound() {
        let samples = 8 * (OWN_BYTES / 2);
        let bitmaps = |samples, threads| SeenSamples::new(samples, threads).unwrap().bitmaps.len();
        assert_eq!((bitmaps(samples, 2), bitmaps(samples + 8, 2), bitmaps(samples * 3, 1)), (2, 1, 1));
    }
}

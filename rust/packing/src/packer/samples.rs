//! Reads the ordered samples of a stream, a chunk at a time: indices first, then the length of each.
//!
//! Invariants: each index and each length is read from the caller's arrays once. What is checked is what is used. A sample
//! that an order names twice is found, whichever threads read the two entries.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::PackError;
use crate::fingerprint::{self, LEAF};
use crate::integers::Integers;
use crate::memory;
use crate::ordered_samples::{SampleLengths, check_order};
use crate::plan::PlanInteger;
use crate::progress::Progress;
use crate::simd::vectorized;
use crate::threads::Threads;

/// Up to this many samples one thread is as fast.
pub(crate) const FEW_SAMPLES: usize = 1 << 18;
/// Chunks a thread in one window; more than one, so that a thread that is held up is relieved.
pub(crate) const CHUNKS_A_THREAD: usize = 8;
/// Samples of a chunk: they fit the second-level cache, and hash as one leaf.
pub(crate) const CHUNK: usize = LEAF;

/// A chunk as it is read.
struct ReadChunk<P> {
    start: usize,
    samples: Samples<P>,
    failure: Option<ReadFailure>,
}

impl<P> Default for ReadChunk<P> {
    fn default() -> Self {
        Self { start: 0, samples: Samples::default(), failure: None }
    }
}

/// Where the indices of a stream's samples come from.
#[derive(Clone, Copy)]
pub(crate) enum IndexSource<'r, P> {
    /// 0 … n - 1.
    Natural(usize),
    /// As the caller gave them, yet to be checked.
    Given(Integers<'r>),
    /// As drawn from a seed.
    Drawn(&'r [P]),
}

impl<P> IndexSource<'_, P> {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Natural(len) => *len,
            Self::Given(order) => order.len(),
            Self::Drawn(order) => order.len(),
        }
    }
}

/// Why a chunk of samples cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadFailure {
    /// An index is out of range, or was seen before.
    BadOrder,
    /// A length is longer than the first pass found.
    InputChanged,
}

/// Consecutive ordered samples.
pub(crate) struct Samples<P> {
    pub(crate) indices: Vec<P>,
    pub(crate) lengths: Vec<P>,
    /// Tokens of all samples.
    pub(crate) tokens: u64,
    /// Hash of the indices of an order that was given.
    pub(crate) order_leaf: u128,
}

impl<P> Default for Samples<P> {
    fn default() -> Self {
        Self { indices: Vec::new(), lengths: Vec::new(), tokens: 0, order_leaf: 0 }
    }
}

/// The ordered samples of one stream.
pub(crate) struct SampleReader<'r, P> {
    pub(crate) lengths: &'r SampleLengths<'r>,
    pub(crate) indices: IndexSource<'r, P>,
    /// Marks the samples of an order that was given.
    pub(crate) used: Option<SeenSamples>,
}

/// The error that names the first wrong entry of an order, or that says that the inputs changed.
#[cold]
pub(crate) fn bad_order(order: &Integers<'_>, lengths: &SampleLengths<'_>, progress: &mut dyn Progress) -> PackError {
    check_order(order, lengths.len(), progress).err().unwrap_or(PackError::InputChanged)
}

impl<'r, P: PlanInteger> SampleReader<'r, P> {
    /// A reader that marks the samples of an order that was given, and so finds those that it names twice.
    pub(crate) fn new(
        lengths: &'r SampleLengths<'r>,
        indices: IndexSource<'r, P>,
        threads: &Threads,
    ) -> Result<Self, PackError> {
        let used = match indices {
            IndexSource::Given(_) => Some(SeenSamples::new(lengths.len(), threads.count())?),
            _ => None,
        };
        Ok(Self { lengths, indices, used })
    }

    /// Read all samples and hand them to `take` in order, a chunk at a time.
    ///
    /// # Errors
    /// A bad order, by its first wrong entry; `InputChanged`; what `take` raises; an interrupt.
    pub(crate) fn for_each_chunk(
        self,
        phase: &'static str,
        threads: &Threads,
        progress: &mut dyn Progress,
        mut take: impl FnMut(&Samples<P>, &mut dyn Progress) -> Result<(), PackError>,
    ) -> Result<(), PackError> {
        let len = self.indices.len();
        let threads = if len > FEW_SAMPLES { threads } else { &Threads::new(1) };
        let window = if threads.count() == 1 { 1 } else { threads.count() * CHUNKS_A_THREAD };
        let mut chunks: Vec<ReadChunk<P>> = Vec::new();
        chunks.resize_with(window.min(len.div_ceil(CHUNK)), ReadChunk::default);
        for begin in (0..len).step_by(CHUNK * window) {
            progress.tick(phase, begin as u64, len as u64)?;
            let used = (len - begin).div_ceil(CHUNK).min(window);
            let chunks = &mut chunks[..used];
            chunks.iter_mut().zip((begin..).step_by(CHUNK)).for_each(|(chunk, start)| chunk.start = start);
            threads.for_each(chunks, |thread, chunk| {
                let count = CHUNK.min(len - chunk.start);
                chunk.failure = self.read(thread, chunk.start, count, &mut chunk.samples).err();
            });
            for chunk in chunks {
                let taken = match chunk.failure {
                    None => take(&chunk.samples, progress),
                    Some(_) => Err(PackError::InputChanged),
                };
                match (taken, self.indices) {
                    // There may be too many tokens because a sample was read twice, on two threads.
                    (Err(PackError::InputChanged), IndexSource::Given(order)) => {
                        return Err(bad_order(&order, self.lengths, progress));
                    }
                    (taken, _) => taken?,
                }
            }
        }
        let is_distinct = self.used.is_none_or(SeenSamples::are_disjoint);
        match self.indices {
            IndexSource::Given(order) if !is_distinct => Err(bad_order(&order, self.lengths, progress)),
            _ => Ok(()),
        }
    }

    /// Read `count` samples from position `start` of the order on.
    pub(crate) fn read(
        &self,
        thread: usize,
        start: usize,
        count: usize,
        samples: &mut Samples<P>,
    ) -> Result<(), ReadFailure> {
        samples.indices.resize(count, P::default());
        samples.lengths.resize(count, P::default());
        let (indices, lengths) = (&mut samples.indices[..], &mut samples.lengths[..]);
        let seen = match self.indices {
            IndexSource::Natural(_) => {
                indices.iter_mut().zip(start as u64..).for_each(|(slot, index)| *slot = P::truncate(index));
                self.lengths.read(start, lengths)
            }
            IndexSource::Drawn(order) => {
                indices.copy_from_slice(&order[start..start + count]);
                self.lengths.gather(indices, lengths)
            }
            IndexSource::Given(order) => {
                // The or of all values tells whether one is negative or lost bits as it became a P.
                let seen = order.read(start, indices);
                let largest = vectorized(|| indices.iter().copied().max());
                if seen > P::LARGEST || largest.is_some_and(|index| index.widen() >= self.lengths.len() as u64) {
                    return Err(ReadFailure::BadOrder);
                }
                samples.order_leaf = fingerprint::leaf(indices);
                self.gather_and_mark(thread, indices, lengths)?
            }
        };
        if seen > P::LARGEST {
            return Err(ReadFailure::InputChanged);
        }
        samples.tokens = P::sum(lengths);
        Ok(())
    }

    fn gather_and_mark(&self, thread: usize, indices: &[P], lengths: &mut [P]) -> Result<u64, ReadFailure> {
        let Some(used) = &self.used else { return Ok(self.lengths.gather(indices, lengths)) };
        let bitmap = used.bitmap(thread);
        let mut repeated = 0;
        let prefetch = |sample| bitmap.prefetch(sample);
        let seen = self.lengths.gather_with(indices, lengths, prefetch, |sample| repeated |= bitmap.mark(sample));
        if repeated == 0 { Ok(seen) } else { Err(ReadFailure::BadOrder) }
    }
}

/// The most memory of the bitmaps of all threads together.
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

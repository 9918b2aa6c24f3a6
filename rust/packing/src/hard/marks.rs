//! Whether an order names no sample twice: one bit a sample, marked while the lengths are gathered.
//!
//! What always holds: a sample that is named twice is found, whichever threads read its entries. On several threads
//! each marks a set of its own, and the sets are compared at the end, as long as they take no more than `OWN_BYTES`
//! together; beyond, all mark one set, each with an atomic instruction, which costs twice the time and no more memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::scan::Dataset;
use crate::array::Array;
use crate::error::PackError;
use crate::integers::Word;
use crate::memory;

/// What sets of several threads may take together.
const OWN_BYTES: usize = 32 << 20;
/// Sets from this size on lie beyond the second-level cache, so that marks are worth a prefetch.
const PREFETCH_FROM_BYTES: usize = 4 << 20;
/// Marks between the prefetch of a word and its use.
const AHEAD: usize = 64;

/// One bit a sample.
pub(crate) struct Bits(Array<u64>);

/// Word and bit of a sample.
#[inline(always)]
fn place(index: u64) -> (usize, u64) {
    ((index >> 6) as usize, 1 << (index & 63))
}

impl Bits {
    /// A bit for each of `samples` samples.
    pub(crate) fn new(samples: usize) -> Result<Self, PackError> {
        Array::zeroed(samples.div_ceil(64)).map(Self)
    }

    /// Mark samples, none of them out of range; whether all of them were unmarked.
    pub(crate) fn mark<W: Word>(&mut self, indices: &[W]) -> bool {
        indices.iter().fold(0, |repeated, index| repeated | self.mark_one(index.widen())) == 0
    }

    /// Mark one sample; not zero if it was marked before.
    #[inline(always)]
    fn mark_one(&mut self, index: u64) -> u64 {
        let (word, bit) = place(index);
        let word = &mut self.0[word];
        let before = *word & bit;
        *word |= bit;
        before
    }
}

/// The marks of one order, made on one thread or several.
pub(super) enum Marks {
    /// A set for each thread.
    Own(Vec<Mutex<Bits>>),
    /// One set for all.
    Shared(Array<AtomicU64>),
}

/// The set of a thread.
fn own(sets: &[Mutex<Bits>], thread: usize) -> MutexGuard<'_, Bits> {
    sets[thread].lock().unwrap_or_else(PoisonError::into_inner)
}

impl Marks {
    /// For `samples` samples, marked by the threads numbered 0 … `threads` - 1.
    pub(super) fn new(samples: usize, threads: usize) -> Result<Self, PackError> {
        if threads > 1 && samples.div_ceil(8).saturating_mul(threads) > OWN_BYTES {
            return Array::zeroed(samples.div_ceil(64)).map(Self::Shared);
        }
        (0..threads.max(1)).map(|_| Bits::new(samples).map(Mutex::new)).collect::<Result<_, _>>().map(Self::Own)
    }

    /// Gather the lengths at `indices` and mark these; the or of the lengths, and whether none was marked before.
    /// `are_asked` as in `Integers::gather_while`.
    ///
    /// Marking costs little here, beside the latency of the lengths.
    pub(super) fn gather<W: Word>(
        &self,
        thread: usize,
        dataset: &Dataset<'_>,
        indices: &[W],
        lengths: &mut [W],
        are_asked: bool,
    ) -> (u64, bool) {
        let mut repeated = 0;
        let ahead = |position: usize| indices.get(position + AHEAD).map(|index| place(index.widen()).0);
        let seen = match self {
            Self::Own(sets) => {
                let bits = &mut *own(sets, thread);
                if size_of_val(&bits.0[..]) < PREFETCH_FROM_BYTES {
                    dataset.gather_while(indices, lengths, are_asked, |_, index| repeated |= bits.mark_one(index))
                } else {
                    dataset.gather_while(indices, lengths, are_asked, |position, index| {
                        if let Some(word) = ahead(position) {
                            memory::prefetch(&bits.0, word);
                        }
                        repeated |= bits.mark_one(index);
                    })
                }
            }
            Self::Shared(words) => dataset.gather_while(indices, lengths, are_asked, |position, index| {
                if let Some(word) = ahead(position) {
                    memory::prefetch(words, word);
                }
                let (word, bit) = place(index);
                repeated |= words[word].fetch_or(bit, Ordering::Relaxed) & bit;
            }),
        };
        (seen, repeated == 0)
    }

    /// Mark samples, none of them out of range; whether none was marked before.
    pub(super) fn mark<W: Word>(&self, thread: usize, indices: &[W]) -> bool {
        match self {
            Self::Own(sets) => own(sets, thread).mark(indices),
            Self::Shared(words) => {
                let repeated = indices.iter().fold(0, |repeated, index| {
                    let (word, bit) = place(index.widen());
                    repeated | words[word].fetch_or(bit, Ordering::Relaxed) & bit
                });
                repeated == 0
            }
        }
    }

    /// Whether no sample is marked in two sets.
    pub(super) fn are_disjoint(self) -> bool {
        let Self::Own(sets) = self else { return true };
        let mut sets = sets.into_iter().map(|set| set.into_inner().unwrap_or_else(PoisonError::into_inner).0);
        let Some(mut all) = sets.next() else { return true };
        sets.all(|set| {
            let both = all.iter_mut().zip(&set[..]).fold(0, |both, (all, word)| {
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
    use crate::crew::Crew;
    use crate::integers::Integers;

    /// Mark an order in pieces of four, each on any thread.
    fn is_distinct(order: &[u64], samples: usize, threads: usize, marks: Marks) -> bool {
        let lengths = vec![1u8; samples];
        let dataset = Dataset::new(vec![Integers::from(&lengths[..])], 0);
        let mut pieces: Vec<(&[u64], bool)> = order.chunks(4).map(|piece| (piece, false)).collect();
        Crew::new(threads).each(&mut pieces, |thread, number, (piece, distinct)| {
            // The two ways to mark.
            *distinct = match number % 2 {
                0 => marks.gather(thread, &dataset, piece, &mut vec![0; piece.len()], false).1,
                _ => marks.mark(thread, piece),
            };
        });
        pieces.iter().all(|&(_, distinct)| distinct) && marks.are_disjoint()
    }

    #[test]
    fn a_sample_named_twice_is_found_whichever_threads_read_it() {
        let samples = 24usize;
        for threads in [1, 2, 3] {
            for (first, second) in (0..samples).flat_map(|a| (0..samples).map(move |b| (a, b))) {
                let mut order: Vec<u64> = (0..samples as u64).rev().collect();
                order[first] = order[second];
                let own = Marks::new(samples, threads).unwrap();
                assert_eq!(is_distinct(&order, samples, threads, own), first == second);
                let shared = Marks::Shared(Array::zeroed(1).unwrap());
                assert_eq!(is_distinct(&order, samples, threads, shared), first == second);
            }
        }
    }

    #[test]
    fn sets_of_many_threads_stay_within_their_bound() {
        let samples = 8 * (OWN_BYTES / 2);
        assert!(matches!(Marks::new(samples, 2).unwrap(), Marks::Own(sets) if sets.len() == 2));
        assert!(matches!(Marks::new(samples + 8, 2).unwrap(), Marks::Shared(_)));
        assert!(matches!(Marks::new(samples * 3, 1).unwrap(), Marks::Own(sets) if sets.len() == 1));
    }
}

//! The lengths once more, two bytes a sample, for who reads them at random places.
//!
//! Owns the copy. A processor's cache holds two to four times as many lengths so, and what a random read costs is
//! whether its cache has it. What is read is taken: a mark is left in its place, so that the order needs no
//! bit a sample beside it for its check.
//!
//! What always holds: every length is below `TAKEN` and is the one that the scan checked and hashed. As many places
//! are marked as different samples were taken, whichever threads took them: so no sample was taken twice exactly if
//! there are as many marks as samples taken. One that is taken twice may show `TAKEN` as its length meanwhile.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};

use super::ahead::Narrow;
use crate::array::Array;
use crate::crew::Crew;
use crate::fingerprint::LEAF;
use crate::integers::Word;
use crate::memory;
use crate::processor::widest;

/// What a table may take: about what caches hold.
const TABLE_BYTES: usize = 32 << 20;
/// In the place of a length that was taken.
const TAKEN: u16 = u16::MAX;
/// Of fewer samples, several threads do not share a table: each would find its lines in the other's cache.
const SHARED_FROM: usize = 1 << 19;
/// An order that takes fewer samples than one in so many is not worth a copy of all lengths.
const SPARSE: usize = 4;
/// Samples between the prefetch of a length and its use.
const AHEAD: usize = 80;
/// Samples whose marks a thread counts at a time.
const RUN: usize = 4 * LEAF;

/// The lengths of a dataset.
pub(super) struct Table(Array<AtomicU16>);

/// The integers themselves, where nobody else sees them.
fn plain(lengths: &mut [AtomicU16]) -> &mut [u16] {
    // SAFETY: an atomic integer lies in memory as the integer does, and the borrow is exclusive.
    unsafe { &mut *(ptr::from_mut(lengths) as *mut [u16]) }
}

impl Table {
    /// Room for the lengths of `samples` samples of which `taken` will be taken, where a copy is worth it and small
    /// enough, and there is memory for it.
    pub(super) fn new(samples: usize, taken: usize, threads: usize) -> Option<Self> {
        let is_small = samples <= TABLE_BYTES / size_of::<u16>();
        let is_contended = threads > 1 && samples < SHARED_FROM;
        if !is_small || is_contended || taken < samples / SPARSE {
            return None;
        }
        Array::zeroed(samples).ok().map(Self)
    }

    /// Where the lengths are to be written, in the order of the samples.
    pub(super) fn room(&mut self) -> &mut [u16] {
        plain(&mut self.0)
    }

    /// The table, if it can hold lengths up to the longest of those that were written.
    pub(super) fn of_lengths_up_to(self, longest: u64) -> Option<Self> {
        (longest < u64::from(TAKEN)).then_some(self)
    }

    /// How to ask for a length.
    pub(super) fn ask(&self) -> Narrow {
        Narrow(self.0.as_ptr().addr())
    }

    /// Take the lengths at `indices`; the or of them all. `are_asked`: whether the memory was asked for them before.
    ///
    /// # Panics
    /// When an index is out of range, or `out` and `indices` differ in length.
    #[inline]
    pub(super) fn take<W: Word>(&self, indices: &[W], out: &mut [W], are_asked: bool) -> u64 {
        assert_eq!(indices.len(), out.len(), "one slot an index");
        // In a loop of its own, as in `Integers::gather`.
        let largest = widest(|| indices.iter().copied().max().unwrap_or_default().widen());
        assert!(indices.is_empty() || largest < self.0.len() as u64, "index within the table");
        let mut seen = 0;
        for (position, (&index, slot)) in indices.iter().zip(out.iter_mut()).enumerate() {
            if let (false, Some(ahead)) = (are_asked, indices.get(position + AHEAD)) {
                memory::prefetch(&self.0, ahead.widen() as usize);
            }
            // SAFETY: no index exceeds the largest, which was checked against the table's length.
            let place = unsafe { self.0.get_unchecked(index.widen() as usize) };
            let length = place.load(Ordering::Relaxed);
            // Others can only store the same mark, so none is lost.
            place.store(TAKEN, Ordering::Relaxed);
            seen |= length;
            *slot = W::truncate(length.into());
        }
        seen.into()
    }

    /// How many samples were taken.
    pub(super) fn taken(mut self, crew: &Crew) -> usize {
        let marks = AtomicUsize::new(0);
        let mut runs: Vec<&mut [u16]> = plain(&mut self.0).chunks_mut(RUN).collect();
        crew.each(&mut runs, |_, _, run| {
            // Of as many as a 16-bit count can hold, so that many are counted at once.
            let of_run: usize = widest(|| {
                run.chunks(LEAF)
                    .map(|part| usize::from(part.iter().map(|&one| u16::from(one == TAKEN)).sum::<u16>()))
                    .sum()
            });
            marks.fetch_add(of_run, Ordering::Relaxed);
        });
        marks.into_inner()
    }
}

#[cfg(test)]
mod tests {
    use super::super::scan::{self, Dataset};
    use super::*;
    use crate::Silent;
    use crate::integers::Integers;

    fn table(lengths: &[i32], taken: usize, crew: &Crew) -> Option<Table> {
        let dataset = Dataset::new(vec![Integers::from(lengths)], 0);
        let mut table = Table::new(lengths.len(), taken, crew.threads())?;
        let scan = scan::scan(&dataset, table.room(), crew, &mut Silent).unwrap();
        table.of_lengths_up_to(scan.longest)
    }

    const SAMPLES: usize = SHARED_FROM + 1000;

    #[test]
    fn what_is_taken_is_counted_once_whichever_threads_take_it() {
        let lengths: Vec<i32> = (0..SAMPLES as i32).map(|sample| sample * 7 % 65_535).collect();
        for threads in [1, 2, 3] {
            let crew = Crew::new(threads);
            for (repeated, expected) in [(None, SAMPLES), (Some((3, SAMPLES / 2)), SAMPLES - 1)] {
                let mut order: Vec<u32> = (0..SAMPLES as u32).rev().collect();
                if let Some((from, to)) = repeated {
                    order[to] = order[from];
                }
                let table = table(&lengths, order.len(), &crew).unwrap();
                let mut pieces: Vec<(&[u32], Vec<u32>)> =
                    order.chunks(1000).map(|piece| (piece, vec![0; piece.len()])).collect();
                crew.each(&mut pieces, |_, _, (piece, out)| assert!(table.take(piece, out, false) <= 65_535));
                let right = |(index, length): (&u32, &u32)| lengths[*index as usize] == *length as i32;
                let wrong =
                    pieces.iter().flat_map(|(piece, out)| piece.iter().zip(out)).filter(|&pair| !right(pair)).count();
                assert!(wrong <= usize::from(repeated.is_some()));
                assert_eq!(table.taken(&crew), expected);
            }
        }
    }

    #[test]
    fn no_table_of_lengths_that_it_cannot_hold() {
        let crew = Crew::new(1);
        assert!(table(&[0, 65_534], 2, &crew).is_some());
        assert!(table(&[0, 65_535], 2, &crew).is_none());
        assert!(table(&[1; 1000], 10, &crew).is_none());
        assert!(table(&[1; 1000], 1000, &Crew::new(2)).is_none());
        let many = vec![1; TABLE_BYTES / 2 + 1];
        assert!(table(&many, many.len(), &crew).is_none());
    }
}

//! The lengths once more, two bytes a sample, for who reads them at random places.
//!
//! Owns the copy. A processor's cache holds two to four times as many lengths so, and what a random read costs is
//! whether its cache has it. What is read is taken: a mark is left in its place, so that the order needs no
//! bit a sample beside it for its check.
//!
//! What always holds: every length is below `TAKEN` and is the caller's as it was when it was copied. As many places
//! are marked as different samples were taken, whichever threads took them: so no sample was taken twice exactly if
//! there are as many marks as samples taken. One that is taken twice may show `TAKEN` as its length meanwhile.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};

use super::ahead::Narrow;
use super::scan::{Dataset, Scan};
use crate::array::Array;
use crate::crew::Crew;
use crate::error::PackError;
use crate::fingerprint::LEAF;
use crate::integers::Word;
use crate::memory;
use crate::processor::widest;
use crate::watch::Watch;

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
/// Samples that a thread copies at a time.
const RUN: usize = 4 * LEAF;
/// Runs that a thread copies between two looks at the watch: a few milliseconds.
const RUNS_A_TICK: usize = 64;

/// The lengths of a dataset.
pub(super) struct Table(Array<AtomicU16>);

/// The integers themselves, where nobody else sees them.
fn plain(lengths: &mut [AtomicU16]) -> &mut [u16] {
    // SAFETY: an atomic integer lies in memory as the integer does, and the borrow is exclusive.
    unsafe { &mut *(ptr::from_mut(lengths) as *mut [u16]) }
}

impl Table {
    /// The lengths of a dataset of which `taken` samples will be taken, where a copy is worth it and small enough.
    ///
    /// # Errors
    /// Lengths that are longer than the scan found; an interrupt.
    pub(super) fn new(
        dataset: &Dataset<'_>,
        scan: &Scan,
        taken: usize,
        crew: &Crew,
        watch: &mut dyn Watch,
    ) -> Result<Option<Self>, PackError> {
        let samples = dataset.len();
        let is_small = samples <= TABLE_BYTES / size_of::<u16>() && scan.longest < u64::from(TAKEN);
        let is_contended = crew.threads() > 1 && samples < SHARED_FROM;
        if !is_small || is_contended || taken < samples / SPARSE {
            return Ok(None);
        }
        let mut table = Array::<AtomicU16>::zeroed(samples)?;
        let step = RUN * RUNS_A_TICK * crew.threads();
        for (number, part) in plain(&mut table).chunks_mut(step).enumerate() {
            let begin = number * step;
            watch.tick("packing", 0, taken as u64)?;
            let mut runs: Vec<(&mut [u16], bool)> = part.chunks_mut(RUN).map(|run| (run, true)).collect();
            crew.each(&mut runs, |_, number, (run, is_good)| {
                let seen = dataset.read(begin + number * RUN, run);
                *is_good =
                    seen <= u64::from(TAKEN) && widest(|| run.iter().fold(0, |most, &one| one.max(most))) < TAKEN;
            });
            if runs.iter().any(|&(_, is_good)| !is_good) {
                return Err(PackError::InputChanged);
            }
        }
        Ok(Some(Self(table)))
    }

    /// How to ask for a length.
    pub(super) fn ask(&self) -> Narrow {
        Narrow(self.0.as_ptr().addr())
    }

    /// Take the lengths at `indices`; the or of them all.
    ///
    /// # Panics
    /// When an index is out of range, or `out` and `indices` differ in length.
    pub(super) fn take<W: Word>(&self, indices: &[W], out: &mut [W]) -> u64 {
        assert_eq!(indices.len(), out.len(), "one slot an index");
        // In a loop of its own, as in `Integers::gather`.
        let largest = widest(|| indices.iter().copied().max().unwrap_or_default().widen());
        assert!(indices.is_empty() || largest < self.0.len() as u64, "index within the table");
        let mut seen = 0;
        for (position, (&index, slot)) in indices.iter().zip(out.iter_mut()).enumerate() {
            if let Some(ahead) = indices.get(position + AHEAD) {
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
    use super::super::scan;
    use super::*;
    use crate::Silent;
    use crate::integers::Integers;

    fn table(lengths: &[i32], taken: usize, crew: &Crew) -> Option<Table> {
        let dataset = Dataset::new(vec![Integers::from(lengths)], 0);
        let scan = scan::scan(&dataset, crew, &mut Silent).unwrap();
        Table::new(&dataset, &scan, taken, crew, &mut Silent).unwrap()
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
                crew.each(&mut pieces, |_, _, (piece, out)| assert!(table.take(piece, out) <= 65_535));
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

    #[test]
    fn lengths_that_grew_since_the_scan_are_refused() {
        let crew = Crew::new(1);
        for grown in [65_535, 65_536, -1] {
            let dataset = Dataset::new(vec![Integers::from(&[5, 6][..])], 0);
            let scan = scan::scan(&dataset, &crew, &mut Silent).unwrap();
            let later = [5, grown];
            let dataset = Dataset::new(vec![Integers::from(&later[..])], 0);
            assert!(Table::new(&dataset, &scan, 2, &crew, &mut Silent).is_err());
        }
    }
}

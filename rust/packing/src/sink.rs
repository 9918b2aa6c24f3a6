//! Where the columns of a plan go while they are computed.
//!
//! What always holds: `keep` follows `room`, and keeps no more than was asked for and written; entries that are kept
//! are never changed, only the last pieces may be taken back.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use crate::array::Array;
use crate::cell::Cell;
use crate::error::PackError;
use crate::plan::Field;
use crate::watch::Lookout;

/// Room for output, to be written from its beginning on; all but `indices` hold one entry a pack.
///
/// What it holds before is nobody's: clearing it first would cost a tenth of the whole computation.
pub(crate) struct Room<'a, C> {
    pub indices: &'a mut [MaybeUninit<C>],
    pub indices_cu_len: &'a mut [MaybeUninit<C>],
    pub start_offset: &'a mut [MaybeUninit<C>],
    pub end_offset: &'a mut [MaybeUninit<C>],
    pub longest: &'a mut [MaybeUninit<C>],
}

/// Takes the output of the computation.
pub(crate) trait Sink<C: Cell> {
    /// Room for at least `pieces` and `packs` entries. Where that takes long, `lookout` is asked whether to go on.
    fn room(&mut self, pieces: usize, packs: usize, lookout: &mut Lookout<'_>) -> Result<Room<'_, C>, PackError>;
    /// Keep the first `pieces` and `packs` entries of the room asked for last.
    ///
    /// # Safety
    /// No more than was asked for, and all of these entries were written since.
    unsafe fn keep(&mut self, pieces: usize, packs: usize, dataset_id: usize) -> Result<(), PackError>;
    /// Take back the last `pieces` pieces.
    fn retract(&mut self, pieces: usize) -> Result<(), PackError>;
}

/// The entries that are kept, with room behind them.
pub(crate) struct Columns<C> {
    pub(crate) indices: Array<C>,
    /// `indices_cu_len`, `start_offset`, `end_offset`, `longest`.
    pub(crate) packs: [Array<C>; 4],
}

impl<C> Default for Columns<C> {
    fn default() -> Self {
        Self { indices: Array::default(), packs: Default::default() }
    }
}

/// Entries beyond those needed, so that the merge need not be careful at the end of a chunk.
const SPARE: usize = 4;

impl<C: Cell> Columns<C> {
    /// Make room behind the entries that are kept.
    pub(crate) fn grow(&mut self, pieces: usize, packs: usize) -> Result<(), PackError> {
        self.indices.reserve(pieces + SPARE)?;
        self.packs.iter_mut().try_for_each(|column| column.reserve(packs + SPARE))
    }

    /// Whether there is room for so many more entries.
    fn has_room(&self, pieces: usize, packs: usize) -> bool {
        let has_room = |column: &Array<C>, more: usize| column.capacity() - column.len() >= more;
        has_room(&self.indices, pieces) && self.packs.iter().all(|column| has_room(column, packs))
    }

    pub(crate) fn room(&mut self) -> Room<'_, C> {
        let [indices_cu_len, start_offset, end_offset, longest] = self.packs.each_mut().map(Array::spare_capacity_mut);
        Room { indices: self.indices.spare_capacity_mut(), indices_cu_len, start_offset, end_offset, longest }
    }

    /// Keep the first entries of the room.
    ///
    /// # Safety
    /// There was room for them, and they were written.
    pub(crate) unsafe fn keep(&mut self, pieces: usize, packs: usize) {
        debug_assert!(self.has_room(pieces, packs));
        // SAFETY: the caller promises that these entries are there and were written.
        unsafe {
            self.indices.set_len(self.indices.len() + pieces);
            self.packs.iter_mut().for_each(|column| column.set_len(column.len() + packs));
        }
    }

    pub(crate) fn clear(&mut self) {
        self.indices.truncate(0);
        self.packs.iter_mut().for_each(|column| column.truncate(0));
    }
}

/// Keeps the columns in memory.
pub(crate) struct MemorySink<C> {
    dataset_id: Array<C>,
    columns: Columns<C>,
}

impl<C: Cell> MemorySink<C> {
    /// For at most `packs` packs and `pieces` pieces.
    pub(crate) fn new(packs: u64, pieces: u64) -> Result<Self, PackError> {
        // Memory that is never touched costs nothing, so bounds that turn out too large cost nothing either.
        let packs = usize::try_from(packs).unwrap_or(usize::MAX).saturating_add(SPARE);
        let pieces = usize::try_from(pieces).unwrap_or(usize::MAX).saturating_add(SPARE);
        Ok(Self {
            dataset_id: Array::zeroed(packs)?,
            columns: Columns { indices: Array::with_room(pieces)?, packs: Array::with_rooms(packs)? },
        })
    }

    fn packs(&self) -> usize {
        self.columns.packs[0].len()
    }

    /// The columns in the order of `Field::ALL`.
    pub(crate) fn into_columns(mut self) -> [Array<C>; 6] {
        self.dataset_id.truncate(self.packs());
        let [indices_cu_len, start_offset, end_offset, longest] = self.columns.packs;
        [self.dataset_id, self.columns.indices, indices_cu_len, start_offset, end_offset, longest]
    }
}

impl<C: Cell> Sink<C> for MemorySink<C> {
    fn room(&mut self, pieces: usize, packs: usize, _lookout: &mut Lookout<'_>) -> Result<Room<'_, C>, PackError> {
        // The bounds held for the lengths as they were scanned.
        if !self.columns.has_room(pieces, packs) || self.dataset_id.len() - self.packs() < packs {
            return Err(PackError::InputChanged);
        }
        Ok(self.columns.room())
    }

    unsafe fn keep(&mut self, pieces: usize, packs: usize, dataset_id: usize) -> Result<(), PackError> {
        if dataset_id != 0 {
            let kept = self.packs();
            self.dataset_id[kept..kept + packs].fill(C::from_word(C::word_of(dataset_id)));
        }
        // SAFETY: the caller's promise, and `room` gave no more than there is.
        unsafe { self.columns.keep(pieces, packs) };
        Ok(())
    }

    fn retract(&mut self, pieces: usize) -> Result<(), PackError> {
        let kept = self.columns.indices.len() - pieces;
        self.columns.indices.truncate(kept);
        Ok(())
    }
}

/// Keeps nothing but which columns have a value beyond 32 bits.
#[derive(Default)]
pub(crate) struct Measure {
    room: Columns<i64>,
    wide: [bool; 6],
    pieces_kept: usize,
    /// The first piece of the open pack whose index is beyond 32 bits; it may yet be taken back.
    pending: Option<usize>,
}

impl Measure {
    /// Which columns have a value beyond 32 bits.
    pub(crate) fn needs_64_bits(&self) -> [bool; 6] {
        self.wide
    }
}

fn is_wide(value: &i64) -> bool {
    *value > i64::from(i32::MAX)
}

impl Sink<i64> for Measure {
    fn room(&mut self, pieces: usize, packs: usize, _lookout: &mut Lookout<'_>) -> Result<Room<'_, i64>, PackError> {
        self.room.grow(pieces, packs)?;
        Ok(self.room.room())
    }

    unsafe fn keep(&mut self, pieces: usize, packs: usize, dataset_id: usize) -> Result<(), PackError> {
        // SAFETY: the caller's promise.
        unsafe { self.room.keep(pieces, packs) };
        let mut closed = 0usize;
        if packs > 0 {
            for (field, column) in Field::ALL[2..].iter().zip(&self.room.packs) {
                self.wide[*field as usize] |= column.iter().any(is_wide);
            }
            self.wide[Field::DatasetId as usize] |= is_wide(&(dataset_id as i64));
            closed = (self.room.packs[0][packs - 1] as usize).saturating_sub(self.pieces_kept).min(pieces);
            self.wide[Field::Indices as usize] |=
                self.pending.take().is_some() || self.room.indices[..closed].iter().any(is_wide);
        }
        if self.pending.is_none() {
            let first = self.room.indices[closed..pieces].iter().position(is_wide);
            self.pending = first.map(|piece| self.pieces_kept + closed + piece);
        }
        self.pieces_kept += pieces;
        self.room.clear();
        Ok(())
    }

    fn retract(&mut self, pieces: usize) -> Result<(), PackError> {
        self.pieces_kept -= pieces;
        self.pending = self.pending.filter(|&piece| piece < self.pieces_kept);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::Silent;

    const WIDE: i64 = 1 << 31;

    fn write(room: &mut [MaybeUninit<i64>], values: &[i64]) {
        for (place, &value) in room.iter_mut().zip(values) {
            place.write(value);
        }
    }

    fn keep(measure: &mut Measure, indices: &[i64], cumulative: &[i64]) {
        let room = measure.room(indices.len(), cumulative.len(), &mut Lookout::new(&mut Silent)).unwrap();
        write(room.indices, indices);
        for column in [room.indices_cu_len, room.start_offset, room.end_offset, room.longest] {
            write(column, cumulative);
        }
        // SAFETY: all of these entries were written.
        unsafe { measure.keep(indices.len(), cumulative.len(), 0) }.unwrap();
    }

    /// Whether the indices need 64 bits when the last `taken` of five are taken back, and the pack then closes with
    /// `more`.
    fn indices_are_wide(indices: [i64; 5], taken: usize, more: &[i64]) -> bool {
        let mut measure = Measure::default();
        // One pack, and an open one in two parts.
        keep(&mut measure, &[0, indices[0], indices[1]], &[1]);
        keep(&mut measure, &indices[2..], &[]);
        measure.retract(taken).unwrap();
        keep(&mut measure, more, &[(6 - taken + more.len()) as i64]);
        measure.needs_64_bits()[Field::Indices as usize]
    }

    #[test]
    fn pieces_that_are_taken_back_widen_no_column() {
        for place in 0..5 {
            for taken in 0..=5 {
                let mut indices = [5; 5];
                indices[place..].fill(WIDE);
                for more in [&[][..], &[7, 7]] {
                    let expected = place + taken < 5;
                    assert_eq!(indices_are_wide(indices, taken, more), expected, "{place}, {taken}, {more:?}");
                }
            }
        }
    }
}

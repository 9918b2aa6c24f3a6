//! Where the columns of a plan go while they are computed.
//!
//! What always holds: `keep` follows `room`, and keeps no more than was asked for; entries that are kept
//! are never changed, only the last pieces may be taken back.

use crate::cell::Cell;
use crate::error::PackError;
use crate::memory;
use crate::plan::Field;

/// Room for output; all but `indices` hold one entry a pack.
pub(crate) struct Room<'a, S> {
    pub indices: &'a mut [S],
    pub indices_cu_len: &'a mut [S],
    pub start_offset: &'a mut [S],
    pub end_offset: &'a mut [S],
    pub longest: &'a mut [S],
}

/// Takes the output of the computation.
pub(crate) trait Sink<C: Cell> {
    /// Room for at least `pieces` and `packs` entries, zeroed or not.
    fn room(&mut self, pieces: usize, packs: usize) -> Result<Room<'_, C>, PackError>;
    /// Keep the first `pieces` and `packs` entries of the room asked for last.
    fn keep(&mut self, pieces: usize, packs: usize, dataset_id: usize) -> Result<(), PackError>;
    /// Take back the last `pieces` pieces.
    fn retract(&mut self, pieces: usize) -> Result<(), PackError>;
}

/// Room for entries that are not yet kept, grown as needed.
pub(crate) struct Columns<C> {
    pub(crate) indices: Vec<C>,
    /// `indices_cu_len`, `start_offset`, `end_offset`, `longest`.
    pub(crate) packs: [Vec<C>; 4],
}

impl<C> Default for Columns<C> {
    fn default() -> Self {
        Self { indices: Vec::new(), packs: [const { Vec::new() }; 4] }
    }
}

impl<C: Cell> Columns<C> {
    /// Room for pieces and packs, each behind some that are there: `(there, more)`.
    pub(crate) fn room(&mut self, pieces: (usize, usize), packs: (usize, usize)) -> Room<'_, C> {
        grow(&mut self.indices, pieces.0 + pieces.1 + SPARE);
        for column in &mut self.packs {
            grow(column, packs.0 + packs.1 + SPARE);
        }
        room_from(&mut self.indices, pieces.0, &mut self.packs, packs.0)
    }
}

fn grow<C: Cell>(column: &mut Vec<C>, len: usize) {
    if column.len() < len {
        column.resize(len, C::default());
    }
}

fn room_from<'a, C>(indices: &'a mut [C], piece: usize, packs: &'a mut [Vec<C>; 4], pack: usize) -> Room<'a, C> {
    let [indices_cu_len, start_offset, end_offset, longest] = packs.each_mut().map(|column| &mut column[pack..]);
    Room { indices: &mut indices[piece..], indices_cu_len, start_offset, end_offset, longest }
}

/// Entries beyond those needed, so that the merge need not be careful at the end of a chunk.
const SPARE: usize = 4;

/// Keeps the columns in memory.
pub(crate) struct MemorySink<C> {
    dataset_id: Vec<C>,
    indices: Vec<C>,
    packs: [Vec<C>; 4],
    pieces_kept: usize,
    packs_kept: usize,
}

impl<C: Cell> MemorySink<C> {
    /// For at most `packs` packs and `pieces` pieces.
    pub(crate) fn new(packs: u64, pieces: u64) -> Result<Self, PackError> {
        // Untouched zeros cost nothing, so bounds that turn out too large cost nothing either.
        let packs = usize::try_from(packs).unwrap_or(usize::MAX).saturating_add(SPARE);
        let pieces = usize::try_from(pieces).unwrap_or(usize::MAX).saturating_add(SPARE);
        Ok(Self {
            dataset_id: memory::zeroed(packs)?,
            indices: memory::zeroed(pieces)?,
            packs: [memory::zeroed(packs)?, memory::zeroed(packs)?, memory::zeroed(packs)?, memory::zeroed(packs)?],
            pieces_kept: 0,
            packs_kept: 0,
        })
    }

    /// The columns in the order of `Field::ALL`.
    pub(crate) fn into_columns(mut self) -> [Vec<C>; 6] {
        self.dataset_id.truncate(self.packs_kept);
        self.indices.truncate(self.pieces_kept);
        for column in &mut self.packs {
            column.truncate(self.packs_kept);
        }
        let [indices_cu_len, start_offset, end_offset, longest] = self.packs;
        [self.dataset_id, self.indices, indices_cu_len, start_offset, end_offset, longest]
    }
}

impl<C: Cell> Sink<C> for MemorySink<C> {
    fn room(&mut self, pieces: usize, packs: usize) -> Result<Room<'_, C>, PackError> {
        // The bounds held for the lengths as they were scanned.
        if self.indices.len() - self.pieces_kept < pieces || self.dataset_id.len() - self.packs_kept < packs {
            return Err(PackError::InputChanged);
        }
        Ok(room_from(&mut self.indices, self.pieces_kept, &mut self.packs, self.packs_kept))
    }

    fn keep(&mut self, pieces: usize, packs: usize, dataset_id: usize) -> Result<(), PackError> {
        if dataset_id != 0 {
            let id = C::from_word(C::word_of(dataset_id));
            self.dataset_id[self.packs_kept..self.packs_kept + packs].fill(id);
        }
        self.pieces_kept += pieces;
        self.packs_kept += packs;
        Ok(())
    }

    fn retract(&mut self, pieces: usize) -> Result<(), PackError> {
        self.pieces_kept -= pieces;
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
    fn room(&mut self, pieces: usize, packs: usize) -> Result<Room<'_, i64>, PackError> {
        Ok(self.room.room((0, pieces), (0, packs)))
    }

    fn keep(&mut self, pieces: usize, packs: usize, dataset_id: usize) -> Result<(), PackError> {
        let mut closed = 0usize;
        if packs > 0 {
            for (field, column) in Field::ALL[2..].iter().zip(&self.room.packs) {
                self.wide[*field as usize] |= column[..packs].iter().any(is_wide);
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

    const WIDE: i64 = 1 << 31;

    fn keep(measure: &mut Measure, indices: &[i64], cumulative: &[i64]) {
        let room = measure.room(indices.len(), cumulative.len()).unwrap();
        room.indices[..indices.len()].copy_from_slice(indices);
        room.indices_cu_len[..cumulative.len()].copy_from_slice(cumulative);
        measure.keep(indices.len(), cumulative.len(), 0).unwrap();
    }

    /// Whether the indices need 64 bits when the last `taken` of five are taken back, and the pack then closes with `more`.
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

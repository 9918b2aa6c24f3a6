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

/// Keeps nothing but the largest value of each column.
#[derive(Default)]
pub(crate) struct Measure {
    room: Columns<i64>,
    largest: [i64; 6],
    pieces_kept: usize,
    /// Largest index among the pieces of the open pack, which may yet be taken back.
    pending: i64,
}

impl Measure {
    /// Which columns have a value beyond 32 bits.
    pub(crate) fn needs_64_bits(&self) -> [bool; 6] {
        self.largest.map(|value| value > i64::from(i32::MAX))
    }
}

impl Sink<i64> for Measure {
    fn room(&mut self, pieces: usize, packs: usize) -> Result<Room<'_, i64>, PackError> {
        Ok(self.room.room((0, pieces), (0, packs)))
    }

    fn keep(&mut self, pieces: usize, packs: usize, dataset_id: usize) -> Result<(), PackError> {
        let largest_of = |values: &[i64]| values.iter().copied().max().unwrap_or(0);
        let largest = &mut self.largest;
        let mut closed = 0usize;
        if packs > 0 {
            for (field, column) in Field::ALL[2..].iter().zip(&self.room.packs) {
                let slot = &mut largest[*field as usize];
                *slot = largest_of(&column[..packs]).max(*slot);
            }
            largest[Field::DatasetId as usize] = dataset_id as i64;
            closed = (self.room.packs[0][packs - 1] as usize).saturating_sub(self.pieces_kept).min(pieces);
            let slot = &mut largest[Field::Indices as usize];
            *slot = largest_of(&self.room.indices[..closed]).max(self.pending).max(*slot);
            self.pending = 0;
        }
        self.pending = largest_of(&self.room.indices[closed..pieces]).max(self.pending);
        self.pieces_kept += pieces;
        Ok(())
    }

    fn retract(&mut self, pieces: usize) -> Result<(), PackError> {
        self.pieces_kept -= pieces;
        Ok(())
    }
}

//! Where the packs of a plan go as they are cut: into memory, or to the files of a folder.

use super::cutter::CutPacks;
use crate::error::PackError;
use crate::folder::FolderWriter;
use crate::plan::{Column, Field, PlanInteger};
use crate::progress::Progress;

/// The fields of `CutPacks::pack_columns`.
const PACK_FIELDS: [Field; 4] = [Field::IndicesCuLen, Field::StartOffset, Field::EndOffset, Field::Longest];

/// Takes the packs of a plan in order.
pub(super) trait PlanOutput<P> {
    /// Append pieces and packs, which are drawn from dataset `dataset_id`.
    fn append(&mut self, packs: &CutPacks<P>, dataset_id: usize, progress: &mut dyn Progress) -> Result<(), PackError>;

    /// Remove the last `count` pieces.
    fn remove_last_pieces(&mut self, count: usize) -> Result<(), PackError>;
}

/// Keeps the columns in memory.
pub(super) struct MemoryOutput {
    columns: [Column; 6],
}

impl MemoryOutput {
    /// For at most `packs` packs and `pieces` pieces; `wide` tells which columns have 8 bytes a value.
    pub(super) fn new(packs: u64, pieces: u64, wide: [bool; 6]) -> Result<Self, PackError> {
        let column = |field: Field| {
            let len = if field == Field::Indices { pieces } else { packs };
            Column::with_capacity(usize::try_from(len).unwrap_or(usize::MAX), wide[field as usize])
        };
        let [a, b, c, d, e, f] = Field::ALL.map(column);
        Ok(Self { columns: [a?, b?, c?, d?, e?, f?] })
    }

    /// The columns in the order of `Field::ALL`.
    pub(super) fn into_columns(self) -> [Column; 6] {
        self.columns
    }

    fn column(&mut self, field: Field) -> &mut Column {
        &mut self.columns[field as usize]
    }

    /// Refuse more than the bounds, which held for the lengths as the first pass found them.
    fn check_room(&self, pieces: usize, packs: usize) -> Result<(), PackError> {
        let has_room =
            |field: Field| self.columns[field as usize].room() >= if field == Field::Indices { pieces } else { packs };
        if Field::ALL.into_iter().all(has_room) { Ok(()) } else { Err(PackError::InputChanged) }
    }
}

impl<P: PlanInteger> PlanOutput<P> for MemoryOutput {
    fn append(
        &mut self,
        packs: &CutPacks<P>,
        dataset_id: usize,
        _progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        self.check_room(packs.pieces(), packs.packs())?;
        self.column(Field::DatasetId).append_repeated(dataset_id, packs.packs());
        self.column(Field::Indices).append(packs.indices());
        for (field, values) in PACK_FIELDS.into_iter().zip(packs.pack_columns()) {
            self.column(field).append(values);
        }
        Ok(())
    }

    fn remove_last_pieces(&mut self, count: usize) -> Result<(), PackError> {
        let column = self.column(Field::Indices);
        column.truncate(column.len() - count);
        Ok(())
    }
}

impl<P: PlanInteger> PlanOutput<P> for FolderWriter {
    fn append(&mut self, packs: &CutPacks<P>, dataset_id: usize, progress: &mut dyn Progress) -> Result<(), PackError> {
        self.append(Field::DatasetId, &vec![P::truncate(dataset_id as u64); packs.packs()], progress)?;
        self.append(Field::Indices, packs.indices(), progress)?;
        for (field, values) in PACK_FIELDS.into_iter().zip(packs.pack_columns()) {
            self.append(field, values, progress)?;
        }
        Ok(())
    }

    fn remove_last_pieces(&mut self, count: usize) -> Result<(), PackError> {
        if count == 0 { Ok(()) } else { self.remove_last(Field::Indices, count as u64) }
    }
}

/// Keeps nothing, and finds which columns have a value beyond 32 bits.
#[derive(Default)]
pub(super) struct WidthProbe {
    wide: [bool; 6],
    pieces: u64,
    /// The first piece whose index is beyond 32 bits; it may yet be removed.
    first_wide_piece: Option<u64>,
}

impl WidthProbe {
    /// Which columns need 8 bytes a value.
    pub(super) fn wide_columns(mut self) -> [bool; 6] {
        self.wide[Field::Indices as usize] = self.first_wide_piece.is_some_and(|piece| piece < self.pieces);
        self.wide
    }

    fn note(&mut self, field: Field, values: &[i64]) {
        self.wide[field as usize] |= values.iter().any(is_wide);
    }
}

fn is_wide(value: &i64) -> bool {
    *value > i64::from(i32::MAX)
}

impl PlanOutput<i64> for WidthProbe {
    fn append(
        &mut self,
        packs: &CutPacks<i64>,
        dataset_id: usize,
        _progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        if self.first_wide_piece.is_none() {
            let first = packs.indices().iter().position(is_wide);
            self.first_wide_piece = first.map(|piece| self.pieces + piece as u64);
        }
        self.pieces += packs.pieces() as u64;
        if packs.packs() > 0 {
            self.note(Field::DatasetId, &[dataset_id as i64]);
        }
        for (field, values) in PACK_FIELDS.into_iter().zip(packs.pack_columns()) {
            self.note(field, values);
        }
        Ok(())
    }

    fn remove_last_pieces(&mut self, count: usize) -> Result<(), PackError> {
        self.pieces -= count as u64;
        // A piece that takes its place is judged anew.
        self.first_wide_piece = self.first_wide_piece.filter(|&piece| piece < self.pieces);
        Ok(())
    }
}

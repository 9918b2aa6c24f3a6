//! Where the packs of a plan go as they are made: into memory, or to the files of a folder.

use crate::error::PackError;
use crate::folder::FolderWriter;
use crate::plan::{Column, Field, PlanInteger, WideColumns};
use crate::progress::Progress;

/// The fields of `PackColumns::packs`.
const PACK_FIELDS: [Field; 4] = [Field::IndicesCuLen, Field::StartOffset, Field::EndOffset, Field::Longest];
/// The fields of `PackColumns::piece_ranges`.
const RANGE_FIELDS: [Field; 2] = [Field::PieceStart, Field::PieceStop];

/// Pieces, and packs of one dataset, column by column.
pub(crate) struct PackColumns<'a, P> {
    pub(crate) dataset_id: usize,
    pub(crate) indices: &'a [P],
    /// Cumulative piece counts, starts, ends, longest pieces.
    pub(crate) packs: [&'a [P]; 4],
    /// Starts and stops of the pieces, in a plan that has them.
    pub(crate) piece_ranges: Option<[&'a [P]; 2]>,
}

impl<'a, P> PackColumns<'a, P> {
    pub(crate) fn count(&self) -> usize {
        self.packs[0].len()
    }

    /// The columns but for the dataset, each with its field.
    fn fields(&self) -> impl Iterator<Item = (Field, &'a [P])> {
        let ranges = RANGE_FIELDS.into_iter().zip(self.piece_ranges.into_iter().flatten());
        [(Field::Indices, self.indices)].into_iter().chain(PACK_FIELDS.into_iter().zip(self.packs)).chain(ranges)
    }
}

/// Takes the packs of a plan in order.
pub(crate) trait PlanOutput<P> {
    /// Append pieces and packs.
    fn append(&mut self, packs: &PackColumns<'_, P>, progress: &mut dyn Progress) -> Result<(), PackError>;

    /// Remove the last `count` pieces, of a plan without piece ranges.
    fn remove_last_pieces(&mut self, count: usize) -> Result<(), PackError>;

    /// Make room for packs and pieces beyond those that were expected.
    fn reserve(&mut self, packs: usize, pieces: usize) -> Result<(), PackError> {
        let _ = (packs, pieces);
        Ok(())
    }
}

/// Keeps the columns in memory.
pub(crate) struct MemoryOutput {
    columns: Vec<Column>,
}

impl MemoryOutput {
    /// For at most `packs` packs and `pieces` pieces.
    pub(crate) fn new(packs: u64, pieces: u64, fields: &[Field], wide: WideColumns) -> Result<Self, PackError> {
        let column = |&field: &Field| {
            let len = if field.is_per_piece() { pieces } else { packs };
            Column::with_capacity(usize::try_from(len).unwrap_or(usize::MAX), wide[field as usize])
        };
        Ok(Self { columns: fields.iter().map(column).collect::<Result<_, _>>()? })
    }

    /// The columns in the order of `Field::ALL`.
    pub(crate) fn into_columns(self) -> Vec<Column> {
        self.columns
    }

    fn column(&mut self, field: Field) -> &mut Column {
        &mut self.columns[field as usize]
    }

    /// Refuse more than the bounds, which held for the lengths as the first pass found them.
    fn check_room(&self, pieces: usize, packs: usize) -> Result<(), PackError> {
        let has_room =
            |(column, field): (&Column, Field)| column.room() >= if field.is_per_piece() { pieces } else { packs };
        if self.columns.iter().zip(Field::ALL).all(has_room) { Ok(()) } else { Err(PackError::InputChanged) }
    }
}

impl<P: PlanInteger> PlanOutput<P> for MemoryOutput {
    fn append(&mut self, packs: &PackColumns<'_, P>, _progress: &mut dyn Progress) -> Result<(), PackError> {
        self.check_room(packs.indices.len(), packs.count())?;
        self.column(Field::DatasetId).append_repeated(packs.dataset_id, packs.count());
        for (field, values) in packs.fields() {
            self.column(field).append(values);
        }
        Ok(())
    }

    fn remove_last_pieces(&mut self, count: usize) -> Result<(), PackError> {
        let column = self.column(Field::Indices);
        column.truncate(column.len() - count);
        Ok(())
    }

    fn reserve(&mut self, packs: usize, pieces: usize) -> Result<(), PackError> {
        self.columns
            .iter_mut()
            .zip(Field::ALL)
            .try_for_each(|(column, field)| column.reserve(if field.is_per_piece() { pieces } else { packs }))
    }
}

impl<P: PlanInteger> PlanOutput<P> for FolderWriter {
    fn append(&mut self, packs: &PackColumns<'_, P>, progress: &mut dyn Progress) -> Result<(), PackError> {
        self.append(Field::DatasetId, &vec![P::truncate(packs.dataset_id as u64); packs.count()], progress)?;
        for (field, values) in packs.fields() {
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
pub(crate) struct WidthProbe {
    wide: WideColumns,
    pieces: u64,
    /// The first piece whose index is beyond 32 bits; it may yet be removed.
    first_wide_piece: Option<u64>,
}

impl WidthProbe {
    /// Which columns need 8 bytes a value.
    pub(crate) fn wide_columns(mut self) -> WideColumns {
        self.wide[Field::Indices as usize] = self.first_wide_piece.is_some_and(|piece| piece < self.pieces);
        self.wide
    }
}

fn is_wide(value: &i64) -> bool {
    *value > i64::from(i32::MAX)
}

impl PlanOutput<i64> for WidthProbe {
    fn append(&mut self, packs: &PackColumns<'_, i64>, _progress: &mut dyn Progress) -> Result<(), PackError> {
        if self.first_wide_piece.is_none() {
            let first = packs.indices.iter().position(is_wide);
            self.first_wide_piece = first.map(|piece| self.pieces + piece as u64);
        }
        self.pieces += packs.indices.len() as u64;
        self.wide[Field::DatasetId as usize] |= packs.count() > 0 && is_wide(&(packs.dataset_id as i64));
        for (field, values) in packs.fields().filter(|&(field, _)| field != Field::Indices) {
            self.wide[field as usize] |= values.iter().any(is_wide);
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

//! A plan: six columns, or eight where inner pieces may be parts of samples, and the metadata that says how they were
//! made.
//!
//! Invariants: a column is 32 bits wide where the inputs bound its values so, 64 bits otherwise; no value is negative;
//! `indices_cu_len` rises strictly and ends at the number of pieces.

mod column;
mod lookup;
mod metadata;

use std::ops::Range;

use crate::checksums::ColumnChecks;
use crate::error::PackError;
use crate::integers::Integers;
use crate::progress::Progress;

pub use column::{Column, Field};
pub(crate) use column::{PlanInteger, WideColumns};
pub use lookup::{AsIntegers, AttachedLengths, LocatedPacks, PackBatch, TO_THE_END, locate, lookup};
pub use metadata::{ALGORITHM_VERSION, FORMAT_VERSION, OrderKind, PlanCounts, PlanMetadata};

/// Values that are compared with their checksums between two ticks.
const VALUES_A_TICK: usize = 1 << 18;

/// A plan in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The columns in the order of `Field::ALL`.
    pub columns: Vec<Column>,
    /// How they were made.
    pub metadata: PlanMetadata,
}

impl Plan {
    /// One column.
    ///
    /// # Panics
    /// When the plan has no such column.
    #[must_use]
    pub fn column(&self, field: Field) -> &Column {
        &self.columns[field as usize]
    }

    /// The columns as integers of any width.
    #[must_use]
    pub fn view(&self) -> PlanView<'_> {
        let mut columns = [Integers::from(&[] as &[i32]); 8];
        columns.iter_mut().zip(&self.columns).for_each(|(slot, column)| *slot = column.view());
        PlanView { columns, has_piece_ranges: self.columns.len() == Field::ALL.len(), checks: &[] }
    }
}

/// The columns of a plan, wherever they lie.
#[derive(Clone, Copy)]
pub struct PlanView<'a> {
    /// In the order of `Field::ALL`; those that the plan lacks are empty.
    columns: [Integers<'a>; 8],
    has_piece_ranges: bool,
    /// The checksums of columns that are mapped from files; none for a plan in memory.
    checks: &'a [ColumnChecks],
}

impl<'a> PlanView<'a> {
    /// Six columns, or eight, in the order of `Field::ALL`.
    ///
    /// # Errors
    /// `Mismatch` for another number of columns, and where columns of packs or columns of pieces differ in length.
    pub fn new(columns: &[Integers<'a>]) -> Result<Self, PackError> {
        let has_piece_ranges = columns.len() == Field::ALL.len();
        let fields = Field::of_plan(has_piece_ranges);
        if columns.len() != fields.len() {
            return Err(PackError::Mismatch(format!("a plan has 6 or 8 columns, not {}", columns.len())));
        }
        let (packs, pieces) = (columns[Field::IndicesCuLen as usize].len(), columns[Field::Indices as usize].len());
        let mut all = [Integers::from(&[] as &[i32]); 8];
        for (&field, &column) in fields.iter().zip(columns) {
            let (expected, of) = if field.is_per_piece() { (pieces, "pieces") } else { (packs, "packs") };
            if column.len() != expected {
                return Err(PackError::Mismatch(format!(
                    "{} has {} entries for {expected} {of}",
                    field.name(),
                    column.len()
                )));
            }
            all[field as usize] = column;
        }
        Ok(Self { columns: all, has_piece_ranges, checks: &[] })
    }

    /// The same columns, which are compared with their checksums before they are read.
    #[must_use]
    pub fn with_checks(self, checks: &'a [ColumnChecks]) -> Self {
        Self { checks, ..self }
    }

    /// Compare the blocks that hold the values `range` of a column with their checksums, unless they were compared before.
    ///
    /// # Errors
    /// `Format` with the file at fault.
    #[inline]
    pub(crate) fn check(&self, field: Field, range: Range<usize>) -> Result<(), PackError> {
        match self.checks.get(field as usize) {
            Some(checks) if !checks.are_done() => checks.check(&self.column(field), range),
            _ => Ok(()),
        }
    }

    /// Whether all columns were compared with their checksums, or have none.
    pub(crate) fn are_checks_done(&self) -> bool {
        self.checks.iter().all(ColumnChecks::are_done)
    }

    /// Whether `check` of this range would read nothing.
    pub(crate) fn is_checked(&self, field: Field, range: Range<usize>) -> bool {
        self.checks.get(field as usize).is_none_or(|checks| checks.is_checked(&self.column(field), range))
    }

    /// Compare all columns with their checksums.
    ///
    /// # Errors
    /// As `check`; an interrupt.
    pub fn check_all(&self, progress: &mut dyn Progress) -> Result<(), PackError> {
        for &field in self.fields() {
            let len = self.column(field).len();
            for start in (0..len).step_by(VALUES_A_TICK) {
                progress.tick("checking the plan", start as u64, len as u64)?;
                self.check(field, start..len.min(start + VALUES_A_TICK))?;
            }
        }
        Ok(())
    }

    /// The fields that the plan has, in order.
    #[must_use]
    pub fn fields(&self) -> &'static [Field] {
        Field::of_plan(self.has_piece_ranges)
    }

    /// Whether the plan has `Field::PieceStart` and `Field::PieceStop`.
    #[must_use]
    pub fn has_piece_ranges(&self) -> bool {
        self.has_piece_ranges
    }

    /// One column; empty where the plan lacks it.
    #[must_use]
    pub fn column(&self, field: Field) -> Integers<'a> {
        self.columns[field as usize]
    }

    /// How many packs.
    #[must_use]
    pub fn packs(&self) -> usize {
        self.column(Field::IndicesCuLen).len()
    }
}

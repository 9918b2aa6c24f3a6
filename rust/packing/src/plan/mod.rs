//! A plan: six columns, and the metadata that says how they were made.
//!
//! Invariants: a column is 32 bits wide where every value of it fits, 64 bits otherwise; no value is negative;
//! `indices_cu_len` rises strictly and ends at the number of pieces.

mod column;
mod lookup;
mod metadata;

use crate::error::PackError;
use crate::inputs::Integers;

pub(crate) use column::PlanInteger;
pub use column::{Column, Field};
pub use lookup::{AsIntegers, AttachedLengths, LocatedPacks, PackBatch, TO_THE_END, locate, lookup};
pub use metadata::{FORMAT_VERSION, OrderKind, PlanMetadata};

/// A plan in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The six columns in the order of `Field::ALL`.
    pub columns: [Column; 6],
    /// How they were made.
    pub metadata: PlanMetadata,
}

impl Plan {
    /// One column.
    #[must_use]
    pub fn column(&self, field: Field) -> &Column {
        &self.columns[field as usize]
    }

    /// The columns as integers of any width.
    #[must_use]
    pub fn view(&self) -> PlanView<'_> {
        PlanView { columns: self.columns.each_ref().map(Column::view) }
    }
}

/// The six columns of a plan, wherever they lie.
#[derive(Clone, Copy)]
pub struct PlanView<'a> {
    columns: [Integers<'a>; 6],
}

impl<'a> PlanView<'a> {
    /// Columns in the order of `Field::ALL`.
    ///
    /// # Errors
    /// `Mismatch` where columns of packs differ in length.
    pub fn new(columns: [Integers<'a>; 6]) -> Result<Self, PackError> {
        let packs = columns[Field::IndicesCuLen as usize].len();
        for field in Field::ALL {
            let len = columns[field as usize].len();
            if field != Field::Indices && len != packs {
                return Err(PackError::Mismatch(format!("{} has {len} entries for {packs} packs", field.name())));
            }
        }
        Ok(Self { columns })
    }

    /// One column.
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

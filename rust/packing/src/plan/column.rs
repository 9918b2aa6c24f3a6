//! The columns of a plan, and the integers that they are computed in.

use crate::error::PackError;
use crate::integers::{ColumnWord, Integers};
use crate::memory::{self, PlainInteger};
use crate::progress::Progress;
use crate::shuffle::{Index, RandomState};
use crate::simd::vectorized;

/// The fields of a plan, in the order they are documented and stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    /// Which dataset each pack is drawn from.
    DatasetId,
    /// The sample of each piece.
    Indices,
    /// Inclusive cumulative piece count of each pack.
    IndicesCuLen,
    /// First token each pack takes of its first sample.
    StartOffset,
    /// One past the last token each pack takes of its last sample.
    EndOffset,
    /// Tokens of each pack's longest piece.
    Longest,
    /// First token of its sample that each piece takes; only in plans whose inner pieces may be parts of samples.
    PieceStart,
    /// One past the last token that each piece takes; only where `PieceStart` is.
    PieceStop,
}

/// Which columns have 8 bytes a value, by field.
pub(crate) type WideColumns = [bool; Field::ALL.len()];

impl Field {
    /// All fields, in order.
    pub const ALL: [Self; 8] = [
        Self::DatasetId,
        Self::Indices,
        Self::IndicesCuLen,
        Self::StartOffset,
        Self::EndOffset,
        Self::Longest,
        Self::PieceStart,
        Self::PieceStop,
    ];
    /// The fields that every plan has, in order.
    pub const REQUIRED: [Self; 6] =
        [Self::DatasetId, Self::Indices, Self::IndicesCuLen, Self::StartOffset, Self::EndOffset, Self::Longest];

    /// The fields of a plan with or without `PieceStart` and `PieceStop`.
    #[must_use]
    pub fn of_plan(has_piece_ranges: bool) -> &'static [Self] {
        if has_piece_ranges { &Self::ALL } else { &Self::REQUIRED }
    }

    /// Whether the column has one value a piece; else it has one a pack.
    #[must_use]
    pub fn is_per_piece(self) -> bool {
        matches!(self, Self::Indices | Self::PieceStart | Self::PieceStop)
    }

    /// The name, as in `plan.arrays()` and in the file names.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::DatasetId => "dataset_id",
            Self::Indices => "indices",
            Self::IndicesCuLen => "indices_cu_len",
            Self::StartOffset => "start_offset",
            Self::EndOffset => "end_offset",
            Self::Longest => "longest",
            Self::PieceStart => "piece_start",
            Self::PieceStop => "piece_stop",
        }
    }
}

/// One column, in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Column {
    /// 32 bits a value.
    I32(Vec<i32>),
    /// 64 bits a value.
    I64(Vec<i64>),
}

impl Column {
    /// An empty column with capacity for `capacity` values.
    pub(crate) fn with_capacity(capacity: usize, is_wide: bool) -> Result<Self, PackError> {
        Ok(if is_wide {
            Self::I64(memory::with_capacity(capacity)?)
        } else {
            Self::I32(memory::with_capacity(capacity)?)
        })
    }

    /// The numbers 0 … `samples` - 1 as `random` shuffles them, 32 bits wide where all of them fit.
    ///
    /// # Errors
    /// As `RandomState::shuffled`.
    pub fn shuffled(random: &mut RandomState, samples: usize, progress: &mut dyn Progress) -> Result<Self, PackError> {
        Ok(if samples <= 1 << 31 {
            Self::I32(random.shuffled(samples, progress)?)
        } else {
            Self::I64(random.shuffled(samples, progress)?)
        })
    }

    /// Append values, all of which fit the column.
    pub(crate) fn append<P: PlanInteger>(&mut self, values: &[P]) {
        match self {
            Self::I32(column) => P::append_to_i32(values, column),
            Self::I64(column) => P::append_to_i64(values, column),
        }
    }

    /// Append the same value `count` times.
    pub(crate) fn append_repeated(&mut self, value: usize, count: usize) {
        match self {
            Self::I32(column) => column.resize(column.len() + count, value as i32),
            Self::I64(column) => column.resize(column.len() + count, value as i64),
        }
    }

    /// Keep the first `len` values.
    pub(crate) fn truncate(&mut self, len: usize) {
        match self {
            Self::I32(column) => column.truncate(len),
            Self::I64(column) => column.truncate(len),
        }
    }

    /// Make room for `more` values.
    pub(crate) fn reserve(&mut self, more: usize) -> Result<(), PackError> {
        match self {
            Self::I32(column) => memory::reserve(column, more),
            Self::I64(column) => memory::reserve(column, more),
        }
    }

    /// How many more values there is room for.
    pub(crate) fn room(&self) -> usize {
        match self {
            Self::I32(column) => column.capacity() - column.len(),
            Self::I64(column) => column.capacity() - column.len(),
        }
    }

    /// The column as integers of any width.
    #[must_use]
    pub fn view(&self) -> Integers<'_> {
        match self {
            Self::I32(values) => Integers::from(&values[..]),
            Self::I64(values) => Integers::from(&values[..]),
        }
    }

    /// How many values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.view().len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values, widened.
    #[must_use]
    pub fn to_i64(&self) -> Vec<i64> {
        match self {
            Self::I32(values) => values.iter().map(|&value| i64::from(value)).collect(),
            Self::I64(values) => values.clone(),
        }
    }
}

/// The integers that a plan is computed in: `i32` while every bound fits, else `i64`. No value is negative.
pub(crate) trait PlanInteger: ColumnWord + Index + PlainInteger + Into<i64> {
    /// The largest value.
    const LARGEST: u64;
    fn plus(self, other: Self) -> Self;
    fn minus(self, other: Self) -> Self;
    /// The sum of values that are not negative, or 2⁶⁴ - 1 where it is more.
    fn sum(values: &[Self]) -> u64;
    fn append_to_i32(values: &[Self], column: &mut Vec<i32>);
    fn append_to_i64(values: &[Self], column: &mut Vec<i64>);
}

impl PlanInteger for i32 {
    const LARGEST: u64 = i32::MAX as u64;
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        self.wrapping_add(other)
    }
    #[inline(always)]
    fn minus(self, other: Self) -> Self {
        self.wrapping_sub(other)
    }
    fn sum(values: &[Self]) -> u64 {
        // 2³³ values of 31 bits have to come together before their sum wraps; a chunk has far fewer.
        vectorized(|| values.iter().map(|&value| value as u64).sum())
    }
    fn append_to_i32(values: &[Self], column: &mut Vec<i32>) {
        column.extend_from_slice(values);
    }
    fn append_to_i64(values: &[Self], column: &mut Vec<i64>) {
        column.extend(values.iter().map(|&value| i64::from(value)));
    }
}

impl PlanInteger for i64 {
    const LARGEST: u64 = i64::MAX as u64;
    #[inline(always)]
    fn plus(self, other: Self) -> Self {
        self.wrapping_add(other)
    }
    #[inline(always)]
    fn minus(self, other: Self) -> Self {
        self.wrapping_sub(other)
    }
    fn sum(values: &[Self]) -> u64 {
        values.iter().fold(0u64, |sum, &value| sum.saturating_add(value as u64))
    }
    fn append_to_i32(values: &[Self], column: &mut Vec<i32>) {
        column.extend(values.iter().map(|&value| value as i32));
    }
    fn append_to_i64(values: &[Self], column: &mut Vec<i64>) {
        column.extend_from_slice(values);
    }
}

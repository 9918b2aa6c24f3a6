//! A plan: six columns and the facts about how they were made.
//!
//! What always holds: a column is 32 bits wide where every value of it fits, 64 bits otherwise; no
//! value is negative; `indices_cu_len` rises strictly and ends at the number of pieces.

use serde::{Deserialize, Serialize};

use crate::error::PackError;
use crate::integers::Integers;

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
}

impl Field {
    /// All fields, in order.
    pub const ALL: [Self; 6] =
        [Self::DatasetId, Self::Indices, Self::IndicesCuLen, Self::StartOffset, Self::EndOffset, Self::Longest];

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
        }
    }
}

/// One column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Column {
    /// 32 bits a value.
    I32(Vec<i32>),
    /// 64 bits a value.
    I64(Vec<i64>),
}

impl Column {
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

    /// The same values in 32 bits, where all of them fit.
    pub(crate) fn narrowed(self) -> Self {
        match self {
            Self::I64(values) if values.iter().all(|&value| i32::try_from(value).is_ok()) => {
                Self::I32(values.into_iter().map(|value| value as i32).collect())
            }
            other => other,
        }
    }
}

/// Where the order of the samples came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OrderKind {
    /// The samples kept their order.
    Natural,
    /// Drawn from a seed.
    Seed,
    /// Given by the caller.
    Given,
}

/// The version of the folder format and of the fingerprint.
pub const FORMAT_VERSION: u32 = 1;

/// How a plan was made, and what came out: the content of `plan.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// Always `FORMAT_VERSION`.
    pub format_version: u32,
    /// The algorithm: `hard`.
    pub mode: String,
    /// Tokens a pack.
    pub max_length: u64,
    /// Whether the tail shorter than a pack was left out.
    pub drop_last: bool,
    /// Whether all datasets were packed as one.
    pub global_pack: bool,
    /// Where the order came from.
    pub order: OrderKind,
    /// The seed, where the order was drawn from one.
    pub seed: Option<u32>,
    /// Samples of each dataset.
    pub samples: Vec<u64>,
    /// Tokens of the ordered samples.
    pub tokens: u64,
    /// Tokens that the packs hold.
    pub tokens_packed: u64,
    /// Packs.
    pub packs: u64,
    /// Pieces.
    pub pieces: u64,
    /// Empty samples that fell on a pack's boundary and belong to no pack.
    pub empty_on_boundary: u64,
    /// Where the left-out tail starts in its first sample, for each group of samples that was cut as one stream.
    pub tail_start: Vec<u64>,
    /// 32 hexadecimal digits.
    pub fingerprint: String,
}

impl Facts {
    /// As JSON, indented.
    ///
    /// # Errors
    /// None that can be met: every field has a JSON form.
    pub fn to_json(&self) -> Result<String, PackError> {
        serde_json::to_string_pretty(self).map_err(|error| PackError::Invalid(error.to_string()))
    }

    /// From JSON.
    ///
    /// # Errors
    /// `Invalid` where the text does not describe a plan.
    pub fn from_json(text: &str) -> Result<Self, PackError> {
        serde_json::from_str(text).map_err(|error| PackError::Invalid(format!("does not describe a plan: {error}")))
    }
}

/// A plan in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The six columns in the order of `Field::ALL`.
    pub columns: [Column; 6],
    /// How they were made.
    pub facts: Facts,
}

impl Plan {
    /// One column.
    #[must_use]
    pub fn column(&self, field: Field) -> &Column {
        &self.columns[field as usize]
    }

    /// The columns as integers of any width.
    #[must_use]
    pub fn views(&self) -> Views<'_> {
        Views { columns: self.columns.each_ref().map(Column::view) }
    }
}

/// The six columns of a plan, wherever they lie.
#[derive(Clone, Copy)]
pub struct Views<'a> {
    columns: [Integers<'a>; 6],
}

impl<'a> Views<'a> {
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

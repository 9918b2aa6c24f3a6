//! A plan: six columns and the facts about how they were made.
//!
//! What always holds: a column is 32 bits wide where every value of it fits, 64 bits otherwise; no
//! value is negative; `indices_cu_len` rises strictly and ends at the number of pieces.

use serde::{Deserialize, Serialize};

use crate::array::Array;
use crate::error::PackError;
use crate::integers::Integers;
use crate::watch::Watch;

/// Values between two looks at the watch: a fraction of a millisecond.
const VALUES_A_TICK: usize = 1 << 16;

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
    I32(Array<i32>),
    /// 64 bits a value.
    I64(Array<i64>),
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
            Self::I64(values) => values.to_vec(),
        }
    }

    /// Keep the values in 32 bits, where all of them fit.
    ///
    /// # Errors
    /// An interrupt, which leaves the column empty or as it was.
    pub(crate) fn narrow(&mut self, watch: &mut dyn Watch) -> Result<(), PackError> {
        let Self::I64(values) = self else { return Ok(()) };
        let total = values.len() as u64;
        for (number, part) in values.chunks(VALUES_A_TICK).enumerate() {
            watch.tick("narrowing", (number * VALUES_A_TICK) as u64, total)?;
            if part.iter().any(|&value| i32::try_from(value).is_err()) {
                return Ok(());
            }
        }
        *self =
            Self::I32(std::mem::take(values).narrowed(|position| match position.is_multiple_of(VALUES_A_TICK) {
                true => watch.tick("narrowing", position as u64, total),
                false => Ok(()),
            })?);
        Ok(())
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

    /// Whether they go together; an error is a clause that says which do not.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.format_version != FORMAT_VERSION {
            return Err(format!("format version {} is unknown", self.format_version));
        }
        if self.mode != "hard" {
            return Err(format!("mode {:?} is unknown", self.mode));
        }
        if self.max_length == 0 || self.max_length > i64::MAX as u64 {
            return Err(format!("max_length is {}", self.max_length));
        }
        let hexadecimal = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
        if self.fingerprint.len() != 32 || !self.fingerprint.bytes().all(hexadecimal) {
            return Err("the fingerprint is not 32 hexadecimal digits".into());
        }
        if self.seed.is_some() != (self.order == OrderKind::Seed) {
            return Err("order and seed do not go together".into());
        }
        let streams = if self.global_pack { 1 } else { self.samples.len() };
        if self.tail_start.len() != streams {
            return Err(format!("tails are of {} datasets, and there are {}", self.tail_start.len(), streams));
        }
        if self.order == OrderKind::Given && self.samples.len() != 1 {
            return Err("an order is given for a single dataset only".into());
        }
        if self.samples.iter().try_fold(0u64, |sum, &samples| sum.checked_add(samples)).is_none_or(|sum| sum > 1 << 63)
        {
            return Err("the numbers of samples overflow".into());
        }
        self.check_pieces()?;
        self.check_tokens()
    }

    /// A piece is the begin of a sample, or its continuation in a pack that is not the first.
    fn check_pieces(&self) -> Result<(), String> {
        let samples = self.samples.iter().map(|&samples| u128::from(samples)).sum::<u128>();
        let most = samples + u128::from(self.packs.saturating_sub(1));
        let (pieces, empty) = (u128::from(self.pieces), u128::from(self.empty_on_boundary));
        if self.pieces < self.packs || pieces + empty > most {
            return Err(format!(
                "{samples} samples give {} packs, {pieces} pieces and {empty} empty samples between packs",
                self.packs
            ));
        }
        Ok(())
    }

    /// Each stream of tokens leaves less than a pack out, or lacks less than that in its last pack.
    fn check_tokens(&self) -> Result<(), String> {
        let full = u128::from(self.packs) * u128::from(self.max_length);
        let (tokens, packed) = (u128::from(self.tokens), u128::from(self.tokens_packed));
        if self.tokens > i64::MAX as u64 || packed > tokens || packed > full {
            return Err(format!("{} packs hold {packed} of {tokens} tokens", self.packs));
        }
        let (complete, rest) =
            if self.drop_last { (packed == full, tokens - packed) } else { (packed == tokens, full - packed) };
        let with_samples = self.samples.iter().filter(|&&samples| samples > 0).count() as u128;
        let with_samples = with_samples.min(self.tail_start.len() as u128);
        if !complete || rest > with_samples * u128::from(self.max_length - 1) {
            return Err(format!(
                "{} packs of {} tokens hold {packed} of {tokens}, with drop_last={}",
                self.packs, self.max_length, self.drop_last
            ));
        }
        let tails = self.tail_start.iter().filter(|&&start| start > 0).count() as u128;
        if tails > rest.min(self.packs.into()) || self.tail_start.iter().any(|&start| start > 0 && start >= self.tokens)
        {
            return Err("a tail starts where no sample is".into());
        }
        Ok(())
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

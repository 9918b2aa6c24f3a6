//! How a plan was made and what came out: the content of `plan.json`.

use serde::{Deserialize, Serialize};

use crate::error::PackError;

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
pub struct PlanMetadata {
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

impl PlanMetadata {
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

    /// Check that the values agree; an error is a clause that says which do not.
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

    /// Check the counts of pieces: a piece is the beginning of a sample, or its continuation in another pack.
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

    /// Check the counts of tokens: each stream drops less than a pack, or lacks less than that in its last pack.
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

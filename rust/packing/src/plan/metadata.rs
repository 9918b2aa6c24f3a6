//! How a plan was made and what came out: the content of `plan.json`.

use serde::{Deserialize, Serialize};

use super::multiple::MultipleMetadata;
use super::parts::{self, PartMetadata};
use crate::error::PackError;
use crate::request::{Mode, Modes, Overlong, Placement, Remainder, WholeOptions};

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
    /// The algorithm: `hard`, `best_fit`, `ordered` or `sequential`; `mixed` where each dataset has its own.
    pub mode: String,
    /// Tokens a pack.
    pub max_length: u64,
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
    /// Tokens that the packs hold; those of packs that come again count once.
    pub tokens_packed: u64,
    /// Packs.
    pub packs: u64,
    /// Pieces.
    pub pieces: u64,
    /// Only of `hard`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hard: Option<HardMetadata>,
    /// Only of the other modes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole: Option<WholeMetadata>,
    /// Only of `mixed`: the packs of each dataset, before any were left out or repeated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<PartMetadata>,
    /// Only where the number of packs was made a multiple.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub multiple: Option<MultipleMetadata>,
    /// 32 hexadecimal digits.
    pub fingerprint: String,
}

/// What only plans of the mode `hard` have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HardMetadata {
    /// Whether the tail shorter than a pack was left out.
    pub drop_last: bool,
    /// Empty samples that fell on a pack's boundary and belong to no pack.
    pub empty_on_boundary: u64,
    /// Where the left-out tail starts in its first sample, for each group of samples that was cut as one stream.
    pub tail_start: Vec<u64>,
}

/// What only plans of whole samples have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WholeMetadata {
    /// What happened to samples longer than `max_length`.
    pub overlong: Overlong,
    /// Packs that were open at once; null where all of them were.
    pub window: Option<u64>,
    /// Pieces a pack at most; null for any number.
    pub max_samples: Option<u64>,
    /// Each piece takes a multiple of so many tokens of its pack.
    pub align: u64,
    /// What the samples of a pack cost together at most; null where they have no costs.
    pub max_cost: Option<u64>,
    /// Samples without tokens, which belong to no pack.
    pub samples_empty: u64,
    /// Samples longer than `max_length`.
    pub samples_overlong: u64,
    /// Tokens of overlong samples that were left out.
    pub tokens_overlong_cut: u64,
    /// Tokens of packs that pieces take beyond their own because of `align`.
    pub padding_align: u64,
    /// Samples that the packs take tokens of.
    pub samples_packed: u64,
}

impl WholeMetadata {
    /// Metadata of a plan that holds nothing yet.
    pub(crate) fn new(options: &WholeOptions, max_cost: Option<u64>) -> Self {
        Self {
            overlong: options.overlong,
            window: options.placement.window(),
            max_samples: options.max_samples,
            align: options.align,
            max_cost,
            samples_empty: 0,
            samples_overlong: 0,
            tokens_overlong_cut: 0,
            padding_align: 0,
            samples_packed: 0,
        }
    }
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

    /// Whether the plan has `piece_start` and `piece_stop`.
    #[must_use]
    pub fn has_piece_ranges(&self) -> bool {
        let has_ranges = |whole: &WholeMetadata| matches!(whole.overlong, Overlong::Split | Overlong::Truncate);
        self.all_whole().any(has_ranges)
    }

    /// What the samples of a pack cost together at most.
    pub(crate) fn max_cost(&self) -> Option<u64> {
        self.all_whole().find_map(|whole| whole.max_cost)
    }

    fn all_whole(&self) -> impl Iterator<Item = &WholeMetadata> {
        self.whole.iter().chain(self.parts.iter().filter_map(|part| part.whole.as_ref()))
    }

    /// The algorithm that made the plan, or those of its parts; an error is a clause that says why there is none.
    pub(crate) fn modes(&self) -> Result<Modes, String> {
        if self.parts.is_empty() {
            return self.made_with().map(Modes::All);
        }
        self.as_parts().iter().map(Self::made_with).collect::<Result<_, _>>().map(Modes::Each)
    }

    /// The algorithm that made a plan that is not mixed.
    pub(crate) fn made_with(&self) -> Result<Mode, String> {
        let mode = match (&self.hard, &self.whole) {
            (Some(hard), None) if self.mode == "hard" => Mode::Hard { drop_last: hard.drop_last },
            (None, Some(whole)) if self.mode != "hard" => {
                let placement = Placement::from_name(&self.mode, whole.window.unwrap_or(0))
                    .ok_or_else(|| format!("mode {:?} is unknown", self.mode))?;
                if placement.window() != whole.window {
                    return Err(format!("mode {:?} and window {:?} do not go together", self.mode, whole.window));
                }
                Mode::Whole(WholeOptions {
                    placement,
                    overlong: whole.overlong,
                    max_samples: whole.max_samples,
                    align: whole.align,
                })
            }
            _ if self.mode != "hard" && Placement::from_name(&self.mode, 1).is_none() => {
                return Err(format!("mode {:?} is unknown", self.mode));
            }
            _ => return Err(format!("mode {:?} needs either \"hard\" or \"whole\", the one that fits", self.mode)),
        };
        mode.check(self.max_length).map(|()| mode)
    }

    /// Check that the values agree; an error is a clause that says which do not.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.format_version != FORMAT_VERSION {
            return Err(format!("format version {} is unknown", self.format_version));
        }
        self.modes()?;
        let hexadecimal = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
        if self.fingerprint.len() != 32 || !self.fingerprint.bytes().all(hexadecimal) {
            return Err("the fingerprint is not 32 hexadecimal digits".into());
        }
        if self.seed.is_some() != (self.order == OrderKind::Seed) {
            return Err("order and seed do not go together".into());
        }
        if self.order == OrderKind::Given && self.samples.len() != 1 {
            return Err("an order is given for a single dataset only".into());
        }
        if self.samples.iter().try_fold(0u64, |sum, &samples| sum.checked_add(samples)).is_none_or(|sum| sum > 1 << 63)
        {
            return Err("the numbers of samples overflow".into());
        }
        let all = self.with_left_out();
        for plan in [&self.without_repeated(), &all] {
            let full = u128::from(plan.packs) * u128::from(plan.max_length);
            let packed = u128::from(plan.tokens_packed);
            if plan.tokens > i64::MAX as u64 || packed > u128::from(plan.tokens) || packed > full {
                return Err(format!("{} packs hold {packed} of {} tokens", plan.packs, plan.tokens));
            }
        }
        if let Some(multiple) = &self.multiple {
            multiple.check(self)?;
        }
        if !self.parts.is_empty() {
            parts::check(&all)?;
        }
        all.as_parts().iter().try_for_each(|part| match (&part.hard, &part.whole) {
            (Some(hard), _) => hard.check(part, self.packs_left_out() > 0),
            (_, Some(whole)) => whole.check(part),
            _ => Ok(()),
        })
    }

    /// A mixed plan as one plan for each dataset, before packs were left out or repeated; another plan as itself.
    pub(crate) fn as_parts(&self) -> Vec<Self> {
        if self.parts.is_empty() {
            return vec![self.with_left_out()];
        }
        let part = |(part, &samples): (&PartMetadata, &u64)| part.as_plan(self, samples);
        self.parts.iter().zip(&self.samples).map(part).collect()
    }

    /// As it is once packs are left out or repeated.
    pub(crate) fn with_multiple(mut self, multiple: Option<MultipleMetadata>) -> Self {
        let Some(MultipleMetadata { remainder, packs, pieces, tokens, .. }) = multiple else { return self };
        match remainder {
            Remainder::Drop => {
                self.packs -= packs;
                self.pieces -= pieces;
                self.tokens_packed = self.tokens_packed.saturating_sub(tokens);
            }
            Remainder::Repeat => {
                self.packs += packs;
                self.pieces += pieces;
            }
        }
        self.multiple = multiple;
        self
    }

    /// As it was before packs were repeated.
    pub(crate) fn without_repeated(&self) -> Self {
        let mut before = self.clone();
        if let Some(MultipleMetadata { remainder: Remainder::Repeat, packs, pieces, .. }) = self.multiple {
            before.packs = self.packs.saturating_sub(packs);
            before.pieces = self.pieces.saturating_sub(pieces);
            before.multiple = None;
        }
        before
    }

    /// As it was before packs were repeated or left out.
    pub(crate) fn with_left_out(&self) -> Self {
        let mut before = self.without_repeated();
        if let Some(MultipleMetadata { remainder: Remainder::Drop, packs, pieces, tokens, .. }) = self.multiple {
            before.packs = self.packs.saturating_add(packs);
            before.pieces = self.pieces.saturating_add(pieces);
            before.tokens_packed = self.tokens_packed.saturating_add(tokens);
            before.multiple = None;
        }
        before
    }

    /// Packs that were left out.
    pub(crate) fn packs_left_out(&self) -> u64 {
        match self.multiple {
            Some(MultipleMetadata { remainder: Remainder::Drop, packs, .. }) => packs,
            _ => 0,
        }
    }

    fn all_samples(&self) -> u128 {
        self.samples.iter().map(|&samples| u128::from(samples)).sum()
    }
}

impl HardMetadata {
    fn check(&self, plan: &PlanMetadata, lost_packs: bool) -> Result<(), String> {
        let streams = if plan.global_pack { 1 } else { plan.samples.len() };
        if self.tail_start.len() != streams {
            return Err(format!("tails are of {} datasets, and there are {}", self.tail_start.len(), streams));
        }
        self.check_pieces(plan)?;
        self.check_tokens(plan, lost_packs)
    }

    /// Check the counts of pieces: a piece is the beginning of a sample, or its continuation in another pack.
    fn check_pieces(&self, plan: &PlanMetadata) -> Result<(), String> {
        let samples = plan.all_samples();
        let most = samples + u128::from(plan.packs.saturating_sub(1));
        let (pieces, empty) = (u128::from(plan.pieces), u128::from(self.empty_on_boundary));
        if plan.pieces < plan.packs || pieces + empty > most {
            return Err(format!(
                "{samples} samples give {} packs, {pieces} pieces and {empty} empty samples between packs",
                plan.packs
            ));
        }
        Ok(())
    }

    /// Check the counts of tokens: each stream drops less than a pack, or lacks less than that in its last pack. If packs
    /// were left out afterwards, a tail begins with the first of them.
    fn check_tokens(&self, plan: &PlanMetadata, lost_packs: bool) -> Result<(), String> {
        let full = u128::from(plan.packs) * u128::from(plan.max_length);
        let (tokens, packed) = (u128::from(plan.tokens), u128::from(plan.tokens_packed));
        let (complete, rest) =
            if self.drop_last { (packed == full, tokens - packed) } else { (packed == tokens, full - packed) };
        let with_samples = plan.samples.iter().filter(|&&samples| samples > 0).count() as u128;
        let with_samples = with_samples.min(self.tail_start.len() as u128);
        if !complete || rest > with_samples * u128::from(plan.max_length - 1) {
            return Err(format!(
                "{} packs of {} tokens hold {packed} of {tokens}, with drop_last={}",
                plan.packs, plan.max_length, self.drop_last
            ));
        }
        let tails = self.tail_start.iter().filter(|&&start| start > 0).count() as u128;
        let most_tails = if lost_packs { plan.packs.into() } else { rest.min(plan.packs.into()) };
        if tails > most_tails || self.tail_start.iter().any(|&start| start > 0 && start >= plan.tokens) {
            return Err("a tail starts where no sample is".into());
        }
        Ok(())
    }
}

impl WholeMetadata {
    fn check(&self, plan: &PlanMetadata) -> Result<(), String> {
        let [packs, pieces, packed] = [plan.packs, plan.pieces, plan.tokens_packed].map(u128::from);
        let [empty, overlong, samples_packed] =
            [self.samples_empty, self.samples_overlong, self.samples_packed].map(u128::from);
        let [cut, padding] = [self.tokens_overlong_cut, self.padding_align].map(u128::from);
        let is_split = self.overlong == Overlong::Split;
        let left_out = if self.overlong == Overlong::Drop { overlong } else { 0 };
        let samples = samples_packed + empty + left_out;
        let all = plan.all_samples();
        let are_all_used = plan.order != OrderKind::Given;
        if samples > all || (are_all_used && samples < all) {
            return Err(format!(
                "of {all} samples {samples_packed} are packed, {empty} are empty, and {left_out} are left out"
            ));
        }
        let most_pieces = packs.saturating_mul(u128::from(self.max_samples.unwrap_or(u64::MAX)));
        if pieces < packs || pieces > most_pieces || pieces < samples_packed || (pieces > samples_packed && !is_split) {
            return Err(format!("{packs} packs hold {pieces} pieces of {samples_packed} samples"));
        }
        let may_be_cut = matches!(self.overlong, Overlong::Drop | Overlong::Truncate) && overlong > 0;
        if packed + cut != u128::from(plan.tokens) || (cut > 0) != may_be_cut {
            return Err(format!("{packed} tokens are packed and {cut} cut of {}", plan.tokens));
        }
        if self.overlong == Overlong::Error && overlong > 0 {
            return Err(format!("{overlong} samples are too long, which overlong=\"error\" refuses"));
        }
        let full = packs * u128::from(plan.max_length);
        if packed < pieces || packed + padding > full || padding > pieces * u128::from(self.align - 1) {
            return Err(format!(
                "{packs} packs of {} tokens hold {packed} in {pieces} pieces, and {padding} of padding",
                plan.max_length
            ));
        }
        Ok(())
    }
}

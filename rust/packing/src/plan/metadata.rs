//! How a plan was made and what came out: the content of `plan.json`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::PackError;
use crate::integers::Integers;
use crate::ordered_samples::SampleOrder;
use crate::request::{Mode, Overlong, PackRequest, Packing, Remainder};

/// The version of the folder format.
pub const FORMAT_VERSION: u32 = 2;
/// The version of the algorithms: the same inputs give the same plan as long as it stays. It is part of the fingerprint.
pub const ALGORITHM_VERSION: u32 = 1;

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

/// How a plan was made, and what came out: the content of `plan.json`. Options are complete: defaults are filled in, and
/// null where the mode has no such option.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanMetadata {
    /// Always `FORMAT_VERSION`.
    pub format_version: u32,
    /// Of the crate that made the plan.
    pub algorithm_version: u32,
    /// The algorithm.
    pub mode: Mode,
    /// Tokens a pack.
    pub max_length: u64,
    /// As in `PackRequest`.
    pub drop_last: Option<bool>,
    /// As in `PackRequest`.
    pub overlong: Option<Overlong>,
    /// As in `PackRequest`.
    pub window: Option<u64>,
    /// As in `PackRequest`.
    pub max_samples: Option<u64>,
    /// As in `PackRequest`.
    pub align: u64,
    /// As in `PackRequest`; null where the samples have no costs.
    pub max_cost: Option<u64>,
    /// As in `PackRequest`.
    pub multiple_of: Option<u64>,
    /// As in `PackRequest`.
    pub remainder: Option<Remainder>,
    /// Whether all datasets were packed as one.
    pub global_pack: bool,
    /// Where the order came from.
    pub order: OrderKind,
    /// The seed, where the order was drawn from one.
    pub seed: Option<u32>,
    /// Samples of each dataset.
    pub samples: Vec<u64>,
    /// What the plan holds and leaves out.
    pub counts: PlanCounts,
    /// 32 hexadecimal digits.
    pub fingerprint: String,
    /// Only in a folder: the checksum of each block of each column, 16 hexadecimal digits a block, by field.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub checksums: BTreeMap<String, String>,
}

/// Counts of what a plan holds and leaves out. Packs that come again count in `packs`, `pieces`, `padding_align`,
/// `max_pieces_per_pack` and `longest`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanCounts {
    /// Packs.
    pub packs: u64,
    /// Pieces.
    pub pieces: u64,
    /// Samples that have a piece.
    pub samples: u64,
    /// Samples that have a piece, and are not a single whole one.
    pub samples_cut: u64,
    /// Ordered samples of length 0.
    pub samples_empty: u64,
    /// Ordered samples longer than a pack, of a plan of whole samples.
    pub samples_overlong: u64,
    /// Tokens of the ordered samples.
    pub tokens: u64,
    /// Tokens that the packs hold; those of packs that come again count once.
    pub tokens_packed: u64,
    /// Tokens behind `max_length` of samples that were truncated.
    pub tokens_truncated: u64,
    /// Packs that were left out so that the number of packs is a multiple.
    pub packs_dropped: u64,
    /// Packs at the end that are the first ones again.
    pub packs_repeated: u64,
    /// Tokens of those packs.
    pub tokens_repeated: u64,
    /// Tokens of packs that pieces take beyond their own because of `align`.
    pub padding_align: u64,
    /// Pieces of the pack with the most.
    pub max_pieces_per_pack: u64,
    /// Tokens of the longest piece.
    pub longest: u64,
}

impl PlanMetadata {
    /// Metadata of a request that was checked.
    pub(crate) fn new(request: &PackRequest<'_>, packing: Packing, counts: PlanCounts, fingerprint: String) -> Self {
        let (drop_last, overlong, window) = match packing {
            Packing::Hard { drop_last } => (Some(drop_last), None, None),
            Packing::Whole(options) => {
                (None, Some(options.overlong), options.window.filter(|_| request.mode == Mode::Ordered))
            }
        };
        let (order, seed) = match request.order {
            SampleOrder::Natural => (OrderKind::Natural, None),
            SampleOrder::Given(_) => (OrderKind::Given, None),
            SampleOrder::Seed(seed) => (OrderKind::Seed, Some(seed)),
        };
        Self {
            format_version: FORMAT_VERSION,
            algorithm_version: ALGORITHM_VERSION,
            mode: request.mode,
            max_length: request.max_length,
            drop_last,
            overlong,
            window,
            max_samples: request.max_samples,
            align: request.align,
            max_cost: request.max_cost,
            multiple_of: request.multiple_of,
            remainder: request.multiple().map(|(_, remainder)| remainder),
            global_pack: request.global_pack,
            order,
            seed,
            samples: request.lengths.iter().map(|lengths| lengths.len() as u64).collect(),
            counts,
            fingerprint,
            checksums: BTreeMap::new(),
        }
    }

    /// The metadata of a request's plan, were it empty: its options, complete.
    ///
    /// # Errors
    /// `Invalid` for options out of range or that contradict each other.
    pub(crate) fn of_request(request: &PackRequest<'_>) -> Result<Self, PackError> {
        Ok(Self::new(request, request.check()?, PlanCounts::default(), String::new()))
    }

    /// The request that the plan was made from, with these inputs.
    pub(crate) fn request<'a>(
        &self,
        lengths: &[Integers<'a>],
        order: SampleOrder<'a>,
        costs: Option<&[Integers<'a>]>,
    ) -> PackRequest<'a> {
        PackRequest {
            mode: self.mode,
            order,
            drop_last: self.drop_last,
            overlong: self.overlong,
            window: self.window,
            max_samples: self.max_samples,
            align: self.align,
            costs: costs.map(<[Integers<'_>]>::to_vec),
            max_cost: self.max_cost,
            multiple_of: self.multiple_of,
            remainder: self.remainder,
            global_pack: self.global_pack,
            ..PackRequest::new(lengths.to_vec(), self.max_length)
        }
    }

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
        matches!(self.overlong, Some(Overlong::Split | Overlong::Truncate))
    }

    /// The options, checked; an error says which contradict each other.
    pub(crate) fn packing(&self) -> Result<Packing, PackError> {
        if self.seed.is_some() != (self.order == OrderKind::Seed) {
            return Err(PackError::Invalid("order and seed do not go together".into()));
        }
        // The inputs are not part of the metadata.
        let options = PackRequest { max_cost: None, ..self.request(&[], SampleOrder::Natural, None) };
        options.check()
    }

    /// How many packs follow each other without any that comes again.
    pub(crate) fn packs_before_repeats(&self) -> u64 {
        self.counts.packs.saturating_sub(self.counts.packs_repeated)
    }
}

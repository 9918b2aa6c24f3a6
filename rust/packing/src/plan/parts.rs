//! The parts of a mixed plan: the packs of each dataset, made in a mode of its own.

use serde::{Deserialize, Serialize};

use super::{HardMetadata, PlanMetadata, WholeMetadata};

/// The mode of a mixed plan.
pub(crate) const MIXED: &str = "mixed";

/// The packs of one dataset of a mixed plan; fields as in `PlanMetadata`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartMetadata {
    /// The algorithm.
    pub mode: String,
    /// Tokens of the ordered samples.
    pub tokens: u64,
    /// Tokens that the packs hold.
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
}

impl PartMetadata {
    /// As a plan of a single dataset of `samples` samples.
    pub(crate) fn as_plan(&self, mixed: &PlanMetadata, samples: u64) -> PlanMetadata {
        PlanMetadata {
            mode: self.mode.clone(),
            samples: vec![samples],
            tokens: self.tokens,
            tokens_packed: self.tokens_packed,
            packs: self.packs,
            pieces: self.pieces,
            hard: self.hard.clone(),
            whole: self.whole.clone(),
            parts: Vec::new(),
            multiple: None,
            ..mixed.clone()
        }
    }
}

/// Check that the parts add up to the plan; an error is a clause that says what does not.
pub(super) fn check(plan: &PlanMetadata) -> Result<(), String> {
    if plan.mode != MIXED || plan.hard.is_some() || plan.whole.is_some() || plan.global_pack {
        return Err(format!("a plan of mode {:?} has no parts", plan.mode));
    }
    if plan.parts.len() != plan.samples.len() {
        return Err(format!("{} parts are of {} datasets", plan.parts.len(), plan.samples.len()));
    }
    let sum = |value: fn(&PartMetadata) -> u64| plan.parts.iter().map(value).fold(0, u64::saturating_add);
    let sums = [
        ("tokens", sum(|part| part.tokens), plan.tokens),
        ("tokens_packed", sum(|part| part.tokens_packed), plan.tokens_packed),
        ("packs", sum(|part| part.packs), plan.packs),
        ("pieces", sum(|part| part.pieces), plan.pieces),
    ];
    match sums.iter().find(|(_, found, said)| found != said) {
        Some((name, found, said)) => Err(format!("the parts have {found} {name}, and the plan {said}")),
        None => Ok(()),
    }
}

//! What a plan says of the packs that it leaves out or repeats, so that their number is a multiple.

use serde::{Deserialize, Serialize};

use super::PlanMetadata;
use crate::request::{PackMultiple, Remainder};

/// How the number of packs became a multiple, and what that cost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MultipleMetadata {
    /// The number that divides the number of packs.
    pub of: u64,
    /// Whether packs are left out or repeated.
    pub remainder: Remainder,
    /// Packs that are left out or repeated.
    pub packs: u64,
    /// Their pieces.
    pub pieces: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Their padding because of `align`.
    pub padding_align: u64,
    /// Samples that are in no pack because their packs are left out. 0 in mode `hard`, where they lie in the tails.
    pub samples: u64,
    /// Those of them that are longer than `max_length`.
    pub samples_overlong: u64,
}

impl MultipleMetadata {
    pub(crate) fn new(asked: PackMultiple) -> Self {
        let PackMultiple { of, remainder } = asked;
        Self { of, remainder, packs: 0, pieces: 0, tokens: 0, padding_align: 0, samples: 0, samples_overlong: 0 }
    }

    /// What was asked for.
    pub(crate) fn asked(&self) -> PackMultiple {
        PackMultiple { of: self.of, remainder: self.remainder }
    }

    /// Check that the values agree; an error is a clause that says which do not.
    pub(crate) fn check(&self, plan: &PlanMetadata) -> Result<(), String> {
        self.asked().check(&plan.modes()?)?;
        let Self { of, packs, pieces, .. } = *self;
        if !plan.packs.is_multiple_of(of) || packs >= of || pieces < packs {
            return Err(format!("{} packs are no multiple of {of} by {packs} packs of {pieces} pieces", plan.packs));
        }
        let left_out = if self.remainder == Remainder::Drop { pieces } else { 0 };
        if self.samples > left_out || self.samples_overlong > self.samples {
            return Err(format!("{} samples are left out with {left_out} pieces", self.samples));
        }
        let is_all_repeated = plan.packs <= packs || plan.pieces <= pieces;
        if self.remainder == Remainder::Repeat && packs > 0 && is_all_repeated {
            return Err(format!("{packs} of {} packs are repeated", plan.packs));
        }
        let full = u128::from(packs) * u128::from(plan.max_length);
        if u128::from(self.tokens) + u128::from(self.padding_align) > full {
            return Err(format!("{packs} packs of {} tokens hold {}", plan.max_length, self.tokens));
        }
        Ok(())
    }
}

//! What each sample is packed as, and the counts of a plan of whole samples.

use crate::error::PackError;
use crate::plan::WholeMetadata;
use crate::request::{Overlong, WholeOptions};

/// What a sample is packed as: pieces of `max_length` tokens, and a last piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SampleParts {
    /// Pieces of `max_length` tokens, which come first.
    pub(super) full: u64,
    /// Tokens of the last piece; 0 for none.
    pub(super) last: u64,
}

impl SampleParts {
    /// The parts of a sample of `length` tokens.
    ///
    /// # Errors
    /// `InputChanged` for a sample that was to be refused before.
    pub(super) fn new(length: u64, max_length: u64, overlong: Overlong) -> Result<Self, PackError> {
        if length <= max_length {
            return Ok(Self { full: 0, last: length });
        }
        match overlong {
            Overlong::Error => Err(PackError::InputChanged),
            Overlong::Split => Ok(Self { full: length / max_length, last: length % max_length }),
            Overlong::Truncate => Ok(Self { full: 0, last: max_length }),
            Overlong::Drop => Ok(Self { full: 0, last: 0 }),
        }
    }
}

/// What the plan holds so far.
pub(super) struct Counts {
    pub(super) tokens: u64,
    pub(super) packs: u64,
    pub(super) pieces: u64,
    pub(super) metadata: WholeMetadata,
}

impl Counts {
    pub(super) fn new(options: &WholeOptions, max_cost: Option<u64>) -> Self {
        Self { tokens: 0, packs: 0, pieces: 0, metadata: WholeMetadata::new(options, max_cost) }
    }

    /// Count a sample that is empty or longer than `max_length`.
    pub(super) fn note_unusual(&mut self, length: u64, max_length: u64, parts: SampleParts) {
        let counts = &mut self.metadata;
        if length == 0 {
            counts.samples_empty += 1;
        } else if length > max_length {
            counts.samples_overlong += 1;
            let packed = parts.full * max_length + parts.last;
            counts.tokens_overlong_cut = counts.tokens_overlong_cut.saturating_add(length - packed);
        }
    }

    /// Count all samples of a stream, after `note_unusual` counted the unusual ones of all streams so far.
    pub(super) fn note_ordered(&mut self, samples_so_far: u64) {
        let counts = &mut self.metadata;
        let left_out = if counts.overlong == Overlong::Drop { counts.samples_overlong } else { 0 };
        counts.samples_packed = samples_so_far.saturating_sub(counts.samples_empty + left_out);
    }
}

//! Checks which packs a plan leaves out so that their number is a multiple.

use std::cmp::Reverse;

use super::check_totals;
use crate::error::PackError;
use crate::plan::MultipleMetadata;

/// What a pack's pieces take of it, and its number; the pack that goes first is the smallest.
type PackKey = (u64, Reverse<u64>);

/// The packs of one stream.
#[derive(Default)]
struct StreamPacks {
    packs: u64,
    emptiest_kept: Option<PackKey>,
    fullest_left_out: Option<PackKey>,
}

/// What was found to be left out.
pub(super) struct DroppedPacks<'a> {
    said: &'a MultipleMetadata,
    streams: Vec<StreamPacks>,
    packs: u64,
    /// Counts of what no pack holds.
    pub(super) pieces: u64,
    pub(super) tokens: u64,
    pub(super) padding_align: u64,
    pub(super) samples: u64,
    pub(super) samples_overlong: u64,
}

impl<'a> DroppedPacks<'a> {
    pub(super) fn new(said: &'a MultipleMetadata) -> Self {
        Self {
            said,
            streams: Vec::new(),
            packs: 0,
            pieces: 0,
            tokens: 0,
            padding_align: 0,
            samples: 0,
            samples_overlong: 0,
        }
    }

    pub(super) fn begin_stream(&mut self) {
        self.streams.push(StreamPacks::default());
    }

    /// Count `count` packs of the stream of which `taken` tokens are taken. `number` is that of the last of them if the
    /// plan holds them, else of the first; the same for all if their order is not known.
    pub(super) fn note(&mut self, is_kept: bool, count: u64, taken: u64, number: u64) {
        let Some(stream) = self.streams.last_mut().filter(|_| count > 0) else { return };
        let key = (taken, Reverse(number));
        stream.packs += count;
        if is_kept {
            stream.emptiest_kept = Some(stream.emptiest_kept.map_or(key, |other| other.min(key)));
        } else {
            stream.fullest_left_out = Some(stream.fullest_left_out.map_or(key, |other| other.max(key)));
            self.packs += count;
        }
    }

    /// Whether the plan may leave out one pack more than were found.
    pub(super) fn may_be_more(&self) -> bool {
        self.packs < self.said.packs
    }

    pub(super) fn check(&self) -> Result<(), PackError> {
        let said = self.said;
        check_totals(&[
            ("the number of packs that are left out", self.packs, said.packs),
            ("the number of their pieces", self.pieces, said.pieces),
            ("the number of their tokens", self.tokens, said.tokens),
            ("their padding_align", self.padding_align, said.padding_align),
            ("the number of samples that are left out", self.samples, said.samples),
            ("the number of overlong samples that are left out", self.samples_overlong, said.samples_overlong),
        ])?;
        // Of packs that are equally full, those of the largest dataset go first, and of several the later one.
        let keys = |key: fn(&StreamPacks) -> Option<PackKey>| {
            self.streams.iter().enumerate().filter_map(move |(number, stream)| {
                key(stream).map(|(taken, pack)| (taken, Reverse(stream.packs), Reverse(number), pack))
            })
        };
        let left_out = keys(|stream| stream.fullest_left_out).max();
        let kept = keys(|stream| stream.emptiest_kept).min();
        match (left_out, kept) {
            (Some(left_out), Some(kept)) if left_out > kept => Err(PackError::Mismatch(format!(
                "a pack of which {} tokens are taken is left out, and one of which {} are taken is not; \
                 multiple_of leaves out the emptiest, then the last of the largest dataset",
                left_out.0, kept.0
            ))),
            _ => Ok(()),
        }
    }
}

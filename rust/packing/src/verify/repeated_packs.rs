//! Checks the packs that a plan repeats so that their number is a multiple.

use super::{check_totals, wrong_pack};
use crate::error::PackError;
use crate::inputs::SampleLengths;
use crate::plan::{Field, MultipleMetadata, PlanView};
use crate::progress::Progress;
use crate::request::{Mode, Modes};

/// Check that the packs from `first` on, of a plan that is right up to there, are the first packs again.
pub(super) fn check(
    plan: &PlanView<'_>,
    first: usize,
    said: &MultipleMetadata,
    streams: &[SampleLengths<'_>],
    modes: &Modes,
    progress: &mut dyn Progress,
) -> Result<(), PackError> {
    let ends = plan.column(Field::IndicesCuLen);
    let begin = |pack: usize| pack.checked_sub(1).map_or(0, |before| ends.get(before));
    let available = plan.column(Field::Indices).len() as u64;
    let (mut tokens, mut padding) = (0u64, 0u64);
    for pack in first..plan.packs() {
        progress.tick("verifying", pack as u64, plan.packs() as u64)?;
        let again = (pack - first) % first;
        let (pieces, expected) = (begin(pack)..ends.get(pack), begin(again)..ends.get(again));
        let count = pieces.end.wrapping_sub(pieces.start);
        if count != expected.end - expected.start || pieces.end > available {
            return wrong_pack(pack, format!("has {count} pieces, but it repeats pack {again}"));
        }
        for &field in plan.fields() {
            let column = plan.column(field);
            let value = |at: u64| column.get(at as usize);
            let is_same = match field {
                Field::IndicesCuLen => true,
                field if field.is_per_piece() => pieces.clone().map(value).eq(expected.clone().map(value)),
                _ => value(pack as u64) == value(again as u64),
            };
            if !is_same {
                return wrong_pack(pack, format!("has another {} than pack {again}, which it repeats", field.name()));
            }
        }
        let mode = modes.of(plan.column(Field::DatasetId).get(again) as usize);
        for piece in expected.clone() {
            let [start, stop] = range(plan, again, piece, &expected, streams);
            let piece_tokens = stop.saturating_sub(start);
            tokens = tokens.saturating_add(piece_tokens);
            if let Mode::Whole(options) = mode {
                padding = padding.saturating_add(options.aligned(piece_tokens) - piece_tokens);
            }
        }
    }
    check_totals(&[
        ("the number of tokens that are repeated", tokens, said.tokens),
        ("the padding_align that is repeated", padding, said.padding_align),
    ])
}

/// Start and stop of one of the `pieces` of a pack.
fn range(
    plan: &PlanView<'_>,
    pack: usize,
    piece: u64,
    pieces: &std::ops::Range<u64>,
    streams: &[SampleLengths<'_>],
) -> [u64; 2] {
    if plan.has_piece_ranges() {
        return [Field::PieceStart, Field::PieceStop].map(|field| plan.column(field).get(piece as usize));
    }
    let [dataset, start, end] =
        [Field::DatasetId, Field::StartOffset, Field::EndOffset].map(|field| plan.column(field).get(pack));
    let sample = plan.column(Field::Indices).get(piece as usize) as usize;
    let start = if piece == pieces.start { start } else { 0 };
    let stop = if piece + 1 == pieces.end { end } else { streams[dataset as usize].get(sample) };
    [start, stop]
}

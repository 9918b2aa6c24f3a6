//! Packs of whole samples: best-fit decreasing over all of them, or best fit over a window of open packs.
//!
//! Source of the methods: D. S. Johnson et al., "Worst-Case Performance Bounds for Simple One-Dimensional Packing
//! Algorithms" (1974).
//!
//! Working memory beyond inputs and outputs. All modes: what `SampleReader` takes, and with a seed or for `best_fit` one
//! index a sample. `best_fit`: one index a pack, two integers a length up to the longest, two for each sample that is
//! split, and some for each group of packs, of which there are a few for each length that occurs; with costs, one index
//! a sample more, and some ten integers a pack. The others: the pieces of the open packs.

mod best_fit;
mod cost_fit;
mod items;
mod open_by_room;
mod ordered;
mod pack_buffer;
mod pack_groups;
mod pack_window;
mod sorted_samples;
mod stream_window;

use std::ops::Range;

use crate::error::PackError;
use crate::fingerprint::ColumnHash;
use crate::inputs::{RandomState, SampleLengths, SampleOrder};
use crate::packer::{CheckedCosts, IndexSource, Packed, Packer, PlanOutput, ScanResult, StreamCosts};
use crate::plan::PlanInteger;
use crate::progress::Progress;
use crate::request::{Overlong, WholeOptions};

use items::Counts;
use pack_buffer::PackBuffer;
pub use stream_window::StreamWindow;

/// The seed of the order of packs, where the caller gave none.
const PACK_ORDER_SEED: u32 = 0;

/// The most packs and pieces that a stream can have.
pub(crate) fn most(
    packer: &Packer<'_>,
    options: &WholeOptions,
    stream: &SampleLengths<'_>,
    scan: &ScanResult,
) -> (u64, u64) {
    let max_length = packer.request.max_length;
    let samples = packer.ordered_samples(stream).0;
    let parts = if options.overlong == Overlong::Split { scan.tokens / max_length } else { 0 };
    let pieces = samples.saturating_add(parts);
    // A pack is opened when a piece does not fit the pack before: so the two exceed a pack, or the one before has all
    // the pieces that it may have.
    let taken = u128::from(scan.tokens) + u128::from(pieces) * u128::from(options.align - 1);
    let packs = 2 * taken / u128::from(max_length) + 1 + u128::from(pieces / options.most_pieces());
    // Of costs nothing is known: each piece may take a pack for itself.
    let packs = if packer.costs.is_some() { u128::from(pieces) } else { packs };
    (u64::try_from(packs).unwrap_or(u64::MAX).min(pieces), pieces)
}

/// The least packs and pieces that a stream can have, whatever the order is.
pub(crate) fn least(
    packer: &Packer<'_>,
    options: &WholeOptions,
    stream: &SampleLengths<'_>,
    scan: &ScanResult,
) -> (u64, u64) {
    let max_length = packer.request.max_length;
    let (_, left_out) = packer.ordered_samples(stream);
    let has_overlong = scan.longest > max_length;
    if has_overlong && options.overlong == Overlong::Drop {
        return (0, 0);
    }
    let pieces = scan.filled.saturating_sub(left_out);
    let is_all = left_out == 0 && (!has_overlong || options.overlong == Overlong::Split);
    // Of the tokens that are left when samples are left out or cut, nothing is known but that a piece has one.
    let tokens = if is_all { scan.tokens } else { pieces };
    (tokens.div_ceil(max_length), pieces)
}

/// Append the packs of `streams` to `output`.
///
/// # Errors
/// A bad order; inputs that changed; what the output raises; an interrupt.
pub(crate) fn run<P: PlanInteger>(
    packer: &Packer<'_>,
    options: &WholeOptions,
    streams: Range<usize>,
    output: &mut dyn PlanOutput<P>,
    progress: &mut dyn Progress,
) -> Result<Packed, PackError> {
    let request = &packer.request;
    let seed = match request.order {
        SampleOrder::Seed(seed) => Some(seed),
        _ => None,
    };
    let mut random = RandomState::new(seed.unwrap_or(PACK_ORDER_SEED));
    let counts = Counts::new(options, packer.costs.as_ref().map(CheckedCosts::max_cost));
    let mut whole = WholePacker { packer, options, costs: None, output, counts, order_hash: ColumnHash::default() };
    let mut samples = 0u64;
    for number in streams {
        let (stream, scan) = (&packer.streams[number], &packer.scans[number]);
        whole.costs = packer.costs.as_ref().map(|costs| costs.of_stream(number));
        let Some(window) = options.placement.window() else {
            whole.pack_best_fit(stream, scan, &mut random, seed.is_some(), progress)?;
            samples += packer.ordered_samples(stream).0;
            continue;
        };
        let drawn: Vec<P>;
        let indices = match request.order {
            SampleOrder::Given(given) => IndexSource::Given(given),
            SampleOrder::Natural => IndexSource::Natural(stream.len()),
            SampleOrder::Seed(_) => {
                drawn = random.shuffled(stream.len(), progress)?;
                IndexSource::Drawn(&drawn)
            }
        };
        whole.pack_ordered(stream, scan, indices, window, progress)?;
        samples += packer.ordered_samples(stream).0;
    }
    let WholePacker { mut counts, order_hash, .. } = whole;
    counts.note_ordered(samples);
    let order_digest = match request.order {
        SampleOrder::Given(order) => order_hash.finish(order.len() as u64),
        _ => 0,
    };
    Ok(Packed {
        tokens: counts.tokens,
        tokens_packed: counts.tokens.saturating_sub(counts.metadata.tokens_overlong_cut),
        packs: counts.packs,
        pieces: counts.pieces,
        hard: None,
        whole: Some(counts.metadata),
        order_digest,
    })
}

/// Packs the streams of one plan.
struct WholePacker<'r, P> {
    packer: &'r Packer<'r>,
    options: &'r WholeOptions,
    /// Of the samples of the stream.
    costs: Option<StreamCosts<'r>>,
    output: &'r mut dyn PlanOutput<P>,
    counts: Counts,
    /// Hash of an order that was given.
    order_hash: ColumnHash,
}

impl<P: PlanInteger> WholePacker<'_, P> {
    /// Whether the plan holds the start and stop of each piece.
    fn has_ranges(&self) -> bool {
        self.packer.has_piece_ranges()
    }

    fn flush(
        &mut self,
        buffer: &mut PackBuffer<P>,
        dataset_id: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        buffer.flush(dataset_id, &mut self.counts, self.output, progress)
    }
}

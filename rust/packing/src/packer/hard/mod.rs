//! Hard packing: the ordered samples are one stream of tokens, cut every `max_length`.
//!
//! Source of the method: concatenate-and-cut as GPT-style pre-training does it, with the array layout of XTuner's
//! HardPackDataset. The ordered samples are read a chunk at a time, each chunk is cut into packs (`cutter`), and the
//! packs are appended to the plan (`token_stream_packer`).
//!
//! Working memory beyond inputs and outputs: at most 8 MiB a thread and 16 MiB. With a given order, a bit a sample for
//! each thread, or for all of them where that is more than 32 MiB. With a seed, one index a sample.

mod cutter;
mod token_stream_packer;

use std::ops::Range;

use crate::error::PackError;
use crate::inputs::{RandomState, SampleLengths, SampleOrder};
use crate::packer::{IndexSource, Packed, Packer, PlanOutput, ScanResult};
use crate::plan::{HardMetadata, PlanInteger};
use crate::progress::Progress;

use token_stream_packer::TokenStreamPacker;

/// The most packs and pieces that a stream can have.
pub(crate) fn most(packer: &Packer<'_>, drop_last: bool, stream: &SampleLengths<'_>, scan: &ScanResult) -> (u64, u64) {
    let max_length = packer.request.max_length;
    let closed = scan.tokens / max_length;
    let has_tail = !drop_last && !scan.tokens.is_multiple_of(max_length);
    // A piece begins with a sample or with a pack; the open pack is among the samples.
    (closed + u64::from(has_tail), closed.saturating_add(packer.ordered_samples(stream).0))
}

/// The least packs and pieces that a stream can have, whatever the order is.
pub(crate) fn least(packer: &Packer<'_>, drop_last: bool, stream: &SampleLengths<'_>, scan: &ScanResult) -> (u64, u64) {
    let max_length = packer.request.max_length;
    let (_, left_out) = packer.ordered_samples(stream);
    // Of the tokens that are left when an order leaves samples out, nothing is known.
    let (tokens, tail) = if left_out == 0 { (scan.tokens, scan.tokens % max_length) } else { (0, max_length - 1) };
    let (closed, dropped) = if drop_last { (tokens / max_length, tail) } else { (tokens.div_ceil(max_length), 0) };
    // A sample that has tokens is a piece, unless it lies in the dropped tail, with one token or more.
    (closed, scan.filled.saturating_sub(left_out).saturating_sub(dropped).max(closed))
}

/// Append the packs of `streams` to `output`.
///
/// # Errors
/// A bad order; inputs that changed; what the output raises; an interrupt.
pub(crate) fn run<P: PlanInteger>(
    packer: &Packer<'_>,
    drop_last: bool,
    streams: Range<usize>,
    output: &mut dyn PlanOutput<P>,
    progress: &mut dyn Progress,
) -> Result<Packed, PackError> {
    let request = &packer.request;
    let mut random = match request.order {
        SampleOrder::Seed(seed) => Some(RandomState::new(seed)),
        _ => None,
    };
    let mut stream_packer = TokenStreamPacker::<P>::new(request.max_length, drop_last, &packer.threads, output);
    for (lengths, scan) in packer.streams[streams.clone()].iter().zip(&packer.scans[streams]) {
        let drawn: Vec<P>;
        let indices = match (request.order, &mut random) {
            (SampleOrder::Given(given), _) => IndexSource::Given(given),
            (_, Some(random)) => {
                drawn = random.shuffled(lengths.len(), progress)?;
                IndexSource::Drawn(&drawn)
            }
            (_, None) => IndexSource::Natural(lengths.len()),
        };
        stream_packer.pack(lengths, scan, indices, progress)?;
    }
    let TokenStreamPacker { totals, tail_start, order_hash, .. } = stream_packer;
    let order_digest = match request.order {
        SampleOrder::Given(order) => order_hash.finish(order.len() as u64),
        _ => 0,
    };
    Ok(Packed {
        tokens: totals.tokens,
        tokens_packed: totals.tokens_packed,
        packs: totals.packs as u64,
        pieces: totals.pieces as u64,
        hard: Some(HardMetadata { drop_last, empty_on_boundary: totals.empty_on_boundary, tail_start }),
        whole: None,
        order_digest,
    })
}

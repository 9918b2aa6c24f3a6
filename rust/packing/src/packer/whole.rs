//! Packs of whole samples: best-fit decreasing over all of them, or best fit over a window of open packs.
//!
//! Source of the methods: D. S. Johnson et al., "Worst-Case Performance Bounds for Simple One-Dimensional Packing
//! Algorithms" (1974).
//!
//! Working memory beyond inputs and outputs. All modes: what `SampleReader` takes, and with a seed or for `best_fit` one
//! index a sample. `best_fit`: one index a pack, two integers a length up to the longest, two for each sample that is
//! split, and some for each group of packs; there are a few groups for each length that occurs. With costs: one index a
//! sample more, and some ten integers a pack. The others: the pieces of the open packs.

use super::output::{PackColumns, PlanOutput};
use super::samples::IndexSource;
use super::{Packed, Packer};
use crate::error::PackError;
use crate::fingerprint::ColumnHash;
use crate::ordered_samples::{SampleLengths, SampleOrder};
use crate::plan::{PlanCounts, PlanInteger};
use crate::progress::Progress;
use crate::request::{Overlong, WholeOptions};
use crate::scan::{ScanResult, StreamCosts};
use crate::shuffle::RandomState;

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

/// Append the packs of all streams to `output`.
///
/// # Errors
/// A bad order; inputs that changed; what the output raises; an interrupt.
pub(crate) fn run<P: PlanInteger>(
    packer: &Packer<'_>,
    options: &WholeOptions,
    output: &mut dyn PlanOutput<P>,
    progress: &mut dyn Progress,
) -> Result<Packed, PackError> {
    let request = &packer.request;
    let seed = match request.order {
        SampleOrder::Seed(seed) => Some(seed),
        _ => None,
    };
    let mut random = RandomState::new(seed.unwrap_or(PACK_ORDER_SEED));
    let counts = Counts::new(options);
    let mut whole = WholePacker { packer, options, costs: None, output, counts, order_hash: ColumnHash::default() };
    let mut samples = 0u64;
    for (number, (stream, scan)) in packer.streams.iter().zip(&packer.scans).enumerate() {
        whole.costs = packer.costs.as_ref().map(|costs| costs.of_stream(number));
        let Some(window) = options.window else {
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
    counts.note_samples(samples);
    let order_digest = match request.order {
        SampleOrder::Given(order) => order_hash.finish(order.len() as u64),
        _ => 0,
    };
    Ok(Packed { counts: counts.counts, tail_start: Vec::new(), order_digest })
}

/// Packs the streams of one plan.
pub(super) struct WholePacker<'r, P> {
    pub(super) packer: &'r Packer<'r>,
    pub(super) options: &'r WholeOptions,
    /// Of the samples of the stream.
    pub(super) costs: Option<StreamCosts<'r>>,
    pub(super) output: &'r mut dyn PlanOutput<P>,
    pub(super) counts: Counts,
    /// Hash of an order that was given.
    pub(super) order_hash: ColumnHash,
}

impl<P: PlanInteger> WholePacker<'_, P> {
    /// Whether the plan holds the start and stop of each piece.
    pub(super) fn has_ranges(&self) -> bool {
        self.packer.has_piece_ranges()
    }

    pub(super) fn flush(
        &mut self,
        buffer: &mut PackBuffer<P>,
        dataset_id: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        buffer.flush(dataset_id, &mut self.counts, self.output, progress)
    }
}

/// The pieces that a sample is packed as: some of `max_length` tokens, and a last one.
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

/// Counts of the plan so far.
pub(super) struct Counts {
    pub(super) counts: PlanCounts,
    /// Tokens of overlong samples that are in no piece.
    left_out: u64,
    overlong: Overlong,
}

impl Counts {
    fn new(options: &WholeOptions) -> Self {
        Self { counts: PlanCounts::default(), left_out: 0, overlong: options.overlong }
    }

    /// Count a sample that is empty or longer than `max_length`.
    pub(super) fn note_unusual(&mut self, length: u64, max_length: u64, parts: SampleParts) {
        let counts = &mut self.counts;
        if length == 0 {
            counts.samples_empty += 1;
        } else if length > max_length {
            counts.samples_overlong += 1;
            self.left_out = self.left_out.saturating_add(length - (parts.full * max_length + parts.last));
        }
    }

    /// Count all samples of the plan, once their tokens are.
    fn note_samples(&mut self, samples: u64) {
        let counts = &mut self.counts;
        let is_dropped = self.overlong == Overlong::Drop;
        let left_out = counts.samples_empty + if is_dropped { counts.samples_overlong } else { 0 };
        counts.samples = samples.saturating_sub(left_out);
        counts.samples_cut = if is_dropped { 0 } else { counts.samples_overlong };
        counts.tokens_packed = counts.tokens.saturating_sub(self.left_out);
        counts.tokens_truncated = if self.overlong == Overlong::Truncate { self.left_out } else { 0 };
    }
}

/// Complete packs, and the pieces of one that is not closed yet.
pub(super) struct PackBuffer<P> {
    /// Sample of each piece.
    pub(super) indices: Vec<P>,
    /// Start and stop of each piece, in a plan that has them.
    pub(super) ranges: Option<[Vec<P>; 2]>,
    /// Cumulative piece counts, starts, ends, longest pieces.
    packs: [Vec<P>; 4],
}

impl<P: PlanInteger> PackBuffer<P> {
    pub(super) fn new(has_ranges: bool) -> Self {
        let ranges = has_ranges.then(|| [Vec::new(), Vec::new()]);
        Self { indices: Vec::new(), ranges, packs: [const { Vec::new() }; 4] }
    }

    /// Close a pack of the pieces since the last one. `end` is where its last piece ends in the sample; with ranges it
    /// is not used.
    pub(super) fn close_pack(&mut self, end: P, longest: P) {
        let values = [P::truncate(self.indices.len() as u64), P::default(), end, longest];
        self.packs.iter_mut().zip(values).for_each(|(column, value)| column.push(value));
    }

    /// Hand the packs, which are drawn from dataset `dataset_id`, to `output`, and forget them.
    pub(super) fn flush(
        &mut self,
        dataset_id: usize,
        counts: &mut Counts,
        output: &mut dyn PlanOutput<P>,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        let [cumulative, starts, ends, _] = &mut self.packs;
        if let Some([piece_starts, piece_stops]) = &self.ranges {
            let mut first = 0;
            for ((start, end), &pieces) in starts.iter_mut().zip(ends).zip(&*cumulative) {
                let pieces = pieces.widen() as usize;
                (*start, *end) = (piece_starts[first], piece_stops[pieces - 1]);
                first = pieces;
            }
        }
        let before = P::truncate(counts.counts.pieces);
        cumulative.iter_mut().for_each(|pieces| *pieces = pieces.plus(before));
        counts.counts.pieces += self.indices.len() as u64;
        let columns = PackColumns {
            dataset_id,
            indices: &self.indices,
            packs: self.packs.each_ref().map(|column| &column[..]),
            piece_ranges: self.ranges.as_ref().map(|ranges| ranges.each_ref().map(|column| &column[..])),
        };
        output.append(&columns, progress)?;
        self.indices.clear();
        self.packs.iter_mut().chain(self.ranges.iter_mut().flatten()).for_each(Vec::clear);
        Ok(())
    }
}

//! Hard packing: the ordered samples are one stream of tokens, cut every `max_length`.
//!
//! Source of the method: concatenate-and-cut as GPT-style pre-training does it, with the array layout of XTuner's
//! HardPackDataset.
//!
//! The order is walked in windows of one chunk, or of a few chunks a thread. In each window all chunks are read, each
//! on any thread. The sums of their tokens say how many tokens the open pack holds before each chunk, so that all of
//! them are cut, again each on any thread. Then the packs are appended in order.
//!
//! Working memory beyond inputs and outputs: at most 8 MiB a thread and 16 MiB. With a given order, a bit a sample for
//! each thread, or for all of them where that is more than 32 MiB. With a seed, one index a sample.
//!
//! Invariants: `OpenPack` alone decides what the next sample does, so that a chunk can be cut apart from the chunks
//! before it once the tokens in the open pack are known. Nothing is written beyond the columns of `CutPacks`, whatever
//! the samples are.
#![allow(unsafe_code)]

use super::output::{PackColumns, PlanOutput};
use super::samples::{
    CHUNK, CHUNKS_A_THREAD, FEW_SAMPLES, IndexSource, ReadFailure, SampleReader, Samples, SeenSamples, bad_order,
};
use super::{Packed, Packer};
use crate::error::PackError;
use crate::fingerprint::ColumnHash;
use crate::ordered_samples::{SampleLengths, SampleOrder};
use crate::plan::{PlanCounts, PlanInteger};
use crate::progress::Progress;
use crate::scan::ScanResult;
use crate::shuffle::RandomState;
use crate::threads::Threads;

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

/// Append the packs of all streams to `output`.
///
/// # Errors
/// A bad order; inputs that changed; what the output raises; an interrupt.
pub(crate) fn run<P: PlanInteger>(
    packer: &Packer<'_>,
    drop_last: bool,
    output: &mut dyn PlanOutput<P>,
    progress: &mut dyn Progress,
) -> Result<Packed, PackError> {
    let request = &packer.request;
    let mut random = match request.order {
        SampleOrder::Seed(seed) => Some(RandomState::new(seed)),
        _ => None,
    };
    let mut stream_packer = TokenStreamPacker::<P>::new(request.max_length, drop_last, &packer.threads, output);
    for (lengths, scan) in packer.streams.iter().zip(&packer.scans) {
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
    let counts = PlanCounts {
        tokens: totals.tokens,
        tokens_packed: totals.tokens_packed,
        samples_empty: totals.samples_empty,
        ..PlanCounts::default()
    };
    Ok(Packed { counts, tail_start, order_digest })
}

/// Counts of the plan so far.
#[derive(Clone, Copy, Default)]
pub(super) struct Totals {
    pub(super) pieces: usize,
    /// Pieces of packs that are closed.
    pieces_closed: usize,
    pub(super) packs: usize,
    pub(super) samples_empty: u64,
    pub(super) tokens: u64,
    pub(super) tokens_packed: u64,
}

/// A chunk of samples, and the packs that it is cut into.
struct Chunk<P> {
    start: usize,
    samples: Samples<P>,
    failure: Option<ReadFailure>,
    /// Samples of length 0.
    empty: u64,
    cutter: Cutter<P>,
    /// Whether all of it is cut.
    is_cut: bool,
}

/// Packs the streams of one plan.
pub(super) struct TokenStreamPacker<'r, P> {
    max_length: P,
    drop_last: bool,
    threads: &'r Threads,
    output: &'r mut dyn PlanOutput<P>,
    chunks: Vec<Chunk<P>>,
    pub(super) totals: Totals,
    /// Where the tail that is left out, or the last, short pack starts in its first sample, for each stream.
    pub(super) tail_start: Vec<u64>,
    /// Hash of an order that was given.
    pub(super) order_hash: ColumnHash,
}

/// How far a stream is.
struct StreamProgress<P> {
    open: OpenPack<P>,
    tokens: u64,
    /// Tokens of the last sample that is not empty.
    last_length: P,
    /// Samples of length 0, and those of them after that one.
    empty: u64,
    empty_at_end: usize,
}

impl<'r, P: PlanInteger> TokenStreamPacker<'r, P> {
    /// `max_length` and all lengths fit `P`, and so does their sum.
    pub(super) fn new(
        max_length: u64,
        drop_last: bool,
        threads: &'r Threads,
        output: &'r mut dyn PlanOutput<P>,
    ) -> Self {
        let max_length = P::truncate(max_length);
        Self {
            max_length,
            drop_last,
            threads,
            output,
            chunks: Vec::new(),
            totals: Totals::default(),
            tail_start: Vec::new(),
            order_hash: ColumnHash::default(),
        }
    }

    /// Pack a stream. An order that was given is checked on the way.
    ///
    /// # Errors
    /// A bad order, by its first wrong entry; `InputChanged`; what the output raises; an interrupt.
    pub(super) fn pack(
        &mut self,
        lengths: &SampleLengths<'_>,
        scan: &ScanResult,
        indices: IndexSource<'_, P>,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        let reader = SampleReader::new(lengths, indices, self.threads)?;
        let IndexSource::Given(order) = indices else {
            let stream = self.pack_samples(&reader, scan, progress)?;
            return self.finish(stream, lengths.dataset_id(), progress);
        };
        let stream = match self.pack_samples(&reader, scan, progress) {
            // There may be too many tokens because a sample was read twice, on two threads.
            Err(PackError::InputChanged) => return Err(bad_order(&order, lengths, progress)),
            result => result?,
        };
        if !reader.used.is_none_or(SeenSamples::are_disjoint) {
            return Err(bad_order(&order, lengths, progress));
        }
        self.finish(stream, lengths.dataset_id(), progress)
    }

    fn pack_samples(
        &mut self,
        reader: &SampleReader<'_, P>,
        scan: &ScanResult,
        progress: &mut dyn Progress,
    ) -> Result<StreamProgress<P>, PackError> {
        let zero = P::default();
        let mut stream =
            StreamProgress { open: OpenPack::default(), tokens: 0, last_length: zero, empty: 0, empty_at_end: 0 };
        let len = reader.indices.len();
        let threads = if len > FEW_SAMPLES { self.threads } else { &Threads::new(1) };
        let window = if threads.count() == 1 { 1 } else { threads.count() * CHUNKS_A_THREAD };
        let max_length = self.max_length;
        let mut chunks = std::mem::take(&mut self.chunks);
        chunks.resize_with(window.min(len.div_ceil(CHUNK)), || Chunk::new(max_length));
        for begin in (0..len).step_by(CHUNK * window) {
            progress.tick("packing", begin as u64, len as u64)?;
            let used = (len - begin).div_ceil(CHUNK).min(window);
            let chunks = &mut chunks[..used];
            chunks.iter_mut().zip((begin..).step_by(CHUNK)).for_each(|(chunk, start)| chunk.start = start);
            threads.for_each(chunks, |thread, chunk| chunk.read(reader, thread));
            let mut filled = stream.open.filled.widen();
            for chunk in &mut *chunks {
                if chunk.failure.is_some() {
                    return Err(PackError::InputChanged);
                }
                if matches!(reader.indices, IndexSource::Given(_)) {
                    self.order_hash.push(chunk.samples.order_leaf);
                }
                stream.note(&chunk.samples);
                stream.empty += chunk.empty;
                chunk.cutter.begin(P::truncate(filled));
                // Lengths that change meanwhile may have any sum, so the sum is reduced before it is added.
                filled = (filled + chunk.samples.tokens % max_length.widen()) % max_length.widen();
            }
            // The output has room for the tokens that the first pass found.
            if stream.tokens > scan.tokens {
                return Err(PackError::InputChanged);
            }
            threads.for_each(chunks, |_, chunk| chunk.cut());
            for chunk in chunks {
                self.append(chunk, &mut stream.open, reader.lengths.dataset_id(), progress)?;
            }
        }
        self.chunks = chunks;
        Ok(stream)
    }

    /// Append the packs of a chunk, which goes on from the pack that is `open`, and cut the rest of it.
    fn append(
        &mut self,
        chunk: &mut Chunk<P>,
        open: &mut OpenPack<P>,
        dataset_id: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        let mut before = Some(*open);
        loop {
            let packs = &mut chunk.cutter.output;
            packs.connect(self.totals.pieces, before);
            self.output.append(&packs.columns(dataset_id), progress)?;
            if let Some(pieces_closed) = packs.pieces_closed() {
                self.totals.pieces_closed = pieces_closed as usize;
                before = None;
            }
            self.totals.pieces += packs.pieces();
            self.totals.packs += packs.packs();
            if chunk.is_cut {
                break;
            }
            progress.tick("packing", chunk.start as u64, chunk.start as u64 + 1)?;
            chunk.cut();
        }
        *open = match (before, chunk.cutter.open) {
            (None, after) => after,
            // No pack was closed, so the open one goes on.
            (Some(before), after) => {
                OpenPack { filled: after.filled, start: before.start, longest: before.longest.max(after.longest) }
            }
        };
        Ok(())
    }

    /// Leave the tail out, or make it a short pack.
    fn finish(
        &mut self,
        stream: StreamProgress<P>,
        dataset_id: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        let StreamProgress { open, tokens, last_length, empty, empty_at_end } = stream;
        let filled = open.filled.widen();
        self.totals.tokens += tokens;
        self.totals.samples_empty += empty;
        self.totals.tokens_packed += tokens - filled;
        self.tail_start.push(if filled == 0 { 0 } else { open.start.widen() });
        if filled == 0 {
            return Ok(());
        }
        // Empty samples at the very end lie beyond the last token, so they belong to no pack.
        let removed = if self.drop_last { self.totals.pieces - self.totals.pieces_closed } else { empty_at_end };
        self.output.remove_last_pieces(removed)?;
        self.totals.pieces -= removed;
        if self.drop_last {
            return Ok(());
        }
        let pieces = P::truncate(self.totals.pieces as u64);
        let Some(chunk) = self.chunks.first_mut() else { return Ok(()) };
        let pack = &mut chunk.cutter.output;
        pack.set_short_pack([pieces, open.start, last_length, open.longest]);
        self.output.append(&pack.columns(dataset_id), progress)?;
        self.totals.pieces_closed = self.totals.pieces;
        self.totals.packs += 1;
        self.totals.tokens_packed += filled;
        Ok(())
    }
}

impl<P: PlanInteger> Chunk<P> {
    fn new(max_length: P) -> Self {
        Self {
            start: 0,
            samples: Samples::default(),
            failure: None,
            empty: 0,
            cutter: Cutter::new(max_length),
            is_cut: false,
        }
    }

    fn read(&mut self, reader: &SampleReader<'_, P>, thread: usize) {
        let count = CHUNK.min(reader.indices.len() - self.start);
        self.failure = reader.read(thread, self.start, count, &mut self.samples).err();
        self.empty = self.samples.lengths.iter().filter(|&&length| length == P::default()).count() as u64;
    }

    fn cut(&mut self) {
        self.is_cut = self.cutter.cut(&self.samples);
    }
}

impl<P: PlanInteger> StreamProgress<P> {
    /// Count the samples of a chunk.
    fn note(&mut self, samples: &Samples<P>) {
        self.tokens = self.tokens.saturating_add(samples.tokens);
        match samples.lengths.iter().rposition(|&length| length != P::default()) {
            Some(last) => {
                self.last_length = samples.lengths[last];
                self.empty_at_end = samples.lengths.len() - 1 - last;
            }
            None => self.empty_at_end += samples.lengths.len(),
        }
    }
}

/// Packs that one call of `cut` closes at most: bounds the memory of its output.
pub(super) const MOST_PACKS: usize = 2 * CHUNK;

/// The pack that is being filled, between two samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OpenPack<P> {
    /// Tokens in it, fewer than `max_length`.
    pub(super) filled: P,
    /// First token that it takes from its first sample.
    pub(super) start: P,
    /// Its longest piece so far.
    pub(super) longest: P,
}

/// Pieces, and the packs that were closed: the first `pieces` and `packs` entries of the columns.
pub(super) struct CutPacks<P> {
    indices: Box<[P]>,
    /// Inclusive cumulative piece count.
    cumulative: Box<[P]>,
    starts: Box<[P]>,
    ends: Box<[P]>,
    longests: Box<[P]>,
    pieces: usize,
    packs: usize,
}

impl<P: PlanInteger> CutPacks<P> {
    fn new() -> Self {
        // One entry more than is kept: see `Cutter::cut_fast`.
        let column = |len| vec![P::default(); len + 1].into_boxed_slice();
        Self {
            indices: column(CHUNK + MOST_PACKS + 1),
            cumulative: column(MOST_PACKS),
            starts: column(MOST_PACKS),
            ends: column(MOST_PACKS),
            longests: column(MOST_PACKS),
            pieces: 0,
            packs: 0,
        }
    }

    pub(super) fn pieces(&self) -> usize {
        self.pieces
    }

    pub(super) fn packs(&self) -> usize {
        self.packs
    }

    /// The columns, of packs that are drawn from dataset `dataset_id`.
    pub(super) fn columns(&self, dataset_id: usize) -> PackColumns<'_, P> {
        let packs = [&self.cumulative, &self.starts, &self.ends, &self.longests].map(|column| &column[..self.packs]);
        PackColumns { dataset_id, indices: &self.indices[..self.pieces], packs, piece_ranges: None }
    }

    /// Pieces up to the end of the last pack closed here.
    pub(super) fn pieces_closed(&self) -> Option<u64> {
        self.cumulative[..self.packs].last().map(|count| count.widen())
    }

    /// Add what comes before these packs: the pieces of the plan, and the open pack that the first of them completes.
    pub(super) fn connect(&mut self, pieces_before: usize, open: Option<OpenPack<P>>) {
        let before = P::truncate(pieces_before as u64);
        self.cumulative[..self.packs].iter_mut().for_each(|count| *count = count.plus(before));
        if let (Some(open), 1..) = (open, self.packs) {
            self.starts[0] = open.start;
            self.longests[0] = self.longests[0].max(open.longest);
        }
    }

    /// Hold one pack without new pieces, in place of what was there; entries as in `PackColumns::packs`.
    pub(super) fn set_short_pack(&mut self, [cumulative, start, end, longest]: [P; 4]) {
        (self.pieces, self.packs) = (0, 1);
        (self.cumulative[0], self.starts[0], self.ends[0], self.longests[0]) = (cumulative, start, end, longest);
    }

    fn add_piece(&mut self, index: P) {
        self.indices[self.pieces] = index;
        self.pieces += 1;
    }
}

/// Cuts one chunk, in several calls where it closes very many packs.
pub(super) struct Cutter<P> {
    max_length: P,
    pub(super) open: OpenPack<P>,
    /// The next sample.
    position: usize,
    /// Tokens that packs took of that sample already.
    taken: P,
    pub(super) output: CutPacks<P>,
}

impl<P: PlanInteger> Cutter<P> {
    pub(super) fn new(max_length: P) -> Self {
        let open = OpenPack::default();
        Self { max_length, open, position: 0, taken: P::default(), output: CutPacks::new() }
    }

    /// Begin another chunk; `filled` tokens are in the open pack.
    pub(super) fn begin(&mut self, filled: P) {
        self.open = OpenPack { filled, ..OpenPack::default() };
        (self.position, self.taken) = (0, P::default());
    }

    /// Cut the samples, in place of the packs that the last call cut; whether all of them are cut.
    pub(super) fn cut(&mut self, samples: &Samples<P>) -> bool {
        let len = samples.indices.len();
        let output = &mut self.output;
        (output.pieces, output.packs) = (0, 0);
        while self.position < len {
            if self.taken == P::default() {
                self.cut_fast(&samples.indices, &samples.lengths);
            }
            if self.position < len && !self.cut_one(samples.indices[self.position], samples.lengths[self.position]) {
                return false;
            }
        }
        true
    }

    /// Cut samples each of which crosses at most one boundary and does not end on one; stop before the first other.
    ///
    /// The processor cannot predict whether a sample crosses a boundary. So both outcomes are written: the sample
    /// twice, the open pack as if it ended here, and the counters decide what the next sample overwrites.
    fn cut_fast(&mut self, indices: &[P], lengths: &[P]) {
        let out = &mut self.output;
        let first_pack = out.packs;
        // Each sample closes one pack at most.
        let count = (indices.len() - self.position).min(MOST_PACKS - first_pack);
        let (indices, lengths) = (&indices[self.position..][..count], &lengths[self.position..][..count]);
        let (mut pieces, mut packs) = (out.pieces, first_pack);
        assert!(pieces <= self.position + packs && self.position + count <= CHUNK && packs + count <= MOST_PACKS);
        let OpenPack { mut filled, mut longest, .. } = self.open;
        let max_length = self.max_length;
        let mut done = count;
        for (offset, (&index, &length)) in indices.iter().zip(lengths).enumerate() {
            let sum = filled.plus(length);
            let taken = max_length.minus(filled);
            let stays = sum < max_length;
            let rest = if stays { sum } else { sum.minus(max_length) };
            if rest <= P::default() || rest >= max_length {
                // Nothing is left over, or more than a whole pack.
                done = offset;
                break;
            }
            let longest_here = longest.max(if stays { length } else { taken });
            let next_pieces = pieces + 1 + usize::from(!stays);
            // SAFETY: by the assertion above, and as each sample adds at most two pieces and one pack, `pieces` is at
            // most CHUNK + MOST_PACKS and `packs` at most MOST_PACKS here; the columns have one entry more.
            unsafe {
                *out.indices.get_unchecked_mut(pieces) = index;
                *out.indices.get_unchecked_mut(pieces + 1) = index;
                *out.cumulative.get_unchecked_mut(packs) = P::truncate(pieces as u64 + 1);
                *out.ends.get_unchecked_mut(packs) = taken;
                *out.longests.get_unchecked_mut(packs) = longest_here;
            }
            pieces = next_pieces;
            packs += usize::from(!stays);
            longest = if stays { longest_here } else { rest };
            filled = rest;
        }
        if packs > first_pack {
            // None of these packs ended with its sample, so each next one starts where it ended.
            out.starts[first_pack] = self.open.start;
            out.starts[first_pack + 1..packs].copy_from_slice(&out.ends[first_pack..packs - 1]);
            self.open.start = out.ends[packs - 1];
        }
        (self.open.filled, self.open.longest) = (filled, longest);
        (out.pieces, out.packs) = (pieces, packs);
        self.position += done;
    }

    /// Cut the next sample, or the rest of it; false if it would close more packs than the output may hold.
    fn cut_one(&mut self, index: P, length: P) -> bool {
        let zero = P::default();
        let out = &mut self.output;
        let mut rest = length.minus(self.taken);
        if rest == zero && self.open.filled == zero {
            // An empty sample on the boundary belongs to neither pack.
            self.position += 1;
            return true;
        }
        loop {
            let room = self.max_length.minus(self.open.filled);
            if rest < room {
                out.add_piece(index);
                self.open.filled = self.open.filled.plus(rest);
                self.open.longest = self.open.longest.max(rest);
                break;
            }
            if out.packs == MOST_PACKS {
                return false;
            }
            out.add_piece(index);
            self.taken = self.taken.plus(room);
            rest = rest.minus(room);
            let pack = out.packs;
            out.cumulative[pack] = P::truncate(out.pieces as u64);
            out.starts[pack] = self.open.start;
            out.ends[pack] = self.taken;
            out.longests[pack] = self.open.longest.max(room);
            out.packs += 1;
            self.open = OpenPack { start: if rest == zero { zero } else { self.taken }, ..OpenPack::default() };
            if rest == zero {
                break;
            }
        }
        self.position += 1;
        self.taken = zero;
        true
    }
}

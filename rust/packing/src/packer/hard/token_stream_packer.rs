//! Packs one stream of tokens after the other into an output.
//!
//! The order is walked in windows of one chunk, or of a few chunks a thread. In each window all chunks are read, each
//! on any thread. The sums of their tokens say how many tokens the open pack holds before each chunk, so that all of
//! them are cut, again each on any thread. Then the packs are appended in order.

use super::cutter::{Cutter, OpenPack};
use crate::error::PackError;
use crate::fingerprint::ColumnHash;
use crate::inputs::SampleLengths;
use crate::packer::{
    CHUNK, CHUNKS_A_THREAD, FEW_SAMPLES, IndexSource, PlanOutput, ReadFailure, SampleReader, Samples, ScanResult,
    SeenSamples, bad_order,
};
use crate::plan::PlanInteger;
use crate::progress::Progress;
use crate::threads::Threads;

/// What the plan holds so far.
#[derive(Clone, Copy, Default)]
pub(super) struct Totals {
    pub(super) pieces: usize,
    /// Pieces of packs that are closed.
    pieces_closed: usize,
    pub(super) packs: usize,
    pub(super) empty_on_boundary: u64,
    pub(super) tokens: u64,
    pub(super) tokens_packed: u64,
}

/// A chunk of samples, and the packs that it is cut into.
struct Chunk<P> {
    start: usize,
    samples: Samples<P>,
    failure: Option<ReadFailure>,
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
    /// Empty samples after that one.
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
        let mut stream = StreamProgress { open: OpenPack::default(), tokens: 0, last_length: zero, empty_at_end: 0 };
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
            self.totals.empty_on_boundary += packs.empty_on_boundary;
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
        let StreamProgress { open, tokens, last_length, empty_at_end } = stream;
        let filled = open.filled.widen();
        self.totals.tokens += tokens;
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
        Self { start: 0, samples: Samples::default(), failure: None, cutter: Cutter::new(max_length), is_cut: false }
    }

    fn read(&mut self, reader: &SampleReader<'_, P>, thread: usize) {
        let count = CHUNK.min(reader.indices.len() - self.start);
        self.failure = reader.read(thread, self.start, count, &mut self.samples).err();
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

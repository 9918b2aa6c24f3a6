//! Ordered samples in scratch memory, and the serial walk over them.
//!
//! What always holds: each index and each length is read from the caller's arrays once; everything
//! after works on the copy.

use super::kernel::{self, Written};
use super::marks::{Bits, Tally};
use super::scan::Dataset;
use super::{Cell, PACKS_A_CHUNK, Packer, Stream};
use crate::error::PackError;
use crate::fingerprint;
use crate::integers::{Integers, Word};
use crate::shuffle::Index;

/// Samples a chunk: one leaf of the fingerprint; indices and lengths lie in the second-level cache together.
const CHUNK: usize = fingerprint::LEAF;
/// Chunks between two looks at the watch: a few milliseconds.
const CHUNKS_A_TICK: usize = 64;

/// The order of the samples of one stream.
#[derive(Clone, Copy)]
pub(super) enum Order<'a, C: Cell> {
    /// 0 … n - 1.
    Natural(usize),
    /// As the caller gave it, yet to be checked.
    Given(Integers<'a>),
    /// As drawn from a seed.
    Drawn(&'a [C::Word]),
}

impl<C: Cell> Order<'_, C> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Natural(len) => *len,
            Self::Given(order) => order.len(),
            Self::Drawn(order) => order.len(),
        }
    }

    /// Read the indices from position `start` on, all of them below `samples`.
    fn read(&self, start: usize, out: &mut [C::Word], samples: usize) -> Result<(), PackError> {
        match self {
            Self::Natural(_) => {
                for (offset, slot) in out.iter_mut().enumerate() {
                    *slot = C::Word::from_usize(start + offset);
                }
                Ok(())
            }
            Self::Drawn(order) => {
                out.copy_from_slice(&order[start..start + out.len()]);
                Ok(())
            }
            Self::Given(order) => {
                let seen = order.read(start, out);
                // The or of all values bounds each of them, and has the top bit of a negative one.
                if seen < samples as u64 {
                    return Ok(());
                }
                let mut wide = vec![0u64; out.len()];
                order.read(start, &mut wide);
                match wide.iter().position(|&value| value >= samples as u64) {
                    None => {
                        for (slot, &value) in out.iter_mut().zip(&wide) {
                            *slot = C::Word::truncate(value);
                        }
                        Ok(())
                    }
                    Some(offset) => {
                        let value = wide[offset];
                        let value = if order.kind().is_signed() { i128::from(value as i64) } else { i128::from(value) };
                        Err(PackError::OrderOutOfRange { position: start + offset, value, samples })
                    }
                }
            }
        }
    }
}

/// A run of ordered samples.
pub(super) struct Chunk<C: Cell> {
    pub(super) indices: Vec<C::Word>,
    pub(super) lengths: Vec<C::Word>,
    /// Tokens of all samples.
    pub(super) tokens: u64,
    /// Tally of the indices, where the order is of all samples.
    pub(super) tally: Tally,
}

impl<C: Cell> Chunk<C> {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            indices: Vec::with_capacity(capacity),
            lengths: Vec::with_capacity(capacity),
            tokens: 0,
            tally: Tally::default(),
        }
    }

    /// Copy the samples at positions `start` … `start + count` of the order.
    ///
    /// The scan saw every length; one that is longer now was changed since. Refusing it keeps sums from wrapping.
    pub(super) fn load(
        &mut self,
        dataset: &Dataset<'_>,
        order: Order<'_, C>,
        start: usize,
        count: usize,
    ) -> Result<(), PackError> {
        self.indices.resize(count, C::Word::default());
        self.lengths.resize(count, C::Word::default());
        let (indices, lengths) = (&mut self.indices[..], &mut self.lengths[..]);
        order.read(start, indices, dataset.len())?;
        let mut tally = Tally::default();
        let seen = match order {
            Order::Natural(_) => dataset.read(start, lengths),
            Order::Given(given) if given.len() == dataset.len() => {
                dataset.gather_while(indices, lengths, |position, index| tally.count(index, (start + position) as u64))
            }
            _ => dataset.gather(indices, lengths),
        };
        if seen > C::LARGEST {
            return Err(PackError::InputChanged);
        }
        self.tally = tally;
        self.tokens = self.lengths.iter().fold(0u64, |sum, length| sum.saturating_add(length.widen()));
        Ok(())
    }
}

impl<C: Cell> Stream<C> {
    /// Take note of what the end of the stream must know of these samples.
    ///
    /// # Errors
    /// `InputChanged` where there are more tokens by now than the scan found: room was made for those alone.
    pub(super) fn note(&mut self, lengths: &[C::Word], tokens: u64) -> Result<(), PackError> {
        let zero = C::Word::default();
        match lengths.iter().rposition(|&length| length != zero) {
            Some(last) => {
                self.empty_run = lengths.len() - 1 - last;
                self.last_length = lengths[last];
            }
            None => self.empty_run += lengths.len(),
        }
        self.tokens = self.tokens.saturating_add(tokens);
        if self.tokens > self.limit { Err(PackError::InputChanged) } else { Ok(()) }
    }
}

impl<C: Cell> Packer<'_, C> {
    /// Cut a stream on the calling thread; false where the order repeats a sample.
    pub(super) fn cut_serially(
        &mut self,
        dataset: &Dataset<'_>,
        order: Order<'_, C>,
        stream: &mut Stream<C>,
        mut marks: Option<&mut Bits>,
    ) -> Result<bool, PackError> {
        let len = order.len();
        let mut chunk = Chunk::new(CHUNK.min(len));
        let mut tally = Tally::default();
        for (number, start) in (0..len).step_by(CHUNK).enumerate() {
            if number.is_multiple_of(CHUNKS_A_TICK) {
                self.watch.tick("packing", start as u64, len as u64)?;
            }
            chunk.load(dataset, order, start, CHUNK.min(len - start))?;
            tally.join(chunk.tally);
            if let Some(hash) = &mut self.order_hash {
                hash.push(fingerprint::leaf(&chunk.indices));
            }
            if marks.as_deref_mut().is_some_and(|marks| !marks.mark(&chunk.indices)) {
                return Ok(false);
            }
            self.merge_samples(&chunk.indices, &chunk.lengths, chunk.tokens, stream)?;
        }
        Ok(tally.is_even())
    }

    /// Cut samples, in several steps where they close very many packs.
    pub(super) fn merge_samples(
        &mut self,
        indices: &[C::Word],
        lengths: &[C::Word],
        tokens: u64,
        stream: &mut Stream<C>,
    ) -> Result<(), PackError> {
        stream.note(lengths, tokens)?;
        let max_length = self.max_length.widen();
        let closes = |filled: C::Word, tokens: u64| (filled.widen() + tokens) / max_length;
        let closed = closes(stream.cut.filled, tokens);
        if closed <= PACKS_A_CHUNK {
            return self.merge_run(indices, lengths, closed as usize, stream);
        }
        let mut begin = 0usize;
        let mut tokens = 0u64;
        for position in 0..lengths.len() {
            let length = lengths[position].widen();
            if closes(stream.cut.filled, tokens + length) > PACKS_A_CHUNK {
                let run = begin..position;
                let closed = closes(stream.cut.filled, tokens) as usize;
                self.merge_run(&indices[run.clone()], &lengths[run], closed, stream)?;
                begin = position;
                tokens = 0;
                if closes(stream.cut.filled, length) > PACKS_A_CHUNK {
                    self.cut_long_sample(indices[position], lengths[position], stream)?;
                    begin = position + 1;
                    continue;
                }
            }
            tokens += length;
        }
        let closed = closes(stream.cut.filled, tokens) as usize;
        self.merge_run(&indices[begin..], &lengths[begin..], closed, stream)
    }

    fn merge_run(
        &mut self,
        indices: &[C::Word],
        lengths: &[C::Word],
        closed: usize,
        stream: &mut Stream<C>,
    ) -> Result<(), PackError> {
        let mut room = self.sink.room(indices.len() + closed, closed)?;
        let pieces = self.totals.pieces;
        let written = kernel::merge(indices, lengths, self.max_length, &mut stream.cut, pieces, closed, &mut room);
        self.keep(written, stream)
    }

    /// Record what was written into the room asked for last.
    pub(super) fn keep(&mut self, written: Written, stream: &Stream<C>) -> Result<(), PackError> {
        self.sink.keep(written.pieces, written.packs, stream.id)?;
        if written.packs > 0 {
            self.totals.pieces_closed = self.totals.pieces + written.pieces_closed;
        }
        self.totals.pieces += written.pieces;
        self.totals.packs += written.packs;
        self.totals.empty_on_boundary += written.skipped as u64;
        Ok(())
    }

    /// Cut a sample that alone closes very many packs: its head, its whole packs in batches, its rest.
    fn cut_long_sample(&mut self, index: C::Word, length: C::Word, stream: &mut Stream<C>) -> Result<(), PackError> {
        let zero = C::Word::default();
        let mut taken = C::sub(self.max_length, stream.cut.filled);
        // Up to the next boundary the sample is like any other that ends there.
        self.merge_run(&[index], &[taken], 1, stream)?;
        let mut rest = C::sub(length, taken);
        loop {
            let packs = (rest.widen() / self.max_length.widen()).min(PACKS_A_CHUNK) as usize;
            if packs == 0 {
                break;
            }
            self.watch.tick("packing", self.totals.packs as u64, 0)?;
            let mut room = self.sink.room(packs, packs)?;
            kernel::repeat(index, taken, self.max_length, packs, self.totals.pieces, &mut room);
            self.keep(Written { pieces: packs, packs, pieces_closed: packs, skipped: 0 }, stream)?;
            let step = C::Word::truncate(packs as u64 * self.max_length.widen());
            taken = C::add(taken, step);
            rest = C::sub(rest, step);
        }
        if rest != zero {
            let room = self.sink.room(1, 0)?;
            room.indices[0] = C::from_word(index);
            self.keep(Written { pieces: 1, ..Written::default() }, stream)?;
            stream.cut = kernel::Cut { filled: rest, start: taken, longest: rest };
        }
        Ok(())
    }
}

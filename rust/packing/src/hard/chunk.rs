//! Ordered samples in scratch memory, and the serial walk over them.
//!
//! What always holds: each index and each length is read from the caller's arrays once; everything
//! after works on the copy.
#![allow(unsafe_code)]

use super::distinct::Distinct;
use super::kernel::{self, Written};
use super::order::Order;
use super::scan::Dataset;
use super::table::Table;
use super::{Packer, Stream, packs_a_chunk};
use crate::cell::Cell;
use crate::error::PackError;
use crate::fingerprint::{self, LEAF};
use crate::integers::Word;

/// Samples a chunk: one leaf of the fingerprint; indices and lengths lie in the second-level cache together.
const CHUNK: usize = LEAF;

/// A run of ordered samples.
pub(super) struct Chunk<C: Cell> {
    pub(super) indices: Vec<C::Word>,
    pub(super) lengths: Vec<C::Word>,
    /// Tokens of all samples.
    pub(super) tokens: u64,
    /// Whether every index is one of a sample that was not named before, as far as it is known yet. The lengths are
    /// complete only if so. (What a table or powers find, they tell at the end.)
    pub(super) sound: bool,
    /// Hashes of the indices, where the order is hashed.
    pub(super) leaves: Vec<u128>,
}

/// What is done with an order while it is read.
pub(super) struct Checks {
    /// A copy of the lengths to take them from, which tells in the end whether a sample was named twice.
    pub(super) table: Option<Table>,
    /// What finds one that is named twice otherwise.
    pub(super) distinct: Option<Distinct>,
    /// Whether it is hashed.
    pub(super) hashing: bool,
}

impl<C: Cell> Chunk<C> {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            indices: Vec::with_capacity(capacity),
            lengths: Vec::with_capacity(capacity),
            tokens: 0,
            sound: true,
            leaves: Vec::new(),
        }
    }

    /// Copy the samples at positions `start` … `start + count` of the order, leaf by leaf, so that each is marked,
    /// hashed and summed while it lies in the first-level cache. `thread`: whose marks.
    ///
    /// The scan saw every length; one that is longer now was changed since. Refusing it keeps sums from wrapping.
    pub(super) fn load(
        &mut self,
        thread: usize,
        dataset: &Dataset<'_>,
        order: Order<'_, C>,
        checks: &Checks,
        start: usize,
        count: usize,
    ) -> Result<(), PackError> {
        self.indices.resize(count, C::Word::default());
        self.lengths.resize(count, C::Word::default());
        self.leaves.clear();
        (self.tokens, self.sound) = (0, true);
        let leaves = self.indices.chunks_mut(LEAF).zip(self.lengths.chunks_mut(LEAF));
        for (start, (indices, lengths)) in (start..).step_by(LEAF).zip(leaves) {
            if !order.read(start, indices, dataset.len()) {
                self.sound = false;
                return Ok(());
            }
            let (seen, distinct) = match (order, &checks.table, &checks.distinct) {
                (Order::Natural(_), ..) => (dataset.read(start, lengths), true),
                (_, Some(table), _) => (table.take(indices, lengths), true),
                (_, None, Some(distinct)) => distinct.gather(thread, dataset, indices, lengths),
                (_, None, None) => (dataset.gather(indices, lengths), true),
            };
            if seen > C::LARGEST {
                return Err(PackError::InputChanged);
            }
            if checks.hashing {
                self.leaves.push(fingerprint::leaf(indices));
            }
            self.sound &= distinct;
            self.tokens = self.tokens.saturating_add(C::sum(lengths));
        }
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
    /// Cut a stream on the calling thread; false, and stopped early, where the order is not one.
    pub(super) fn cut_serially(
        &mut self,
        dataset: &Dataset<'_>,
        order: Order<'_, C>,
        stream: &mut Stream<C>,
        checks: &Checks,
    ) -> Result<bool, PackError> {
        let len = order.len();
        let mut chunk = Chunk::new(CHUNK.min(len));
        for start in (0..len).step_by(CHUNK) {
            self.lookout.reach(start, len);
            chunk.load(0, dataset, order, checks, start, CHUNK.min(len - start))?;
            if !chunk.sound {
                return Ok(false);
            }
            if let Some(hash) = &mut self.order_hash {
                chunk.leaves.iter().for_each(|&leaf| hash.push(leaf));
            }
            self.merge_samples(&chunk.indices, &chunk.lengths, chunk.tokens, stream)?;
        }
        Ok(true)
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
        if closed <= packs_a_chunk::<C>() {
            return self.merge_run(indices, lengths, closed as usize, stream);
        }
        let mut begin = 0usize;
        let mut tokens = 0u64;
        for position in 0..lengths.len() {
            let length = lengths[position].widen();
            if closes(stream.cut.filled, tokens + length) > packs_a_chunk::<C>() {
                let run = begin..position;
                let closed = closes(stream.cut.filled, tokens) as usize;
                self.merge_run(&indices[run.clone()], &lengths[run], closed, stream)?;
                begin = position;
                tokens = 0;
                if closes(stream.cut.filled, length) > packs_a_chunk::<C>() {
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
        self.lookout.look_after(indices.len() + closed)?;
        let mut room = self.sink.room(indices.len() + closed, closed, &mut self.lookout)?;
        let pieces = self.totals.pieces;
        let written = kernel::merge(indices, lengths, self.max_length, &mut stream.cut, pieces, closed, &mut room);
        // SAFETY: the merge has just written them.
        unsafe { self.keep(written, stream) }
    }

    /// Record what was written into the room asked for last.
    ///
    /// # Safety
    /// So many entries were asked for and written, from the beginning of each column of the room on.
    pub(super) unsafe fn keep(&mut self, written: Written, stream: &Stream<C>) -> Result<(), PackError> {
        // SAFETY: the caller's promise.
        unsafe { self.sink.keep(written.pieces, written.packs, stream.id)? };
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
            let packs = (rest.widen() / self.max_length.widen()).min(packs_a_chunk::<C>()) as usize;
            if packs == 0 {
                break;
            }
            self.lookout.look_after(packs)?;
            let mut room = self.sink.room(packs, packs, &mut self.lookout)?;
            let written = kernel::repeat(index, taken, self.max_length, packs, self.totals.pieces, &mut room);
            // SAFETY: just written.
            unsafe { self.keep(written, stream)? };
            let step = C::Word::truncate(packs as u64 * self.max_length.widen());
            taken = C::add(taken, step);
            rest = C::sub(rest, step);
        }
        if rest != zero {
            let room = self.sink.room(1, 0, &mut self.lookout)?;
            room.indices[0].write(C::from_word(index));
            // SAFETY: just written.
            unsafe { self.keep(Written { pieces: 1, ..Written::default() }, stream)? };
            stream.cut = kernel::Cut { filled: rest, start: taken, longest: rest };
        }
        Ok(())
    }
}

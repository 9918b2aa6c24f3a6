//! Cutting one stream on the calling thread, and what is known of a stream while it is cut.
//!
//! While one chunk is cut the next one is gathered, a run at a time: the memory brings what the next run needs beside
//! the arithmetic of this one.
#![allow(unsafe_code)]

use super::ahead::{Ahead, Ask};
use super::chunk::{Chunk, Source};
use super::kernel::{self, Cut, Samples, Written};
use super::{Packer, packs_a_chunk};
use crate::cell::Cell;
use crate::error::PackError;
use crate::fingerprint::LEAF;
use crate::integers::Word;

/// Samples a chunk: one leaf of the fingerprint; indices and lengths lie in the second-level cache together.
const CHUNK: usize = LEAF;

/// The state of one stream of tokens.
pub(super) struct Stream<C: Cell> {
    pub(super) cut: Cut<C::Word>,
    pub(super) tokens: u64,
    /// Tokens that the scan found; more of them than that were changed since.
    pub(super) limit: u64,
    /// Empty samples since the last one that was not.
    pub(super) empty_run: usize,
    /// Tokens of that one.
    pub(super) last_length: C::Word,
    pub(super) id: usize,
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
        source: &Source<'_, C, impl Ask>,
        stream: &mut Stream<C>,
    ) -> Result<bool, PackError> {
        let (len, step) = (source.order.len(), source.run());
        let mut chunk = Chunk::new(CHUNK.min(len));
        let mut next = Chunk::new(CHUNK.min(len));
        next.load(0, source, 0, CHUNK.min(len))?;
        for start in (0..len).step_by(CHUNK) {
            self.lookout.reach(start, len);
            core::mem::swap(&mut chunk, &mut next);
            if !chunk.sound {
                return Ok(false);
            }
            if let Some(hash) = &mut self.order_hash {
                chunk.leaves.iter().for_each(|&leaf| hash.push(leaf));
            }
            let behind = start + chunk.indices.len();
            // No longer than this one, so that every run of it is gathered beside one of this.
            let count = CHUNK.min(len - behind);
            next.read(source, behind, count);
            let runs = chunk.indices.chunks(step).zip(chunk.lengths.chunks(step));
            for (begin, (indices, lengths)) in (0..).step_by(step).zip(runs) {
                let tokens = C::sum(lengths);
                let run = begin.min(count)..(begin + step).min(count);
                let ahead = next.still_to_ask(0, source, run.clone());
                self.merge_samples(indices, lengths, tokens, stream, ahead)?;
                next.gather(0, source, run, source.is_asking())?;
            }
        }
        Ok(true)
    }

    /// Cut samples, in several steps where they close very many packs. `ahead`: whose lengths are gathered next.
    pub(super) fn merge_samples(
        &mut self,
        indices: &[C::Word],
        lengths: &[C::Word],
        tokens: u64,
        stream: &mut Stream<C>,
        ahead: Ahead<'_, C::Word, impl Ask>,
    ) -> Result<(), PackError> {
        stream.note(lengths, tokens)?;
        let max_length = self.max_length.widen();
        let closes = |filled: C::Word, tokens: u64| (filled.widen() + tokens) / max_length;
        let closed = closes(stream.cut.filled, tokens);
        if closed <= packs_a_chunk::<C>() {
            return self.merge_run(indices, lengths, closed as usize, stream, ahead);
        }
        let mut begin = 0usize;
        let mut tokens = 0u64;
        for position in 0..lengths.len() {
            let length = lengths[position].widen();
            if closes(stream.cut.filled, tokens + length) > packs_a_chunk::<C>() {
                let run = begin..position;
                let closed = closes(stream.cut.filled, tokens) as usize;
                self.merge_run(&indices[run.clone()], &lengths[run], closed, stream, Ahead::nothing())?;
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
        self.merge_run(&indices[begin..], &lengths[begin..], closed, stream, Ahead::nothing())
    }

    fn merge_run(
        &mut self,
        indices: &[C::Word],
        lengths: &[C::Word],
        closed: usize,
        stream: &mut Stream<C>,
        ahead: Ahead<'_, C::Word, impl Ask>,
    ) -> Result<(), PackError> {
        self.lookout.look_after(indices.len() + closed)?;
        let mut room = self.sink.room(indices.len() + closed, closed, &mut self.lookout)?;
        let pieces = self.totals.pieces;
        let (cut, samples) = (&mut stream.cut, Samples { indices, lengths });
        let written = kernel::merge(samples, self.max_length, cut, pieces, closed, &mut room, ahead);
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
        self.merge_run(&[index], &[taken], 1, stream, Ahead::nothing())?;
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
            stream.cut = Cut { filled: rest, start: taken, longest: rest };
        }
        Ok(())
    }
}

//! The linear merge that cuts a run of samples into packs of `max_length` tokens.
//!
//! It owns no memory: it reads the samples of one chunk and writes into slices that its caller made
//! large enough. What always holds: `Cut` alone decides what the next sample does, so chunks merge by
//! handing on their `Cut`; and nothing is written beyond the slices, whatever the samples.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use super::ahead::{Ahead, Ask, Nothing};
use crate::cell::Cell;
use crate::integers::Word;
use crate::sink::Room;

/// Where the cutting stands between two samples.
///
/// `filled` tokens are in the open pack; they are fewer than `max_length`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cut<W> {
    /// Tokens in the open pack.
    pub filled: W,
    /// First token that the open pack takes from its first sample.
    pub start: W,
    /// Longest piece of the open pack so far.
    pub longest: W,
}

/// Ordered samples: as many indices as lengths.
#[derive(Clone, Copy)]
pub(crate) struct Samples<'a, W> {
    pub indices: &'a [W],
    pub lengths: &'a [W],
}

/// What the merge of one chunk wrote: as many entries of each column, from the beginning of its slice on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Written {
    pub pieces: usize,
    pub packs: usize,
    /// Pieces up to the end of the last pack closed here; 0 where none was.
    pub pieces_closed: usize,
    /// Empty samples on a boundary, left out.
    pub skipped: usize,
}

impl Written {
    /// What two merges wrote, `next` behind this one.
    pub(crate) fn then(self, next: Self) -> Self {
        Self {
            pieces: self.pieces + next.pieces,
            packs: self.packs + next.packs,
            pieces_closed: if next.packs > 0 { self.pieces + next.pieces_closed } else { self.pieces_closed },
            skipped: self.skipped + next.skipped,
        }
    }
}

/// Cut samples, going on from `cut`.
///
/// `pieces_before` pieces of the plan precede this chunk's; `packs_expected` only chooses the quicker way. Beside
/// those that are cut quickly the samples at the same positions in `ahead` are asked for, if there are as many.
///
/// # Panics
/// When the room is too small for what the samples make.
pub(crate) fn merge<C: Cell>(
    Samples { indices, lengths }: Samples<'_, C::Word>,
    max_length: C::Word,
    cut: &mut Cut<C::Word>,
    pieces_before: usize,
    packs_expected: usize,
    room: &mut Room<'_, C>,
    ahead: Ahead<'_, C::Word, impl Ask>,
) -> Written {
    let packs_room = room.indices_cu_len.len();
    let mut output = Output {
        indices: &mut *room.indices,
        cumulative: &mut *room.indices_cu_len,
        starts: &mut room.start_offset[..packs_room],
        ends: &mut room.end_offset[..packs_room],
        longests: &mut room.longest[..packs_room],
        pieces_before,
        written: Written::default(),
    };
    let samples = Samples { indices, lengths };
    // A boundary every few samples cannot be predicted; one every twelve or more mostly can.
    let rare = packs_expected.saturating_mul(12) < indices.len();
    match ahead.indices.get(..indices.len()) {
        Some(coming) => output.cut_all(samples, max_length, cut, rare, Ahead { indices: coming, ..ahead }),
        None => output.cut_all(samples, max_length, cut, rare, Ahead { ask: Nothing, indices }),
    }
    output.written.pieces_closed = match output.written.packs {
        0 => 0,
        // SAFETY: the entries of packs that are counted were written.
        packs => C::difference(unsafe { output.cumulative[packs - 1].assume_init() }, pieces_before),
    };
    output.written
}

/// The slices that one chunk is written to, and how far they are.
struct Output<'a, C> {
    indices: &'a mut [MaybeUninit<C>],
    cumulative: &'a mut [MaybeUninit<C>],
    starts: &'a mut [MaybeUninit<C>],
    ends: &'a mut [MaybeUninit<C>],
    longests: &'a mut [MaybeUninit<C>],
    pieces_before: usize,
    written: Written,
}

impl<C: Cell> Output<'_, C> {
    /// Cut all samples, and beside those that are cut quickly ask for those at the same positions in `ahead`, of as many.
    /// `rare`: whether boundaries are.
    #[inline]
    fn cut_all(
        &mut self,
        Samples { indices, lengths }: Samples<'_, C::Word>,
        max_length: C::Word,
        cut: &mut Cut<C::Word>,
        rare: bool,
        ahead: Ahead<'_, C::Word, impl Ask>,
    ) {
        let mut position = 0usize;
        while position < indices.len() {
            let sure = if rare { self.indices.len() - self.written.pieces } else { self.sure() };
            let sure = sure.min(indices.len() - position);
            if sure > 0 {
                let (indices, lengths) = (&indices[position..][..sure], &lengths[position..][..sure]);
                let ahead = Ahead { indices: &ahead.indices[position..][..sure], ..ahead };
                position += if rare {
                    self.until_boundary(indices, lengths, max_length, cut, ahead)
                } else {
                    self.fast(indices, lengths, max_length, cut, ahead)
                };
            }
            if position < indices.len() {
                self.careful(indices[position], lengths[position], max_length, cut);
                position += 1;
            }
        }
    }

    /// Samples for which `fast` surely has room: each writes two pieces and touches two packs.
    fn sure(&self) -> usize {
        let pieces = self.indices.len().saturating_sub(self.written.pieces) / 2;
        let packs = self.cumulative.len().saturating_sub(self.written.packs + 1);
        pieces.min(packs)
    }

    /// Cut samples of which each crosses at most one boundary and none ends on one; stops before the first other.
    ///
    /// Whether a sample crosses a boundary is a coin toss that the processor cannot predict. So both
    /// outcomes are written: the sample twice, the open pack as if it ended here, and the
    /// counters decide what the next sample overwrites.
    #[inline]
    fn fast(
        &mut self,
        indices: &[C::Word],
        lengths: &[C::Word],
        max_length: C::Word,
        cut: &mut Cut<C::Word>,
        ahead: Ahead<'_, C::Word, impl Ask>,
    ) -> usize {
        let one = C::word_of(1);
        let last = C::sub(max_length, one);
        assert!(
            indices.len() == lengths.len() && ahead.indices.len() == lengths.len() && indices.len() <= self.sure(),
            "room for every sample"
        );
        let first_pack = self.written.packs;
        let (mut pieces, mut packs) = (self.written.pieces, first_pack);
        let Cut { mut filled, mut longest, .. } = *cut;
        let (out, cumulative) = (self.indices.as_mut_ptr(), self.cumulative.as_mut_ptr());
        let (ends, longests) = (self.ends.as_mut_ptr(), self.longests.as_mut_ptr());
        let mut count = C::word_of(self.pieces_before + pieces + 1);
        let mut done = indices.len();
        for (offset, ((&index, &length), &coming)) in indices.iter().zip(lengths).zip(ahead.indices).enumerate() {
            ahead.ask.ask(coming.widen());
            let sum = C::add(filled, length);
            let taken = C::sub(max_length, filled);
            let stays = sum < max_length;
            let rest = if stays { sum } else { C::sub(sum, max_length) };
            // One test for both exceptions: nothing left over, or more than a whole pack.
            if C::sub(rest, one) >= last {
                done = offset;
                break;
            }
            let longest_here = longest.max(if stays { length } else { taken });
            // SAFETY: `sure` held for as many samples as there are, and each raises `pieces` by at most two and
            // `packs` by at most one; so pieces + 1 and packs stay within the slices.
            unsafe {
                (*out.add(pieces)).write(C::from_word(index));
                (*out.add(pieces + 1)).write(C::from_word(index));
                (*cumulative.add(packs)).write(C::from_word(count));
                (*ends.add(packs)).write(C::from_word(taken));
                (*longests.add(packs)).write(C::from_word(longest_here));
            }
            let crosses = usize::from(!stays);
            pieces += 1 + crosses;
            packs += crosses;
            count = C::add(count, C::add(one, C::word_of(crosses)));
            longest = if stays { longest_here } else { rest };
            filled = rest;
        }
        // None of these packs ended with its sample, so each next one starts where it ended.
        let mut start = cut.start;
        for pack in first_pack..packs {
            self.starts[pack].write(C::from_word(start));
            // SAFETY: written by the loop above, as those of every pack counted since `first_pack`.
            start = C::to_word(unsafe { self.ends[pack].assume_init() });
        }
        *cut = Cut { filled, start, longest };
        (self.written.pieces, self.written.packs) = (pieces, packs);
        done
    }

    /// Take samples into the open pack; stops before the first that fills it or is empty on a boundary.
    #[inline]
    fn until_boundary(
        &mut self,
        indices: &[C::Word],
        lengths: &[C::Word],
        max_length: C::Word,
        cut: &mut Cut<C::Word>,
        ahead: Ahead<'_, C::Word, impl Ask>,
    ) -> usize {
        let zero = C::Word::default();
        let room = &mut self.indices[self.written.pieces..][..indices.len()];
        let Cut { mut filled, mut longest, .. } = *cut;
        let mut done = 0usize;
        for (((&index, &length), &coming), slot) in indices.iter().zip(lengths).zip(ahead.indices).zip(room) {
            ahead.ask.ask(coming.widen());
            let sum = C::add(filled, length);
            if sum >= max_length || sum == zero {
                break;
            }
            slot.write(C::from_word(index));
            longest = longest.max(length);
            filled = sum;
            done += 1;
        }
        (cut.filled, cut.longest) = (filled, longest);
        self.written.pieces += done;
        done
    }

    /// Cut any one sample.
    #[inline(never)]
    fn careful(&mut self, index: C::Word, length: C::Word, max_length: C::Word, cut: &mut Cut<C::Word>) {
        let zero = C::Word::default();
        let sum = C::add(cut.filled, length);
        if sum == zero {
            // An empty sample on the boundary belongs to neither pack.
            self.written.skipped += 1;
            return;
        }
        if sum < max_length {
            self.piece(index);
            cut.longest = cut.longest.max(length);
            cut.filled = sum;
            return;
        }
        let mut taken = C::sub(max_length, cut.filled);
        let mut rest = C::sub(length, taken);
        cut.longest = cut.longest.max(taken);
        loop {
            self.piece(index);
            let pack = self.written.packs;
            self.starts[pack].write(C::from_word(cut.start));
            self.ends[pack].write(C::from_word(taken));
            self.longests[pack].write(C::from_word(cut.longest));
            self.cumulative[pack].write(C::from_word(C::word_of(self.pieces_before + self.written.pieces)));
            self.written.packs += 1;
            cut.start = taken;
            cut.longest = max_length;
            if rest < max_length {
                break;
            }
            taken = C::add(taken, max_length);
            rest = C::sub(rest, max_length);
        }
        if rest == zero {
            cut.start = zero;
        } else {
            self.piece(index);
        }
        cut.longest = rest;
        cut.filled = rest;
    }

    fn piece(&mut self, index: C::Word) {
        self.indices[self.written.pieces].write(C::from_word(index));
        self.written.pieces += 1;
    }
}

/// The packs that lie wholly inside one long sample, written a batch at a time.
///
/// `offset` tokens of the sample are taken already and the open pack is empty; `packs` more are cut.
pub(crate) fn repeat<C: Cell>(
    index: C::Word,
    offset: C::Word,
    max_length: C::Word,
    packs: usize,
    pieces_before: usize,
    room: &mut Room<'_, C>,
) -> Written {
    let mut taken = offset;
    for pack in 0..packs {
        room.indices[pack].write(C::from_word(index));
        room.start_offset[pack].write(C::from_word(taken));
        taken = C::add(taken, max_length);
        room.end_offset[pack].write(C::from_word(taken));
        room.longest[pack].write(C::from_word(max_length));
        room.indices_cu_len[pack].write(C::from_word(C::word_of(pieces_before + pack + 1)));
    }
    Written { pieces: packs, packs, pieces_closed: packs, skipped: 0 }
}

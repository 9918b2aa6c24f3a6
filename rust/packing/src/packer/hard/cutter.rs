//! Cuts a chunk of samples into packs of `max_length` tokens.
//!
//! Invariants: `OpenPack` alone decides what the next sample does, so that a chunk can be cut apart from the chunks
//! before it once the tokens in the open pack are known. Nothing is written beyond the columns of `CutPacks`, whatever
//! the samples are.
#![allow(unsafe_code)]

use crate::packer::{CHUNK, PackColumns, Samples};
use crate::plan::PlanInteger;

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
    /// Empty samples on a boundary, which belong to no pack.
    pub(super) empty_on_boundary: u64,
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
            empty_on_boundary: 0,
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
        (self.pieces, self.packs, self.empty_on_boundary) = (0, 1, 0);
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
        (output.pieces, output.packs, output.empty_on_boundary) = (0, 0, 0);
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
            out.empty_on_boundary += 1;
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

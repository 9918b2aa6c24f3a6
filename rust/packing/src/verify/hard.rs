//! Verifies hard plans: walks over the packs, and checks that every piece is the next of the ordered samples or goes on
//! where the pack before stopped, and that every pack is full.

use super::{StreamWalk, Walked, check_totals, ordered, wrong_pack};
use crate::error::PackError;
use crate::folder::METADATA_FILE;
use crate::inputs::{Integers, OrderedSamples, SampleLengths, WINDOW};
use crate::plan::{Field, HardMetadata, PlanMetadata, PlanView};
use crate::progress::Progress;

/// A sample that a pack takes from, or that the next one goes on with.
#[derive(Clone, Copy)]
struct OpenSample {
    sample: u64,
    length: u64,
    /// First token that no pack has taken yet.
    at: u64,
}

/// How far the check is.
pub(super) struct PlanWalk<'a> {
    plan: &'a PlanView<'a>,
    metadata: &'a PlanMetadata,
    hard: &'a HardMetadata,
    /// Streams that were checked.
    streams: usize,
    walked: Walked<'a>,
    /// The first piece, and pieces and tokens that were left out before.
    first_piece: u64,
    left_out_before: (u64, u64),
    tokens: u64,
    packed: u64,
    empty_on_boundary: u64,
}

/// The tokens behind the packs of a stream.
#[derive(Default)]
struct Tail {
    tokens: u64,
    /// Pieces that the packs would have that the tail has room for.
    pieces: u64,
}

impl<'a> StreamWalk<'a> for PlanWalk<'a> {
    fn needs_drawn_order(&self) -> bool {
        true
    }

    fn stream(
        &mut self,
        stream: &SampleLengths<'_>,
        order: Option<Integers<'_>>,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        let (id, mut samples) = (stream.dataset_id(), ordered(stream, order));
        let first_pack = self.walked.pack;
        let tail_start = self.hard.tail_start.get(self.streams).copied().unwrap_or_default();
        self.streams += 1;
        let ids = self.plan.column(Field::DatasetId);
        let mut open = None;
        let mut packed = 0u64;
        let mut short = None;
        while self.walked.pack < self.plan.packs() && ids.get(self.walked.pack) == id as u64 {
            if short.is_some() {
                return self.wrong("follows a shorter one; only the last pack of a dataset may be short");
            }
            let tokens = self.one_pack(&mut samples, &mut open, progress)?;
            if tokens != self.metadata.max_length {
                if self.hard.drop_last || tokens > self.metadata.max_length {
                    return self.wrong(format!("holds {tokens} tokens instead of {}", self.metadata.max_length));
                }
                short = Some(self.plan.column(Field::StartOffset).get(self.walked.pack));
            }
            packed = packed.saturating_add(tokens);
            self.walked.pack += 1;
        }
        let start = short.or(open.map(|open| open.at)).unwrap_or_default();
        let tail = self.tail(samples, open, short.is_none(), progress)?;
        let left = tail.tokens;
        let tokens = packed.saturating_add(left);
        let wrong = |reason: String| Err(PackError::Mismatch(format!("dataset {id}: {reason}")));
        let max_length = self.metadata.max_length;
        let is_all_packed = if self.hard.drop_last { left < max_length } else { left == 0 };
        if let Some(left_out) = &mut self.walked.left_out {
            let (kept, more) = ((self.walked.pack - first_pack) as u64, left / max_length);
            left_out.begin_stream();
            left_out.note(true, kept, max_length, kept.saturating_sub(1));
            left_out.note(false, more, max_length, kept);
            left_out.pieces = left_out.pieces.saturating_add(tail.pieces);
            left_out.tokens = left_out.tokens.saturating_add(more * max_length);
        } else if !is_all_packed {
            return wrong(format!(
                "{packed} of {tokens} tokens are packed, {left} left out, with packs of {max_length}"
            ));
        }
        if tail_start != start {
            return wrong(format!(
                "the tail starts at token {start} of its sample, but {METADATA_FILE} says at {tail_start}"
            ));
        }
        self.tokens = self.tokens.saturating_add(tokens);
        self.packed = self.packed.saturating_add(packed);
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<Walked<'a>, PackError> {
        let this = *self;
        let PlanMetadata { tokens, tokens_packed, pieces, .. } = *this.metadata;
        let (left_out, before) = (this.walked.left_out_so_far(), this.left_out_before);
        check_totals(&[
            ("tokens", this.tokens, tokens),
            ("tokens_packed", this.packed.saturating_add(left_out.1 - before.1), tokens_packed),
            ("pieces", this.walked.piece - this.first_piece + left_out.0 - before.0, pieces),
            ("empty_on_boundary", this.empty_on_boundary, this.hard.empty_on_boundary),
        ])?;
        Ok(this.walked)
    }
}

impl<'a> PlanWalk<'a> {
    pub(super) fn new(
        plan: &'a PlanView<'a>,
        metadata: &'a PlanMetadata,
        hard: &'a HardMetadata,
        walked: Walked<'a>,
    ) -> Self {
        Self {
            plan,
            metadata,
            hard,
            streams: 0,
            first_piece: walked.piece,
            left_out_before: walked.left_out_so_far(),
            walked,
            tokens: 0,
            packed: 0,
            empty_on_boundary: 0,
        }
    }

    fn wrong<T>(&self, reason: impl core::fmt::Display) -> Result<T, PackError> {
        wrong_pack(self.walked.pack, reason)
    }

    /// What lies behind the packs of a stream, which end on a boundary unless the last one is short.
    fn tail(
        &mut self,
        mut samples: OrderedSamples<'_>,
        open: Option<OpenSample>,
        on_boundary: bool,
        progress: &mut dyn Progress,
    ) -> Result<Tail, PackError> {
        let max_length = self.metadata.max_length;
        let mut tail = Tail::default();
        let mut pieces = 0u64;
        let mut next = open.map(|open| open.length - open.at);
        loop {
            let length = match next.take() {
                Some(length) => length,
                None => match samples.next(progress)? {
                    Some((_, length)) => length,
                    None => return Ok(tail),
                },
            };
            if length == 0 {
                let is_between = tail.tokens.is_multiple_of(max_length);
                self.empty_on_boundary += u64::from(on_boundary && is_between);
                pieces += u64::from(!is_between);
                continue;
            }
            let end = tail.tokens.saturating_add(length);
            let (first, last, full) = (tail.tokens / max_length, (end - 1) / max_length, end / max_length);
            if full > first {
                // The sample is a piece of each pack up to the last that it fills.
                tail.pieces = pieces + (full - first);
            }
            pieces += last - first + 1;
            tail.tokens = end;
        }
    }

    /// Check one pack; its tokens.
    fn one_pack(
        &mut self,
        samples: &mut OrderedSamples<'_>,
        open: &mut Option<OpenSample>,
        progress: &mut dyn Progress,
    ) -> Result<u64, PackError> {
        let indices = self.plan.column(Field::Indices);
        let [end_piece, start, end, recorded] =
            [Field::IndicesCuLen, Field::StartOffset, Field::EndOffset, Field::Longest]
                .map(|field| self.plan.column(field).get(self.walked.pack));
        if end_piece <= self.walked.piece || end_piece > indices.len() as u64 {
            return self.wrong(format!("indices_cu_len goes from {} to {end_piece}", self.walked.piece));
        }
        let first = self.walked.piece;
        let (mut tokens, mut longest) = (0u64, 0u64);
        for piece in first..end_piece {
            if piece.is_multiple_of(WINDOW as u64) {
                progress.tick("verifying", piece, indices.len() as u64)?;
            }
            let sample = indices.get(piece as usize);
            let Some(expected) = self.expected(samples, open.take(), piece == first, progress)? else {
                return self.wrong(format!("uses sample {sample} after the end of the order"));
            };
            if sample != expected.sample {
                return self.wrong(format!("uses sample {sample} where the order has sample {}", expected.sample));
            }
            let begins = if piece == first { start } else { 0 };
            if begins != expected.at {
                return self.wrong(format!(
                    "takes sample {sample} from token {begins} on, but it comes to it at token {}",
                    expected.at
                ));
            }
            let last = piece + 1 == end_piece;
            let stops = if last { end } else { expected.length };
            // An empty sample may lie inside a pack, never at its end.
            if stops > expected.length || (last && stops <= begins) {
                return self.wrong(format!(
                    "takes tokens {begins} to {stops} of sample {sample}, which has {}",
                    expected.length
                ));
            }
            if self.plan.has_piece_ranges() {
                let [from, to] =
                    [Field::PieceStart, Field::PieceStop].map(|field| self.plan.column(field).get(piece as usize));
                if [from, to] != [begins, stops] {
                    return self.wrong(format!(
                        "takes tokens {begins} to {stops} of sample {sample}, but its piece says {from} to {to}"
                    ));
                }
            }
            tokens = tokens.saturating_add(stops - begins);
            longest = longest.max(stops - begins);
            *open = (stops < expected.length).then_some(OpenSample { at: stops, ..expected });
        }
        if recorded != longest {
            return self.wrong(format!("its longest piece has {longest} tokens, not {recorded}"));
        }
        self.walked.piece = end_piece;
        Ok(tokens)
    }

    /// What the next piece must be of: the rest of the open sample, or the next one of the order.
    fn expected(
        &mut self,
        samples: &mut OrderedSamples<'_>,
        open: Option<OpenSample>,
        on_boundary: bool,
        progress: &mut dyn Progress,
    ) -> Result<Option<OpenSample>, PackError> {
        if open.is_some() {
            return Ok(open);
        }
        while let Some((sample, length)) = samples.next(progress)? {
            if !(on_boundary && length == 0) {
                return Ok(Some(OpenSample { sample, length, at: 0 }));
            }
            // An empty sample on a boundary belongs to no pack.
            self.empty_on_boundary += 1;
        }
        Ok(None)
    }
}

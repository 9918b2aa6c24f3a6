//! Verifies plans of whole samples: every sample is in a pack exactly once, or counted as left out, and no pack exceeds
//! its limits. Packs of the modes that keep the order, and all packs with costs, are made again and compared; of `best_fit`
//! without costs, their number and the room that is left in them is.

use std::collections::{BTreeMap, BTreeSet};

use super::cost_fit::{BestFitOrder, CostlySample, cost_fit_packs};
use super::dropped_packs::DroppedPacks;
use super::reference_placement::{OpenPacks, PacksByRoom, PlacedPack, best_fit_packs};
use super::{StreamWalk, Walked, check_totals, ordered, wrong_pack};
use crate::error::PackError;
use crate::inputs::{Integers, SampleLengths, WINDOW};
use crate::memory;
use crate::plan::{Field, PlanMetadata, PlanView, WholeMetadata};
use crate::progress::Progress;
use crate::request::{Overlong, WholeOptions};

/// Pieces that were found in packs.
struct FoundPieces {
    /// One bit a sample.
    samples: Vec<u64>,
    /// Sample and first token of the pieces of samples that are split.
    parts: BTreeSet<(u64, u64)>,
    pieces: u64,
}

/// How far the check is.
pub(super) struct PlanWalk<'a> {
    plan: &'a PlanView<'a>,
    metadata: &'a PlanMetadata,
    options: WholeOptions,
    pack: usize,
    piece: usize,
    /// The first piece, and pieces that were left out before.
    first_piece: usize,
    left_out_before: u64,
    tokens: u64,
    counted: WholeMetadata,
    /// Packs of the stream.
    packs_by_room: PacksByRoom,
    /// The costs of each stream.
    costs: Option<&'a [SampleLengths<'a>]>,
    best_fit_order: BestFitOrder,
    left_out: Option<DroppedPacks<'a>>,
}

/// The packs of a stream as they are made again.
#[derive(Default)]
struct Replay {
    /// The next pack of the plan to compare.
    next: usize,
    /// Packs that were made.
    packs: u64,
}

impl FoundPieces {
    fn new(samples: usize) -> Result<Self, PackError> {
        Ok(Self { samples: memory::zeroed(samples.div_ceil(64))?, parts: BTreeSet::new(), pieces: 0 })
    }

    /// Note a piece; false if it was found before.
    fn insert(&mut self, sample: u64, start: u64, is_part: bool) -> bool {
        self.pieces += 1;
        if is_part {
            return self.parts.insert((sample, start));
        }
        let (word, bit) = (&mut self.samples[(sample / 64) as usize], 1u64 << (sample % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    fn contains(&self, sample: u64, start: u64, is_part: bool) -> bool {
        if is_part {
            return self.parts.contains(&(sample, start));
        }
        self.samples[(sample / 64) as usize] >> (sample % 64) & 1 == 1
    }
}

impl<'a> PlanWalk<'a> {
    /// `metadata` is that of the plan with the packs that it leaves out.
    pub(super) fn new(
        plan: &'a PlanView<'a>,
        metadata: &'a PlanMetadata,
        options: WholeOptions,
        costs: Option<&'a [SampleLengths<'a>]>,
        walked: Walked<'a>,
    ) -> Self {
        let left_out_before = walked.left_out_so_far().0;
        let Walked { pack, piece, left_out } = walked;
        Self {
            plan,
            metadata,
            options,
            pack,
            piece: piece as usize,
            first_piece: piece as usize,
            left_out_before,
            tokens: 0,
            counted: WholeMetadata::new(&options, None),
            packs_by_room: PacksByRoom::new(),
            costs,
            best_fit_order: BestFitOrder::new(metadata.seed),
            left_out,
        }
    }

    /// What the samples of a pack cost together at most; 0 where they have no costs.
    fn max_cost(&self) -> u64 {
        self.metadata.whole.as_ref().and_then(|whole| whole.max_cost).unwrap_or(0)
    }

    /// The cost of a sample; 0 where they have none.
    fn cost_of(&self, stream: &SampleLengths<'_>, sample: u64) -> u64 {
        self.costs.map_or(0, |costs| costs[stream.dataset_id()].get(sample as usize))
    }

    /// Whether a sample of `length` tokens is packed in parts.
    fn is_split(&self, length: u64) -> bool {
        length > self.metadata.max_length && self.options.overlong == Overlong::Split
    }

    /// Start and stop of piece `piece`, of a sample of `length` tokens.
    fn range(&self, piece: usize, length: u64) -> [u64; 2] {
        if self.plan.has_piece_ranges() {
            [Field::PieceStart, Field::PieceStop].map(|field| self.plan.column(field).get(piece))
        } else {
            [0, length]
        }
    }

    /// Why no piece may have this range, if so.
    fn refused_range(&self, length: u64, [start, stop]: [u64; 2]) -> Option<String> {
        let max_length = self.metadata.max_length;
        let expected = match self.options.overlong {
            _ if length == 0 => return Some("has no tokens".into()),
            _ if length <= max_length => [0, length],
            Overlong::Error | Overlong::Drop => return Some("is longer than a pack".into()),
            Overlong::Truncate => [0, max_length],
            Overlong::Split if start.is_multiple_of(max_length) && start < length => {
                [start, length.min(start.saturating_add(max_length))]
            }
            Overlong::Split => return Some(format!("is cut every {max_length} tokens, not at {start}")),
        };
        let [from, to] = expected;
        (expected != [start, stop]).then(|| format!("is taken from {start} to {stop} instead of {from} to {to}"))
    }

    /// Count a sample of the order; its tokens that are packed.
    fn count_sample(&mut self, stream: &SampleLengths<'_>, sample: u64, length: u64) -> Result<u64, PackError> {
        let max_length = self.metadata.max_length;
        self.tokens = self.tokens.saturating_add(length);
        let is_overlong = length > max_length;
        self.counted.samples_empty += u64::from(length == 0);
        self.counted.samples_overlong += u64::from(is_overlong);
        let packed = match self.options.overlong {
            _ if !is_overlong => length,
            Overlong::Error => {
                return Err(PackError::Mismatch(format!(
                    "dataset {}: sample {sample} has {length} tokens, but the plan was made of samples of at most \
                     {max_length}",
                    stream.dataset_id()
                )));
            }
            Overlong::Split => length,
            Overlong::Truncate => max_length,
            Overlong::Drop => 0,
        };
        self.counted.tokens_overlong_cut = self.counted.tokens_overlong_cut.saturating_add(length - packed);
        self.counted.samples_packed += u64::from(packed > 0);
        Ok(packed)
    }

    /// Check one pack by itself.
    fn one_pack(
        &mut self,
        stream: &SampleLengths<'_>,
        found: &mut FoundPieces,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        let pack = self.pack;
        let indices = self.plan.column(Field::Indices);
        let [stop_piece, first_start, last_stop, recorded] =
            [Field::IndicesCuLen, Field::StartOffset, Field::EndOffset, Field::Longest]
                .map(|field| self.plan.column(field).get(pack));
        let begin = self.piece as u64;
        if stop_piece <= begin || stop_piece > indices.len() as u64 {
            return wrong_pack(pack, format!("indices_cu_len goes from {begin} to {stop_piece}"));
        }
        let count = stop_piece - begin;
        if count > self.options.most_pieces() {
            return wrong_pack(pack, format!("has {count} pieces; max_samples is {}", self.options.most_pieces()));
        }
        let (mut taken, mut longest) = (0u64, 0u64);
        for piece in self.piece..stop_piece as usize {
            if piece.is_multiple_of(WINDOW) {
                progress.tick("verifying", piece as u64, indices.len() as u64)?;
            }
            let sample = indices.get(piece);
            if sample >= stream.len() as u64 {
                return wrong_pack(pack, format!("uses sample {sample} of {}", stream.len()));
            }
            let length = stream.get(sample as usize);
            let [start, stop] = self.range(piece, length);
            if let Some(reason) = self.refused_range(length, [start, stop]) {
                return wrong_pack(pack, format!("sample {sample} of {length} tokens {reason}"));
            }
            if !found.insert(sample, start, self.is_split(length)) {
                return wrong_pack(pack, format!("takes sample {sample} from token {start} on again"));
            }
            if piece as u64 == begin && first_start != start {
                return wrong_pack(pack, format!("starts at token {start} of its sample, not {first_start}"));
            }
            if piece as u64 + 1 == stop_piece && last_stop != stop {
                return wrong_pack(pack, format!("ends at token {stop} of its sample, not {last_stop}"));
            }
            taken = taken.saturating_add(self.options.aligned(stop - start));
            longest = longest.max(stop - start);
        }
        if taken > self.metadata.max_length {
            return wrong_pack(pack, format!("its pieces take {taken} tokens, more than {}", self.metadata.max_length));
        }
        if recorded != longest {
            return wrong_pack(pack, format!("its longest piece has {longest} tokens, not {recorded}"));
        }
        self.piece = stop_piece as usize;
        if self.options.placement.window().is_none() {
            *self.packs_by_room.entry((self.metadata.max_length - taken, count)).or_default() += 1;
        }
        Ok(())
    }

    /// Compare a pack that was made again with the next one of the plan, or note that it is left out.
    fn compare(&mut self, replay: &mut Replay, made: &PlacedPack) -> Result<(), PackError> {
        let (pack, taken) = (replay.next, self.metadata.max_length - made.room);
        replay.packs += 1;
        let plan = self.plan;
        let ends = plan.column(Field::IndicesCuLen);
        let begin = pack.checked_sub(1).map_or(0, |before| ends.get(before)) as usize;
        let end = if pack < self.pack { ends.get(pack) as usize } else { begin };
        let has = (begin..end).map(|piece| {
            let start = if plan.has_piece_ranges() { plan.column(Field::PieceStart).get(piece) } else { 0 };
            (plan.column(Field::Indices).get(piece), start)
        });
        let is_same = has.clone().eq(made.pieces.iter().copied());
        replay.next += usize::from(is_same);
        if let Some(left_out) = self.left_out.as_mut().filter(|left_out| is_same || left_out.may_be_more()) {
            left_out.note(is_same, 1, taken, replay.packs);
            return Ok(());
        }
        if is_same {
            return Ok(());
        }
        if pack >= self.pack {
            return Err(PackError::Mismatch(format!("the plan has no pack for sample {}", made.pieces[0].0)));
        }
        let found: Vec<u64> = has.take(8).map(|(sample, _)| sample).collect();
        let expected: Vec<u64> = made.pieces.iter().take(8).map(|&(sample, _)| sample).collect();
        wrong_pack(pack, format!("holds the samples {found:?} …, but the order puts {expected:?} … there"))
    }

    /// Compare the packs of `best_fit` by the room that is left in them; how many it makes.
    fn compare_by_room(&mut self, expected: &PacksByRoom, dataset: usize) -> Result<u64, PackError> {
        let made = expected.values().sum();
        let count = |packs: &PacksByRoom, key| packs.get(key).copied().unwrap_or(0);
        let is_within = self.packs_by_room.iter().all(|(key, &found)| found <= count(expected, key));
        let found: u64 = self.packs_by_room.values().sum();
        if found == made || self.left_out.is_some() {
            if !is_within {
                return Err(PackError::Mismatch(format!(
                    "dataset {dataset}: the packs have other room left than those of best_fit"
                )));
            }
            if let Some(left_out) = &mut self.left_out {
                for (key, &packs) in expected {
                    let (taken, kept) = (self.metadata.max_length - key.0, count(&self.packs_by_room, key));
                    left_out.note(true, kept, taken, 0);
                    left_out.note(false, packs - kept, taken, 0);
                }
                return Ok(found);
            }
        }
        Ok(made)
    }

    /// Count a piece that no pack holds.
    fn note_left_out(
        &mut self,
        stream: &SampleLengths<'_>,
        sample: u64,
        start: u64,
        tokens: u64,
    ) -> Result<(), PackError> {
        let Some(left_out) = &mut self.left_out else {
            return Err(PackError::Mismatch(format!(
                "dataset {}: no pack takes sample {sample} from token {start} on",
                stream.dataset_id()
            )));
        };
        left_out.pieces += 1;
        left_out.tokens = left_out.tokens.saturating_add(tokens);
        left_out.padding_align = left_out.padding_align.saturating_add(self.options.aligned(tokens) - tokens);
        Ok(())
    }
}

impl<'a> StreamWalk<'a> for PlanWalk<'a> {
    fn needs_drawn_order(&self) -> bool {
        self.options.placement.window().is_some()
    }

    fn stream(
        &mut self,
        stream: &SampleLengths<'_>,
        order: Option<Integers<'_>>,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        let (ids, first_pack) = (self.plan.column(Field::DatasetId), self.pack);
        let mut found = FoundPieces::new(stream.len())?;
        self.packs_by_room.clear();
        if let Some(left_out) = &mut self.left_out {
            left_out.begin_stream();
        }
        while self.pack < self.plan.packs() && ids.get(self.pack) == stream.dataset_id() as u64 {
            self.one_pack(stream, &mut found, progress)?;
            self.pack += 1;
        }
        let max_length = self.metadata.max_length;
        let max_cost = self.max_cost();
        let new_open = |window| OpenPacks::new(window, max_length, max_cost, &self.options);
        let mut open = self.options.placement.window().map(new_open);
        let mut sizes: BTreeMap<u64, u64> = BTreeMap::new();
        let mut by_length: BTreeMap<u64, Vec<CostlySample>> = BTreeMap::new();
        let mut replay = Replay { next: first_pack, packs: 0 };
        let (mut pieces, mut missing) = (0u64, 0u64);
        let mut samples = ordered(stream, order);
        while let Some((sample, length)) = samples.next(progress)? {
            let packed = self.count_sample(stream, sample, length)?;
            let mut parts_missing = 0u64;
            for start in (0..packed).step_by(max_length as usize) {
                let tokens = max_length.min(packed - start);
                if !found.contains(sample, start, self.is_split(length)) {
                    self.note_left_out(stream, sample, start, tokens)?;
                    parts_missing += 1;
                }
                pieces += 1;
                if pieces.is_multiple_of(WINDOW as u64) {
                    progress.tick("verifying", pieces, found.pieces)?;
                }
                let size = self.options.aligned(tokens);
                self.counted.padding_align = self.counted.padding_align.saturating_add(size - tokens);
                let cost = self.cost_of(stream, sample);
                match &mut open {
                    Some(open) => {
                        if let Some(closed) = open.place((sample, start), size, cost) {
                            self.compare(&mut replay, &closed)?;
                        }
                    }
                    None if self.costs.is_some() => by_length.entry(tokens).or_default().push((sample, cost)),
                    None => *sizes.entry(size).or_default() += 1,
                }
            }
            missing += parts_missing;
            if let Some(left_out) = self.left_out.as_mut().filter(|_| parts_missing > 0) {
                let is_all = parts_missing == packed.div_ceil(max_length);
                left_out.samples += u64::from(is_all);
                left_out.samples_overlong += u64::from(is_all && length > max_length);
            }
        }
        if pieces - missing != found.pieces {
            return Err(PackError::Mismatch(format!(
                "dataset {}: packs hold {} pieces, and the order has {pieces}",
                stream.dataset_id(),
                found.pieces
            )));
        }
        while let Some(closed) = open.as_mut().and_then(OpenPacks::close) {
            self.compare(&mut replay, &closed)?;
        }
        if open.is_none() && self.costs.is_some() {
            let order = &mut self.best_fit_order;
            for pack in cost_fit_packs(&by_length, max_length, max_cost, &self.options, order, progress)? {
                self.compare(&mut replay, &pack)?;
            }
        }
        let packs = (self.pack - first_pack) as u64;
        let made = match open {
            None if self.costs.is_none() => {
                let expected = best_fit_packs(&sizes, max_length, &self.options, progress)?;
                self.compare_by_room(&expected, stream.dataset_id())?
            }
            // Of those that are left out, only the number is known.
            _ if self.left_out.is_some() => (replay.next - first_pack) as u64,
            _ => replay.packs,
        };
        if made != packs {
            return Err(PackError::Mismatch(format!(
                "dataset {} has {packs} packs, but {} makes {made}",
                stream.dataset_id(),
                self.metadata.mode,
            )));
        }
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<Walked<'a>, PackError> {
        let Self { pack, piece, first_piece, metadata, tokens, counted, left_out, left_out_before, .. } = *self;
        let walked = Walked { pack, piece: piece as u64, left_out };
        let left_out = walked.left_out_so_far().0 - left_out_before;
        let Some(said) = &metadata.whole else { return Ok(walked) };
        check_totals(&[
            ("tokens", tokens, metadata.tokens),
            ("tokens_packed", tokens.saturating_sub(counted.tokens_overlong_cut), metadata.tokens_packed),
            ("pieces", (piece - first_piece) as u64 + left_out, metadata.pieces),
            ("samples_empty", counted.samples_empty, said.samples_empty),
            ("samples_overlong", counted.samples_overlong, said.samples_overlong),
            ("tokens_overlong_cut", counted.tokens_overlong_cut, said.tokens_overlong_cut),
            ("padding_align", counted.padding_align, said.padding_align),
            ("samples_packed", counted.samples_packed, said.samples_packed),
        ])?;
        Ok(walked)
    }
}

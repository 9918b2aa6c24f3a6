//! Checks a plan against the lengths, the order and the costs that it was made from, in one pass over its pieces.
//!
//! Invariants, of a plan that passes: every token of the ordered samples is in one piece or counted as left out. No pack
//! holds more than its limits. The columns agree with each other, and all counts and the fingerprint are right. It is not
//! checked which samples are put together, and in which order.

use std::ops::Range;

use crate::error::PackError;
use crate::folder::METADATA_FILE;
use crate::integers::Integers;
use crate::memory;
use crate::ordered_samples::{OrderedSamples, SampleLengths, SampleOrder, WINDOW, check_order};
use crate::packer::unchecked_fingerprint;
use crate::plan::{Field, OrderKind, PlanCounts, PlanMetadata, PlanView};
use crate::progress::Progress;
use crate::request::{Overlong, PackRequest, Packing, Remainder};

/// Check `plan` and `metadata` against `lengths`, one column a dataset, and against the order and the costs, where they
/// were given.
///
/// # Errors
/// `Mismatch` with the first pack that does not fit, and why. `Invalid` where the plan was made with an order or costs
/// that are not given here; `OrderOutOfRange` and `OrderRepeated` for an order that is none; `Format` where the plan is
/// mapped from damaged files; as `Packer::new` for lengths.
pub fn verify(
    plan: &PlanView<'_>,
    metadata: &PlanMetadata,
    lengths: &[Integers<'_>],
    order: Option<Integers<'_>>,
    costs: Option<&[Integers<'_>]>,
    threads: Option<u64>,
    progress: &mut dyn Progress,
) -> Result<(), PackError> {
    let order = order_source(metadata, order)?;
    check_costs_given(metadata, costs)?;
    let request = PackRequest { threads, ..metadata.request(lengths, order, costs) };
    check(plan, metadata, request, progress).map_err(|error| match error {
        PackError::Mismatch(reason) => PackError::Mismatch(format!(
            "{reason}; either these are not the lengths and the order that the plan was made from, or the plan is \
             damaged: pass those of the plan, or make it anew"
        )),
        error => error,
    })
}

/// Check a plan against the request that it was made from.
fn check(
    plan: &PlanView<'_>,
    metadata: &PlanMetadata,
    request: PackRequest<'_>,
    progress: &mut dyn Progress,
) -> Result<(), PackError> {
    let packing = metadata
        .packing()
        .map_err(|error| PackError::Mismatch(format!("{METADATA_FILE} contradicts itself: {error}")))?;
    plan.check_all(progress)?;
    check_shape(plan, metadata, &request.lengths)?;
    let streams = SampleLengths::streams(&request.lengths, metadata.global_pack);
    let costs = request.costs.as_ref().map(|costs| SampleLengths::streams(costs, metadata.global_pack));
    let order = request.order;
    let fingerprint = unchecked_fingerprint(request, progress)?.to_string();
    let mut walk = Walk::new(plan, metadata, packing, costs);
    for stream in &streams {
        let order = match order {
            SampleOrder::Given(order) => {
                check_order(&order, stream.len(), progress)?;
                Some(order)
            }
            _ => None,
        };
        walk.stream(stream, order, progress)?;
    }
    walk.finish(&streams, progress)?;
    if fingerprint != metadata.fingerprint {
        return Err(PackError::Mismatch(format!(
            "the plan's fingerprint is {}, but that of the lengths, order and parameters is {fingerprint}",
            metadata.fingerprint
        )));
    }
    Ok(())
}

/// A part of a sample that is in one piece, or in pieces of packs that follow each other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Part {
    sample: u64,
    start: u64,
    stop: u64,
}

/// How far the check is.
struct Walk<'a> {
    plan: &'a PlanView<'a>,
    metadata: &'a PlanMetadata,
    packing: Packing,
    costs: Option<Vec<SampleLengths<'a>>>,
    /// Packs without those that come again.
    packs: usize,
    pack: usize,
    piece: usize,
    counts: PlanCounts,
    /// Tokens that packs may take, and that are in none.
    left_out: u64,
}

/// The samples of a stream that were found in packs.
struct Found {
    /// One bit a sample that is packed whole, or that the order leaves out.
    whole: Vec<u64>,
    /// Parts of other samples.
    parts: Vec<Part>,
    tokens: u64,
}

impl Found {
    /// Note a whole sample; false if it was noted before.
    fn note(&mut self, sample: u64) -> bool {
        let (word, bit) = (&mut self.whole[(sample / 64) as usize], 1u64 << (sample % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    fn has(&self, sample: u64) -> bool {
        self.whole[(sample / 64) as usize] >> (sample % 64) & 1 == 1
    }
}

impl<'a> Walk<'a> {
    fn new(
        plan: &'a PlanView<'a>,
        metadata: &'a PlanMetadata,
        packing: Packing,
        costs: Option<Vec<SampleLengths<'a>>>,
    ) -> Self {
        let packs = metadata.packs_before_repeats() as usize;
        let counts = PlanCounts {
            // Compared with the columns before.
            packs: metadata.counts.packs,
            pieces: metadata.counts.pieces,
            packs_repeated: metadata.counts.packs_repeated,
            ..PlanCounts::default()
        };
        Self { plan, metadata, packing, costs, packs, pack: 0, piece: 0, counts, left_out: 0 }
    }

    fn wrong<T>(&self, reason: impl core::fmt::Display) -> Result<T, PackError> {
        Err(PackError::Mismatch(format!("pack {}: {reason}", self.pack)))
    }

    /// Tokens of a sample that packs may take.
    fn packable(&self, length: u64) -> u64 {
        match self.packing {
            Packing::Whole(options) if length > self.metadata.max_length => match options.overlong {
                Overlong::Split => length,
                Overlong::Truncate => self.metadata.max_length,
                Overlong::Error | Overlong::Drop => 0,
            },
            _ => length,
        }
    }

    /// Check the packs of the next stream, whose samples are in this order.
    fn stream(
        &mut self,
        stream: &SampleLengths<'_>,
        order: Option<Integers<'_>>,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        let (whole, packable) = self.samples(stream, order, progress)?;
        let mut found = Found { whole, parts: Vec::new(), tokens: 0 };
        let (ids, first, max_length) = (self.plan.column(Field::DatasetId), self.pack, self.metadata.max_length);
        // The part that the next piece may go on with.
        let mut open: Option<Part> = None;
        let mut is_short = false;
        while self.pack < self.packs && ids.get(self.pack) == stream.dataset_id() as u64 {
            if is_short {
                return self.wrong("follows a shorter one; only the last pack of a dataset may be short");
            }
            let tokens = self.one_pack(stream, &mut found, &mut open, progress)?;
            is_short = matches!(self.packing, Packing::Hard { .. }) && tokens < max_length;
            self.pack += 1;
        }
        found.parts.extend(open);
        self.check_parts(stream, &mut found)?;
        self.counts.tokens_packed += found.tokens;
        let left = packable.saturating_sub(found.tokens);
        let may_be_left = match self.packing {
            _ if self.metadata.counts.packs_dropped > 0 => u64::MAX,
            Packing::Hard { drop_last: true } => max_length - 1,
            _ => 0,
        };
        if found.tokens > packable || left > may_be_left {
            return Err(PackError::Mismatch(format!(
                "dataset {}: of {packable} tokens, {left} are in no pack",
                stream.dataset_id()
            )));
        }
        if let Packing::Hard { drop_last: true } = self.packing {
            self.counts.packs_dropped += packable / max_length - (self.pack - first) as u64;
        }
        self.left_out = self.left_out.saturating_add(left);
        Ok(())
    }

    /// Count the ordered samples of a stream: one bit for each that the order leaves out, and the tokens that packs may
    /// take.
    fn samples(
        &mut self,
        stream: &SampleLengths<'_>,
        order: Option<Integers<'_>>,
        progress: &mut dyn Progress,
    ) -> Result<(Vec<u64>, u64), PackError> {
        let mut whole = memory::zeroed::<u64>(stream.len().div_ceil(64))?;
        if order.is_some() {
            whole.fill(u64::MAX);
        }
        let mut tokens = 0u64;
        let mut samples = OrderedSamples::new("verifying", stream, order);
        while let Some((sample, length)) = samples.next(progress)? {
            whole[(sample / 64) as usize] &= !(1 << (sample % 64));
            let (packable, is_overlong) = (self.packable(length), length > self.metadata.max_length);
            tokens = tokens.saturating_add(packable);
            self.counts.tokens = self.counts.tokens.saturating_add(length);
            self.counts.samples_empty += u64::from(length == 0);
            let Packing::Whole(options) = self.packing else { continue };
            self.counts.samples_overlong += u64::from(is_overlong);
            match options.overlong {
                Overlong::Truncate => self.counts.tokens_truncated += length - packable,
                Overlong::Error if is_overlong => {
                    return Err(PackError::Mismatch(format!(
                        "dataset {}: sample {sample} has {length} tokens, but the plan was made of samples of at most {}",
                        stream.dataset_id(),
                        self.metadata.max_length
                    )));
                }
                _ => {}
            }
        }
        Ok((whole, tokens))
    }

    /// Check one pack by itself; its tokens.
    fn one_pack(
        &mut self,
        stream: &SampleLengths<'_>,
        found: &mut Found,
        open: &mut Option<Part>,
        progress: &mut dyn Progress,
    ) -> Result<u64, PackError> {
        let pack = self.pack;
        let value = |field| self.plan.column(field).get(pack);
        let (first_start, last_stop) = (value(Field::StartOffset), value(Field::EndOffset));
        let pieces = self.pieces()?;
        let (mut tokens, mut taken, mut longest, mut cost) = (0u64, 0u64, 0u64, 0u64);
        for piece in pieces.clone() {
            if piece.is_multiple_of(WINDOW) {
                progress.tick("verifying", piece as u64, self.counts.pieces)?;
            }
            let sample = self.plan.column(Field::Indices).get(piece);
            if sample >= stream.len() as u64 {
                return self.wrong(format!("uses sample {sample} of {}", stream.len()));
            }
            let length = stream.get(sample as usize);
            let [start, stop] = self.ends(piece, &pieces, pack, length);
            let is_last = piece + 1 == pieces.end;
            if (piece == pieces.start && start != first_start) || (is_last && stop != last_stop) {
                return self.wrong(format!(
                    "takes tokens {first_start} to {last_stop}, but its pieces begin at {start} or end at {stop}"
                ));
            }
            let may_be_empty = matches!(self.packing, Packing::Hard { .. }) && !is_last && length == 0;
            if start > stop || stop > self.packable(length) || (start == stop && !may_be_empty) {
                return self.wrong(format!("takes tokens {start} to {stop} of sample {sample}, which has {length}"));
            }
            self.note_piece(found, open, Part { sample, start, stop }, length)?;
            let size = stop - start;
            (tokens, longest) = (tokens.saturating_add(size), longest.max(size));
            if let Packing::Whole(options) = self.packing {
                taken = taken.saturating_add(options.aligned(size));
                self.counts.padding_align += options.aligned(size) - size;
            }
            if let Some(costs) = &self.costs {
                cost = cost.saturating_add(costs[stream.dataset_id()].get(sample as usize));
            }
        }
        found.tokens = found.tokens.saturating_add(tokens);
        self.check_limits(pieces.len() as u64, tokens, taken, cost)?;
        let recorded = self.plan.column(Field::Longest).get(pack);
        if recorded != longest {
            return self.wrong(format!("its longest piece has {longest} tokens, not {recorded}"));
        }
        self.counts.longest = self.counts.longest.max(longest);
        self.counts.max_pieces_per_pack = self.counts.max_pieces_per_pack.max(pieces.len() as u64);
        self.piece = pieces.end;
        Ok(tokens)
    }

    /// The first token of a piece of a pack, and one past its last; its sample has `length` tokens.
    fn ends(&self, piece: usize, pieces: &Range<usize>, pack: usize, length: u64) -> [u64; 2] {
        if self.plan.has_piece_ranges() {
            return [Field::PieceStart, Field::PieceStop].map(|field| self.plan.column(field).get(piece));
        }
        let value = |field| self.plan.column(field).get(pack);
        let start = if piece == pieces.start { value(Field::StartOffset) } else { 0 };
        [start, if piece + 1 == pieces.end { value(Field::EndOffset) } else { length }]
    }

    /// The pieces of the next pack.
    fn pieces(&self) -> Result<Range<usize>, PackError> {
        let end = self.plan.column(Field::IndicesCuLen).get(self.pack);
        if end <= self.piece as u64 || end > self.plan.column(Field::Indices).len() as u64 {
            return self.wrong(format!("indices_cu_len goes from {} to {end}", self.piece));
        }
        Ok(self.piece..end as usize)
    }

    /// Compare what a pack holds with its limits.
    fn check_limits(&self, pieces: u64, tokens: u64, taken: u64, cost: u64) -> Result<(), PackError> {
        let max_length = self.metadata.max_length;
        match self.packing {
            Packing::Hard { drop_last } if tokens > max_length || (drop_last && tokens < max_length) => {
                return self.wrong(format!("holds {tokens} tokens instead of {max_length}"));
            }
            Packing::Whole(options) if pieces > options.most_pieces() => {
                return self.wrong(format!("has {pieces} pieces; max_samples is {}", options.most_pieces()));
            }
            Packing::Whole(_) if taken > max_length => {
                return self.wrong(format!("its pieces take {taken} tokens, more than {max_length}"));
            }
            _ => {}
        }
        match self.metadata.max_cost {
            Some(max_cost) if cost > max_cost => {
                self.wrong(format!("its samples cost {cost}, more than max_cost={max_cost}"))
            }
            _ => Ok(()),
        }
    }

    /// Note a piece. One that goes on where the one before stopped is joined with it.
    fn note_piece(
        &mut self,
        found: &mut Found,
        open: &mut Option<Part>,
        mut part: Part,
        length: u64,
    ) -> Result<(), PackError> {
        let mut is_cut = part.stop < length;
        match open.take() {
            Some(before) if before.sample == part.sample && before.stop == part.start && part.start > 0 => {
                part.start = before.start;
                is_cut = true;
            }
            before => found.parts.extend(before),
        }
        if part.start > 0 || part.stop < self.packable(length) {
            *open = Some(part);
            return Ok(());
        }
        if !found.note(part.sample) {
            return self.wrong(format!("takes sample {} again, or one that the order leaves out", part.sample));
        }
        self.counts.samples += 1;
        self.counts.samples_cut += u64::from(is_cut);
        Ok(())
    }

    /// Check that no token is in two parts, or in a part and a whole piece.
    fn check_parts(&mut self, stream: &SampleLengths<'_>, found: &mut Found) -> Result<(), PackError> {
        let mut parts = std::mem::take(&mut found.parts);
        parts.sort_unstable();
        let mut before = Part { sample: u64::MAX, start: 0, stop: 0 };
        for part in parts {
            let goes_on = part.sample == before.sample;
            if found.has(part.sample) || (goes_on && part.start < before.stop) {
                return Err(PackError::Mismatch(format!(
                    "dataset {}: tokens {} to {} of sample {} are in two pieces, or of a sample that the order leaves out",
                    stream.dataset_id(),
                    part.start,
                    part.stop,
                    part.sample
                )));
            }
            self.counts.samples += u64::from(!goes_on);
            self.counts.samples_cut += u64::from(!goes_on);
            before = part;
        }
        Ok(())
    }
    /// Check the packs behind those of all streams, which are the first ones again, and all counts.
    fn finish(mut self, streams: &[SampleLengths<'_>], progress: &mut dyn Progress) -> Result<(), PackError> {
        if self.pack < self.packs {
            let dataset = self.plan.column(Field::DatasetId).get(self.pack);
            return self.wrong(format!("is of dataset {dataset}, out of turn or unknown"));
        }
        let (mut first_piece, mut again) = (0usize, 0usize);
        for pack in self.packs..self.plan.packs() {
            progress.tick("verifying", pack as u64, self.counts.packs)?;
            if again == self.packs {
                (first_piece, again) = (0, 0);
            }
            self.pack = pack;
            let pieces = self.pieces()?;
            let end = self.plan.column(Field::IndicesCuLen).get(again) as usize;
            let stream = &streams[self.plan.column(Field::DatasetId).get(again) as usize];
            self.repeated_pack(stream, (again, first_piece..end), pieces)?;
            (first_piece, again) = (end, again + 1);
        }
        let said = &self.metadata.counts;
        let multiple = self.metadata.multiple_of.unwrap_or(1);
        if !said.packs.is_multiple_of(multiple) || said.packs_dropped + said.packs_repeated >= multiple {
            return Err(PackError::Mismatch(format!(
                "{METADATA_FILE} says that {} packs are a multiple of {multiple}, by {} dropped and {} repeated",
                said.packs, said.packs_dropped, said.packs_repeated
            )));
        }
        if said.packs_dropped > 0 && self.metadata.remainder != Some(Remainder::Drop) {
            return Err(PackError::Mismatch(format!("{METADATA_FILE} says that packs were dropped, and not why")));
        }
        if matches!(self.packing, Packing::Whole(_)) {
            // How many packs the tokens would make is not known, but how many at least and at most.
            let most = said.packs_dropped.saturating_mul(self.metadata.max_length);
            let may_be = (said.packs_dropped..=most).contains(&self.left_out);
            self.counts.packs_dropped = if may_be { said.packs_dropped } else { self.left_out };
        }
        if self.counts == *said {
            return Ok(());
        }
        let [counted, said] = [&self.counts, said].map(|counts| serde_json::to_value(counts).unwrap_or_default());
        let named = counted.as_object().into_iter().flatten();
        let differing = named.filter(|(name, value)| said.get(name) != Some(value));
        let differing: Vec<String> = differing
            .map(|(name, value)| format!("{name} is {value}, but {METADATA_FILE} says {}", said[name]))
            .collect();
        Err(PackError::Mismatch(differing.join("; ")))
    }

    /// Check that the next pack, which has these pieces, is pack `again` once more; count it.
    fn repeated_pack(
        &mut self,
        stream: &SampleLengths<'_>,
        (again, expected): (usize, Range<usize>),
        pieces: Range<usize>,
    ) -> Result<(), PackError> {
        if pieces.len() != expected.len() {
            return self.wrong(format!("has {} pieces, but it repeats pack {again}", pieces.len()));
        }
        for &field in self.plan.fields().iter().filter(|&&field| field != Field::IndicesCuLen) {
            let column = self.plan.column(field);
            let values = |at: Range<usize>| at.map(|at| column.get(at));
            let is_same = if field.is_per_piece() {
                values(pieces.clone()).eq(values(expected.clone()))
            } else {
                column.get(self.pack) == column.get(again)
            };
            if !is_same {
                return self.wrong(format!("has another {} than pack {again}, which it repeats", field.name()));
            }
        }
        for piece in pieces.clone() {
            let length = stream.get(self.plan.column(Field::Indices).get(piece) as usize);
            let [start, stop] = self.ends(piece, &pieces, again, length);
            let tokens = stop.saturating_sub(start);
            self.counts.tokens_repeated += tokens;
            if let Packing::Whole(options) = self.packing {
                self.counts.padding_align += options.aligned(tokens) - tokens;
            }
        }
        self.piece = pieces.end;
        Ok(())
    }
}

/// Compare the numbers of datasets, samples, columns, packs and pieces.
fn check_shape(plan: &PlanView<'_>, metadata: &PlanMetadata, lengths: &[Integers<'_>]) -> Result<(), PackError> {
    let given: Vec<u64> = lengths.iter().map(|column| column.len() as u64).collect();
    if given != metadata.samples {
        return Err(PackError::Mismatch(format!(
            "the plan was made for {} samples (by dataset: {:?}), but the lengths are of {} (by dataset: {:?})",
            metadata.samples.iter().fold(0u64, |sum, &samples| sum.saturating_add(samples)),
            &metadata.samples[..metadata.samples.len().min(8)],
            given.iter().fold(0u64, |sum, &samples| sum.saturating_add(samples)),
            &given[..given.len().min(8)],
        )));
    }
    if plan.has_piece_ranges() != metadata.has_piece_ranges() {
        return Err(PackError::Mismatch(format!(
            "the plan has {} columns, which {METADATA_FILE} contradicts",
            plan.fields().len()
        )));
    }
    let (packs, pieces) = (plan.packs() as u64, plan.column(Field::Indices).len() as u64);
    let said = &metadata.counts;
    if (packs, pieces) != (said.packs, said.pieces) || (said.packs_repeated > 0 && said.packs_repeated >= packs) {
        return Err(PackError::Mismatch(format!(
            "the columns hold {packs} packs of {pieces} pieces, but {METADATA_FILE} says {} of {}, {} of them repeated",
            said.packs, said.pieces, said.packs_repeated
        )));
    }
    let ends = plan.column(Field::IndicesCuLen);
    let last = ends.len().checked_sub(1).map_or(0, |last| ends.get(last));
    if last != pieces {
        return Err(PackError::Mismatch(format!("the packs have {last} pieces, and there are {pieces}")));
    }
    Ok(())
}

/// Refuse costs that are missing, or that the plan was made without.
fn check_costs_given(metadata: &PlanMetadata, costs: Option<&[Integers<'_>]>) -> Result<(), PackError> {
    match (metadata.max_cost, costs) {
        (Some(_), Some(_)) | (None, None) => Ok(()),
        (Some(_), None) => Err(PackError::Invalid(format!(
            "{METADATA_FILE} says that the plan was made with costs (costs=): pass the same costs to verify"
        ))),
        (None, Some(_)) => Err(PackError::Mismatch(format!(
            "costs were given, but {METADATA_FILE} says that the plan was made without: leave the costs out, or use the \
             plan made with them"
        ))),
    }
}

/// The order that the plan says it has; one that is given must be what it says.
fn order_source<'a>(metadata: &PlanMetadata, order: Option<Integers<'a>>) -> Result<SampleOrder<'a>, PackError> {
    let given = |says: String| {
        PackError::Mismatch(format!(
            "an order was given, but {METADATA_FILE} says that {says}: leave the order out, or use the plan made with it"
        ))
    };
    match (metadata.order, metadata.seed, order) {
        (OrderKind::Given, _, Some(order)) => Ok(SampleOrder::Given(order)),
        (OrderKind::Given, _, None) => Err(PackError::Invalid(format!(
            "{METADATA_FILE} says that the plan was made with an order (order=): pass the same order to verify"
        ))),
        (OrderKind::Seed, Some(seed), None) => Ok(SampleOrder::Seed(seed)),
        (OrderKind::Seed, seed, _) => {
            Err(given(format!("the samples were shuffled with the seed {}", seed.unwrap_or_default())))
        }
        (OrderKind::Natural, _, None) => Ok(SampleOrder::Natural),
        (OrderKind::Natural, _, Some(_)) => Err(given("the samples kept their order".into())),
    }
}

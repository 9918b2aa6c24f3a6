//! Verifies a whole plan against the lengths and the order that it was made from.
//!
//! It works in the other direction than `hard`: it starts from the packs, and checks that every piece is the next of the
//! ordered samples or goes on where the pack before stopped, and that every pack is full. It uses nothing of the cutter;
//! the check of the lengths, the shuffle and the hash are those that made the plan.
//!
//! Invariants: in a plan that passes, every value of every column, its width and all metadata were compared with the
//! values that the lengths and the order give.

use crate::error::PackError;
use crate::folder::METADATA_FILE;
use crate::hard::{self, PackRequest};
use crate::inputs::{
    IntegerKind, Integers, OrderedSamples, RandomState, SampleLengths, SampleOrder, WINDOW, check_order,
};
use crate::plan::{Column, Field, OrderKind, PlanMetadata, PlanView};
use crate::progress::Progress;

/// Check `plan` and `metadata` against `lengths`, one column a dataset, and against the order, where one was given.
///
/// # Errors
/// `Mismatch` with the first pack that does not fit, and why. `Invalid` where the plan was made with an order
/// that is not given here; `OrderOutOfRange` and `OrderRepeated` for one that is none; as `HardPacker::new` for lengths.
pub fn verify(
    plan: &PlanView<'_>,
    metadata: &PlanMetadata,
    lengths: &[Integers<'_>],
    order: Option<Integers<'_>>,
    threads: usize,
    progress: &mut dyn Progress,
) -> Result<(), PackError> {
    metadata.check().map_err(|reason| PackError::Mismatch(format!("{METADATA_FILE} contradicts itself: {reason}")))?;
    check_counts(plan, metadata, lengths)?;
    let source = order_source(metadata, order)?;
    let request = PackRequest {
        lengths: lengths.to_vec(),
        order: source,
        max_length: metadata.max_length,
        drop_last: metadata.drop_last,
        global_pack: metadata.global_pack,
        threads,
    };
    let fingerprint = hard::fingerprint(request, progress)?.to_string();
    let streams = SampleLengths::streams(lengths, metadata.global_pack);
    let mut random = metadata.seed.map(RandomState::new);
    let mut walk = PlanWalk { plan, metadata, pack: 0, piece: 0, tokens: 0, packed: 0, empty_on_boundary: 0 };
    for (stream, &tail_start) in streams.iter().zip(&metadata.tail_start) {
        let drawn = random.as_mut().map(|random| Column::shuffled(random, stream.len(), progress)).transpose()?;
        let order = match source {
            SampleOrder::Natural => None,
            SampleOrder::Given(order) => {
                check_order(&order, stream.len(), progress)?;
                Some(order)
            }
            SampleOrder::Seed(_) => drawn.as_ref().map(Column::view),
        };
        walk.stream(stream.dataset_id(), OrderedSamples::new("verifying", stream, order), tail_start, progress)?;
    }
    walk.finish()?;
    check_widths(plan, progress)?;
    if fingerprint != metadata.fingerprint {
        return Err(PackError::Mismatch(format!(
            "the plan's fingerprint is {}, but that of the lengths, order and parameters is {fingerprint}",
            metadata.fingerprint
        )));
    }
    Ok(())
}

fn check_counts(plan: &PlanView<'_>, metadata: &PlanMetadata, lengths: &[Integers<'_>]) -> Result<(), PackError> {
    let given: Vec<u64> = lengths.iter().map(|column| column.len() as u64).collect();
    if given != metadata.samples {
        return Err(PackError::Mismatch(format!(
            "the plan was made for {} samples (by dataset: {:?}), but the lengths are of {} (by dataset: {:?})",
            metadata.samples.iter().sum::<u64>(),
            &metadata.samples[..metadata.samples.len().min(8)],
            given.iter().fold(0u64, |sum, &samples| sum.saturating_add(samples)),
            &given[..given.len().min(8)],
        )));
    }
    let found = (plan.packs() as u64, plan.column(Field::Indices).len() as u64);
    if found != (metadata.packs, metadata.pieces) {
        return Err(PackError::Mismatch(format!(
            "the columns hold {} packs of {} pieces, but {METADATA_FILE} says {} of {}",
            found.0, found.1, metadata.packs, metadata.pieces
        )));
    }
    Ok(())
}

/// Whether each column is 32 bits wide where all its values fit, and 64 bits else.
fn check_widths(plan: &PlanView<'_>, progress: &mut dyn Progress) -> Result<(), PackError> {
    for field in Field::ALL {
        let column = plan.column(field);
        let fits = match column.kind() {
            IntegerKind::I32 => continue,
            IntegerKind::I64 => fits_32_bits(&column, progress)?,
            kind => {
                return Err(PackError::Mismatch(format!(
                    "{} is {kind:?}; a plan's columns are int32 or int64",
                    field.name()
                )));
            }
        };
        if fits {
            return Err(PackError::Mismatch(format!(
                "{} is int64, but all of its values fit int32, which a plan then has",
                field.name()
            )));
        }
    }
    Ok(())
}

fn fits_32_bits(column: &Integers<'_>, progress: &mut dyn Progress) -> Result<bool, PackError> {
    let mut values = vec![0u64; column.len().min(WINDOW)];
    for start in (0..column.len()).step_by(WINDOW) {
        progress.tick("verifying", start as u64, column.len() as u64)?;
        let values = &mut values[..(column.len() - start).min(WINDOW)];
        column.read(start, values);
        if values.iter().any(|&value| value > i32::MAX as u64) {
            return Ok(false);
        }
    }
    Ok(true)
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
            "{METADATA_FILE} says that the plan was made with an order (order=): pass the same order to verify, \
             else neither the order of the samples nor the fingerprint can be checked"
        ))),
        (OrderKind::Seed, Some(seed), None) => Ok(SampleOrder::Seed(seed)),
        (OrderKind::Seed, seed, _) => {
            Err(given(format!("the samples were shuffled with the seed {}", seed.unwrap_or_default())))
        }
        (OrderKind::Natural, _, None) => Ok(SampleOrder::Natural),
        (OrderKind::Natural, _, Some(_)) => Err(given("the samples kept their order".into())),
    }
}

/// A sample that a pack takes from, or that the next one goes on with.
#[derive(Clone, Copy)]
struct OpenSample {
    sample: u64,
    length: u64,
    /// First token that no pack has taken yet.
    at: u64,
}

/// How far the check is.
struct PlanWalk<'a> {
    plan: &'a PlanView<'a>,
    metadata: &'a PlanMetadata,
    pack: usize,
    piece: u64,
    tokens: u64,
    packed: u64,
    empty_on_boundary: u64,
}

impl PlanWalk<'_> {
    fn wrong<T>(&self, reason: impl core::fmt::Display) -> Result<T, PackError> {
        Err(PackError::Mismatch(format!("pack {}: {reason}", self.pack)))
    }

    fn stream(
        &mut self,
        id: usize,
        mut samples: OrderedSamples<'_>,
        tail_start: u64,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        let ids = self.plan.column(Field::DatasetId);
        let mut open = None;
        let mut packed = 0u64;
        let mut short = None;
        while self.pack < self.plan.packs() && ids.get(self.pack) == id as u64 {
            if short.is_some() {
                return self.wrong("follows a shorter one; only the last pack of a dataset may be short");
            }
            let tokens = self.one_pack(&mut samples, &mut open, progress)?;
            if tokens != self.metadata.max_length {
                if self.metadata.drop_last || tokens > self.metadata.max_length {
                    return self.wrong(format!("holds {tokens} tokens instead of {}", self.metadata.max_length));
                }
                short = Some(self.plan.column(Field::StartOffset).get(self.pack));
            }
            packed = packed.saturating_add(tokens);
            self.pack += 1;
        }
        let start = short.or(open.map(|open| open.at)).unwrap_or_default();
        let left = self.left_out(samples, open, short.is_none(), progress)?;
        let tokens = packed.saturating_add(left);
        let wrong = |reason: String| Err(PackError::Mismatch(format!("dataset {id}: {reason}")));
        let max_length = self.metadata.max_length;
        if if self.metadata.drop_last { left >= max_length } else { left != 0 } {
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

    /// Tokens behind the packs of a stream, which end on a boundary unless the last one is short.
    fn left_out(
        &mut self,
        mut samples: OrderedSamples<'_>,
        open: Option<OpenSample>,
        on_boundary: bool,
        progress: &mut dyn Progress,
    ) -> Result<u64, PackError> {
        let mut left = open.map_or(0, |open| open.length - open.at);
        while let Some((_, length)) = samples.next(progress)? {
            self.empty_on_boundary += u64::from(on_boundary && left == 0 && length == 0);
            left = left.saturating_add(length);
        }
        Ok(left)
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
                .map(|field| self.plan.column(field).get(self.pack));
        if end_piece <= self.piece || end_piece > indices.len() as u64 {
            return self.wrong(format!("indices_cu_len goes from {} to {end_piece}", self.piece));
        }
        let first = self.piece;
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
            tokens = tokens.saturating_add(stops - begins);
            longest = longest.max(stops - begins);
            *open = (stops < expected.length).then_some(OpenSample { at: stops, ..expected });
        }
        if recorded != longest {
            return self.wrong(format!("its longest piece has {longest} tokens, not {recorded}"));
        }
        self.piece = end_piece;
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

    /// What the whole must add up to.
    fn finish(&self) -> Result<(), PackError> {
        let PlanMetadata { tokens, tokens_packed, empty_on_boundary, pieces, .. } = *self.metadata;
        if self.pack != self.plan.packs() {
            return self.wrong(format!(
                "is of dataset {}, out of turn or unknown",
                self.plan.column(Field::DatasetId).get(self.pack)
            ));
        }
        let counts = [
            ("tokens", self.tokens, tokens),
            ("tokens_packed", self.packed, tokens_packed),
            ("pieces", self.piece, pieces),
            ("empty_on_boundary", self.empty_on_boundary, empty_on_boundary),
        ];
        for (name, counted, said) in counts {
            if counted != said {
                return Err(PackError::Mismatch(format!("{name} is {counted}, but {METADATA_FILE} says {said}")));
            }
        }
        Ok(())
    }
}

//! Converts a plan to Megatron-LM's `sample_index`: for each pack, the sample of the order that it begins in, and the
//! offset in that sample.
//!
//! Source of the layout: `build_sample_idx` of Megatron-Core, with `seq_length=max_length` and one extra token a
//! sequence, so that the tail that was dropped has a row too.
//!
//! Memory beyond the inputs and the rows is constant, plus one index a sample where the order has to be drawn.

use crate::error::PackError;
use crate::folder::METADATA_FILE;
use crate::inputs::{IntegerKind, Integers, OrderedSamples, RandomState, SampleLengths, SampleOrder, WINDOW};
use crate::packer::unchecked_fingerprint;
use crate::plan::{Column, Field, HardMetadata, MultipleMetadata, OrderKind, PlanMetadata, PlanView};
use crate::progress::Progress;
use crate::request::{Mode, PackRequest, Remainder};

/// The name of the work in progress reports.
const PHASE: &str = "indexing samples";

/// The inputs of a plan, as far as the caller has them.
#[derive(Clone, Copy, Default)]
pub struct PlanInputs<'a> {
    /// The lengths, one column a dataset. Needed where empty samples lie on pack boundaries, of which the columns know
    /// nothing.
    pub lengths: Option<&'a [Integers<'a>]>,
    /// The order, where one was given to make the plan. Needed where the lengths are.
    pub order: Option<Integers<'a>>,
    /// Threads to hash lengths and order on, the calling one among them.
    pub threads: usize,
}

/// The rows, end to end: position in the order and offset in the sample.
///
/// An order that is given is checked: whole where the lengths are given too, else as far as the plan holds it.
///
/// # Errors
/// `Invalid` for a plan of several streams, and where lengths or an order are needed that are not given. `Mismatch`
/// where they are not those that the plan was made from, or the plan is damaged. An interrupt.
pub fn sample_index(
    plan: &PlanView<'_>,
    metadata: &PlanMetadata,
    inputs: &PlanInputs<'_>,
    progress: &mut dyn Progress,
) -> Result<Column, PackError> {
    metadata.check().map_err(|reason| PackError::Mismatch(format!("{METADATA_FILE} contradicts itself: {reason}")))?;
    let Some(hard) = &metadata.hard else {
        return Err(PackError::Invalid(format!(
            "sample_index needs a plan of mode=\"hard\", which is one stream of tokens; this one is \"{}\"",
            metadata.mode
        )));
    };
    if metadata.multiple.as_ref().is_some_and(|multiple| multiple.remainder == Remainder::Repeat && multiple.packs > 0)
    {
        return Err(PackError::Invalid(
            "sample_index needs a plan that is one stream of tokens, and this one repeats packs: pack without \
             multiple_of, or with remainder=\"drop\""
                .into(),
        ));
    }
    if hard.tail_start.len() != 1 {
        return Err(PackError::Invalid(
            "sample_index needs a plan of one dataset, or of several with global_pack=True".into(),
        ));
    }
    if let Some(order) = &inputs.order {
        check_order(plan, metadata, hard, inputs, order, progress)?;
    }
    let fits = |value: u64| i32::try_from(value).is_ok();
    let samples = metadata.samples.iter().fold(0u64, |sum, &samples| sum.saturating_add(samples));
    let narrow = plan.column(Field::StartOffset).kind() == IntegerKind::I32;
    if narrow && fits(samples) && fits(hard.tail_start[0]) {
        return Rows::new(plan, metadata, hard, false)?.filled(inputs, progress);
    }
    Ok(Rows::new(plan, metadata, hard, true)?.filled(inputs, progress)?.narrowed())
}

/// Whether `order` is the one that the plan was made with.
fn check_order(
    plan: &PlanView<'_>,
    metadata: &PlanMetadata,
    hard: &HardMetadata,
    inputs: &PlanInputs<'_>,
    order: &Integers<'_>,
    progress: &mut dyn Progress,
) -> Result<(), PackError> {
    let made = match (metadata.order, metadata.seed) {
        (OrderKind::Given, _) => None,
        (OrderKind::Seed, seed) => Some(format!("with seed={}", seed.unwrap_or_default())),
        (OrderKind::Natural, _) => Some("in the samples' own order".into()),
    };
    if let Some(made) = made {
        return Err(PackError::Mismatch(format!(
            "the plan was made {made}, not with an order that was given: leave order= out"
        )));
    }
    match inputs.lengths {
        Some(lengths) => check_fingerprint(metadata, hard, lengths, *order, inputs.threads, progress),
        // `fill_from_lengths` will ask for the lengths.
        None if hard.empty_on_boundary > 0 => Ok(()),
        None => check_pieces(plan, order, progress),
    }
}

fn check_fingerprint(
    metadata: &PlanMetadata,
    hard: &HardMetadata,
    lengths: &[Integers<'_>],
    order: Integers<'_>,
    threads: usize,
    progress: &mut dyn Progress,
) -> Result<(), PackError> {
    let request = PackRequest {
        lengths: lengths.to_vec(),
        order: SampleOrder::Given(order),
        max_length: metadata.max_length,
        mode: Mode::Hard { drop_last: hard.drop_last }.into(),
        costs: None,
        multiple: metadata.multiple.as_ref().map(MultipleMetadata::asked),
        global_pack: metadata.global_pack,
        threads,
    };
    let found = unchecked_fingerprint(request, progress)?.to_string();
    if found != metadata.fingerprint {
        return Err(PackError::Mismatch(format!(
            "the plan (fingerprint {}) was made with another order, or the attached lengths are not those it was made \
             from: together they have the fingerprint {found}. Pass the order that pack was given",
            metadata.fingerprint
        )));
    }
    Ok(())
}

/// Compare the order with the samples of the packs; without lengths, no empty sample is left out between them.
fn check_pieces(plan: &PlanView<'_>, order: &Integers<'_>, progress: &mut dyn Progress) -> Result<(), PackError> {
    let indices = plan.column(Field::Indices);
    let mut scratch = [(); 2].map(|()| vec![0u64; WINDOW]);
    let mut packs = PackStarts::new(plan);
    let (mut position, mut since) = (0usize, 0usize);
    while let Some(PackStart { offset, begin, end }) = packs.next(progress)? {
        // A pack that starts inside a sample goes on with the one before it.
        let mut piece = begin + usize::from(offset > 0);
        while piece < end {
            let count = (end - piece).min(WINDOW).min(order.len() - position);
            if count == 0 {
                return Err(PackError::Mismatch(format!(
                    "the order has {} entries, and the plan takes more samples: pass the order that pack was given",
                    order.len()
                )));
            }
            let [taken, given] = scratch.each_mut().map(|values| &mut values[..count]);
            indices.read(piece, taken);
            order.read(position, given);
            if let Some(wrong) = (0..count).find(|&entry| taken[entry] != given[entry]) {
                let value = given[wrong];
                let value = if order.kind().is_signed() { i128::from(value as i64) } else { i128::from(value) };
                return Err(PackError::Mismatch(format!(
                    "order[{}] is {value}, and the plan takes sample {} there: pass the order that pack was given",
                    position + wrong,
                    taken[wrong] as i64
                )));
            }
            (piece, position, since) = (piece + count, position + count, since + count);
            if since >= WINDOW {
                progress.tick(PHASE, piece as u64, indices.len() as u64)?;
                since = 0;
            }
        }
    }
    Ok(())
}

/// Where a pack begins: the first token it takes of its first sample, and its pieces.
struct PackStart {
    offset: u64,
    begin: usize,
    end: usize,
}

/// The packs of a plan in turn, read a window at a time.
struct PackStarts<'a> {
    plan: &'a PlanView<'a>,
    /// Packs that were read.
    read: usize,
    offsets: Vec<u64>,
    ends: Vec<u64>,
    /// Where in the window the next pack is.
    next: usize,
    /// Pieces of the packs before it.
    pieces: usize,
}

impl<'a> PackStarts<'a> {
    fn new(plan: &'a PlanView<'a>) -> Self {
        Self { plan, read: 0, offsets: Vec::new(), ends: Vec::new(), next: 0, pieces: 0 }
    }

    fn next(&mut self, progress: &mut dyn Progress) -> Result<Option<PackStart>, PackError> {
        if self.next == self.ends.len() {
            self.fill(progress)?;
        }
        let (Some(&offset), Some(&end)) = (self.offsets.get(self.next), self.ends.get(self.next)) else {
            return Ok(None);
        };
        let begin = self.pieces;
        let available = self.plan.column(Field::Indices).len();
        let Some(end) = usize::try_from(end).ok().filter(|&end| end > begin && end <= available) else {
            return Err(damaged(format!("indices_cu_len goes from {begin} to {end} of {available} pieces")));
        };
        (self.pieces, self.next) = (end, self.next + 1);
        Ok(Some(PackStart { offset, begin, end }))
    }

    fn fill(&mut self, progress: &mut dyn Progress) -> Result<(), PackError> {
        let total = self.plan.packs();
        progress.tick(PHASE, self.read as u64, total as u64)?;
        let count = (total - self.read).min(WINDOW);
        for (field, values) in [(Field::StartOffset, &mut self.offsets), (Field::IndicesCuLen, &mut self.ends)] {
            values.resize(count, 0);
            if self.plan.column(field).read(self.read, values) >> 63 != 0 {
                return Err(damaged(format!("{} has negative values", field.name())));
            }
        }
        (self.read, self.next) = (self.read + count, 0);
        Ok(())
    }
}

fn damaged(reason: String) -> PackError {
    PackError::Mismatch(format!("{reason}; the plan is damaged, make it again"))
}

/// Builds the rows.
struct Rows<'a> {
    plan: &'a PlanView<'a>,
    metadata: &'a PlanMetadata,
    hard: &'a HardMetadata,
    /// Position and offset of each row, end to end.
    values: Column,
    /// One row a pack, and one more where there is a tail.
    total: usize,
}

impl<'a> Rows<'a> {
    fn new(
        plan: &'a PlanView<'a>,
        metadata: &'a PlanMetadata,
        hard: &'a HardMetadata,
        is_wide: bool,
    ) -> Result<Self, PackError> {
        let total = plan.packs() + usize::from(metadata.tokens > metadata.tokens_packed);
        Ok(Self { plan, metadata, hard, values: Column::with_capacity(2 * total, is_wide)?, total })
    }

    fn filled(mut self, inputs: &PlanInputs<'_>, progress: &mut dyn Progress) -> Result<Column, PackError> {
        if self.total > 0 {
            if self.hard.empty_on_boundary == 0 {
                self.fill_from_columns(progress)?;
            } else {
                self.fill_from_lengths(inputs, progress)?;
            }
        }
        Ok(self.values)
    }

    /// How many rows are filled.
    fn filled_rows(&self) -> usize {
        self.values.len() / 2
    }

    /// What the next row begins with: the offset in its sample, and the pieces before it.
    fn next(&self, packs: &mut PackStarts<'_>, progress: &mut dyn Progress) -> Result<Option<(u64, u64)>, PackError> {
        Ok(match packs.next(progress)? {
            Some(PackStart { offset, begin, .. }) => Some((offset, begin as u64)),
            None if self.filled_rows() < self.total => Some((self.hard.tail_start[0], packs.pieces as u64)),
            None => None,
        })
    }

    fn push(&mut self, position: u64, offset: u64) {
        self.values.append(&[position as i64, offset as i64]);
    }

    /// Every sample up to a pack is a piece of one before it, so positions are pieces less the continuations.
    fn fill_from_columns(&mut self, progress: &mut dyn Progress) -> Result<(), PackError> {
        let samples: u64 = self.metadata.samples.iter().sum();
        let mut packs = PackStarts::new(self.plan);
        let mut continued = 0u64;
        while let Some((offset, pieces)) = self.next(&mut packs, progress)? {
            continued += u64::from(offset > 0);
            match pieces.checked_sub(continued).filter(|&position| position < samples) {
                Some(position) => self.push(position, offset),
                None => {
                    return Err(damaged(format!(
                        "{pieces} pieces go before pack {}, {continued} of them continued, of {samples} samples",
                        self.filled_rows()
                    )));
                }
            }
        }
        Ok(())
    }

    /// Go through the ordered samples up to the one that has each row's token.
    fn fill_from_lengths(&mut self, inputs: &PlanInputs<'_>, progress: &mut dyn Progress) -> Result<(), PackError> {
        let needs = |what: &str| {
            PackError::Invalid(format!("empty samples lie on pack boundaries, so sample_index needs {what}"))
        };
        let lengths = inputs.lengths.ok_or_else(|| needs("the lengths: load the plan with lengths="))?;
        let stream = SampleLengths::new(lengths.to_vec(), 0);
        let drawn = match (self.metadata.order, self.metadata.seed) {
            (OrderKind::Seed, Some(seed)) => {
                Some(Column::shuffled(&mut RandomState::new(seed), stream.len(), progress)?)
            }
            _ => None,
        };
        let order = drawn.as_ref().map(Column::view).or(inputs.order);
        if self.metadata.order == OrderKind::Given && order.is_none() {
            return Err(needs("the order: pass order="));
        }
        let mut samples = OrderedSamples::new(PHASE, &stream, order);
        let mut packs = PackStarts::new(self.plan);
        let (mut seen, mut begin, mut end) = (0u64, 0u64, 0u64);
        while let Some((offset, _)) = self.next(&mut packs, progress)? {
            let row = self.filled_rows() as u64;
            let token = row.saturating_mul(self.metadata.max_length);
            while end <= token {
                let length = match samples.next(progress) {
                    Ok(Some((_, length))) => length,
                    Ok(None) => return Err(not_its_lengths(format!("they have no token {token}"))),
                    Err(PackError::InputChanged) => return Err(not_its_lengths("one of them is negative".into())),
                    Err(error) => return Err(error),
                };
                (seen, begin, end) = (seen + 1, end, end.saturating_add(length));
            }
            if token - begin != offset {
                return Err(not_its_lengths(format!(
                    "pack {row} begins at token {} of its sample by them, not {offset}",
                    token - begin
                )));
            }
            self.push(seen - 1, offset);
        }
        Ok(())
    }
}

fn not_its_lengths(reason: String) -> PackError {
    PackError::Mismatch(format!("the attached lengths are not those that the plan was made from: {reason}"))
}

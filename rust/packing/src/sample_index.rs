//! Megatron-LM's `sample_index` of a plan: for each pack, which sample of the order it begins in, and where in it.
//!
//! Source of the layout: `build_sample_idx` of Megatron-Core, with `seq_length=max_length` and one extra token a
//! sequence, so that the tail that was dropped has a row too.
//!
//! What always holds: memory beyond the inputs and the rows is constant, plus one index a sample where the order has to
//! be drawn; rows are 32 bits wide where all values fit, 64 bits otherwise.

use crate::array::Array;
use crate::cell::Cell;
use crate::error::PackError;
use crate::folder::FACTS_FILE;
use crate::hard::{Dataset, OrderSource, Request};
use crate::integers::{IntegerKind, Integers};
use crate::ordered::{Ordered, STEP, draw};
use crate::plan::{Column, Facts, Field, OrderKind, Views};
use crate::shuffle::RandomState;
use crate::watch::Watch;

/// Said to the watch.
const PHASE: &str = "indexing samples";

/// What a plan was made from, as far as the caller has it.
#[derive(Clone, Copy, Default)]
pub struct Inputs<'a> {
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
    views: &Views<'_>,
    facts: &Facts,
    inputs: &Inputs<'_>,
    watch: &mut dyn Watch,
) -> Result<Column, PackError> {
    facts.check().map_err(|reason| PackError::Mismatch(format!("{FACTS_FILE} contradicts itself: {reason}")))?;
    if facts.tail_start.len() != 1 {
        return Err(PackError::Invalid(
            "sample_index needs a plan of one dataset, or of several with global_pack=True".into(),
        ));
    }
    if let Some(order) = &inputs.order {
        check_order(views, facts, inputs, order, watch)?;
    }
    let fits = |value: u64| i32::try_from(value).is_ok();
    let samples = facts.samples.iter().fold(0u64, |sum, &samples| sum.saturating_add(samples));
    let narrow = views.column(Field::StartOffset).kind() == IntegerKind::I32;
    if narrow && fits(samples) && fits(facts.tail_start[0]) {
        return Ok(Column::I32(Rows::new(views, facts)?.filled(inputs, watch)?));
    }
    let mut wide = Column::I64(Rows::new(views, facts)?.filled(inputs, watch)?);
    wide.narrow(watch)?;
    Ok(wide)
}

/// Whether `order` is the one that the plan was made with.
fn check_order(
    views: &Views<'_>,
    facts: &Facts,
    inputs: &Inputs<'_>,
    order: &Integers<'_>,
    watch: &mut dyn Watch,
) -> Result<(), PackError> {
    let made = match (facts.order, facts.seed) {
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
        Some(lengths) => check_fingerprint(facts, lengths, *order, inputs.threads, watch),
        // The lengths are needed, which who asks for the positions will say.
        None if facts.empty_on_boundary > 0 => Ok(()),
        None => check_pieces(views, order, watch),
    }
}

fn check_fingerprint(
    facts: &Facts,
    lengths: &[Integers<'_>],
    order: Integers<'_>,
    threads: usize,
    watch: &mut dyn Watch,
) -> Result<(), PackError> {
    let request = Request {
        lengths: lengths.to_vec(),
        order: OrderSource::Given(order),
        max_length: facts.max_length,
        drop_last: facts.drop_last,
        global_pack: facts.global_pack,
        threads,
    };
    let found = request.fingerprint(watch)?.to_string();
    if found != facts.fingerprint {
        return Err(PackError::Mismatch(format!(
            "the plan (fingerprint {}) was made with another order, or the attached lengths are not those it was made \
             from: together they have the fingerprint {found}. Pass the order that pack was given",
            facts.fingerprint
        )));
    }
    Ok(())
}

/// Compare the order with the samples of the packs; without lengths, no empty sample is left out between them.
fn check_pieces(views: &Views<'_>, order: &Integers<'_>, watch: &mut dyn Watch) -> Result<(), PackError> {
    let indices = views.column(Field::Indices);
    let mut scratch = [(); 2].map(|()| vec![0u64; STEP]);
    let mut packs = Packs::new(views);
    let (mut position, mut since) = (0usize, 0usize);
    while let Some(Pack { offset, begin, end }) = packs.next(watch)? {
        // A pack that starts inside a sample goes on with the one before it.
        let mut piece = begin + usize::from(offset > 0);
        while piece < end {
            let count = (end - piece).min(STEP).min(order.len() - position);
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
            if since >= STEP {
                watch.tick(PHASE, piece as u64, indices.len() as u64)?;
                since = 0;
            }
        }
    }
    Ok(())
}

/// Where a pack begins: the first token it takes of its first sample, and its pieces.
struct Pack {
    offset: u64,
    begin: usize,
    end: usize,
}

/// The packs of a plan in turn, read a window at a time.
struct Packs<'a> {
    views: &'a Views<'a>,
    /// Packs that were read.
    read: usize,
    offsets: Vec<u64>,
    ends: Vec<u64>,
    /// Where in the window the next pack is.
    next: usize,
    /// Pieces of the packs before it.
    pieces: usize,
}

impl<'a> Packs<'a> {
    fn new(views: &'a Views<'a>) -> Self {
        Self { views, read: 0, offsets: Vec::new(), ends: Vec::new(), next: 0, pieces: 0 }
    }

    fn next(&mut self, watch: &mut dyn Watch) -> Result<Option<Pack>, PackError> {
        if self.next == self.ends.len() {
            self.fill(watch)?;
        }
        let (Some(&offset), Some(&end)) = (self.offsets.get(self.next), self.ends.get(self.next)) else {
            return Ok(None);
        };
        let begin = self.pieces;
        let available = self.views.column(Field::Indices).len();
        let Some(end) = usize::try_from(end).ok().filter(|&end| end > begin && end <= available) else {
            return Err(damaged(format!("indices_cu_len goes from {begin} to {end} of {available} pieces")));
        };
        (self.pieces, self.next) = (end, self.next + 1);
        Ok(Some(Pack { offset, begin, end }))
    }

    fn fill(&mut self, watch: &mut dyn Watch) -> Result<(), PackError> {
        let total = self.views.packs();
        watch.tick(PHASE, self.read as u64, total as u64)?;
        let count = (total - self.read).min(STEP);
        for (field, values) in [(Field::StartOffset, &mut self.offsets), (Field::IndicesCuLen, &mut self.ends)] {
            values.resize(count, 0);
            if self.views.column(field).read(self.read, values) >> 63 != 0 {
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

/// The rows on their way.
struct Rows<'a, C> {
    views: &'a Views<'a>,
    facts: &'a Facts,
    /// One row more than packs, where there is a tail.
    values: Array<C>,
    filled: usize,
}

impl<'a, C: Cell> Rows<'a, C> {
    fn new(views: &'a Views<'a>, facts: &'a Facts) -> Result<Self, PackError> {
        let tail = facts.tokens > facts.tokens_packed;
        let values = Array::zeroed(2 * (views.packs() + usize::from(tail)))?;
        Ok(Self { views, facts, values, filled: 0 })
    }

    fn filled(mut self, inputs: &Inputs<'_>, watch: &mut dyn Watch) -> Result<Array<C>, PackError> {
        if self.values.is_empty() {
            return Ok(self.values);
        }
        if self.facts.empty_on_boundary == 0 {
            self.fill_from_columns(watch)?;
        } else {
            self.fill_from_lengths(inputs, watch)?;
        }
        Ok(self.values)
    }

    /// What the next row begins with: the offset in its sample, and the pieces before it.
    fn next(&self, packs: &mut Packs<'_>, watch: &mut dyn Watch) -> Result<Option<(u64, u64)>, PackError> {
        Ok(match packs.next(watch)? {
            Some(Pack { offset, begin, .. }) => Some((offset, begin as u64)),
            None if self.filled < self.values.len() => Some((self.facts.tail_start[0], packs.pieces as u64)),
            None => None,
        })
    }

    fn push(&mut self, position: u64, offset: u64) {
        self.values[self.filled] = C::from_word(C::word_of(position as usize));
        self.values[self.filled + 1] = C::from_word(C::word_of(offset as usize));
        self.filled += 2;
    }

    /// Every sample up to a pack is a piece of one before it, so positions are pieces less the continuations.
    fn fill_from_columns(&mut self, watch: &mut dyn Watch) -> Result<(), PackError> {
        let samples: u64 = self.facts.samples.iter().sum();
        let mut packs = Packs::new(self.views);
        let mut continued = 0u64;
        while let Some((offset, pieces)) = self.next(&mut packs, watch)? {
            continued += u64::from(offset > 0);
            match pieces.checked_sub(continued).filter(|&position| position < samples) {
                Some(position) => self.push(position, offset),
                None => {
                    return Err(damaged(format!(
                        "{pieces} pieces go before pack {}, {continued} of them continued, of {samples} samples",
                        self.filled / 2
                    )));
                }
            }
        }
        Ok(())
    }

    /// Go through the ordered samples up to the one that has each row's token.
    fn fill_from_lengths(&mut self, inputs: &Inputs<'_>, watch: &mut dyn Watch) -> Result<(), PackError> {
        let needs = |what: &str| {
            PackError::Invalid(format!("empty samples lie on pack boundaries, so sample_index needs {what}"))
        };
        let lengths = inputs.lengths.ok_or_else(|| needs("the lengths: load the plan with lengths="))?;
        let stream = Dataset::new(lengths.to_vec(), 0);
        let drawn = match (self.facts.order, self.facts.seed) {
            (OrderKind::Seed, Some(seed)) => Some(draw(&mut RandomState::new(seed), stream.len(), watch)?),
            _ => None,
        };
        let order = drawn.as_ref().map(Column::view).or(inputs.order);
        if self.facts.order == OrderKind::Given && order.is_none() {
            return Err(needs("the order: pass order="));
        }
        let mut samples = Ordered::new(PHASE, &stream, order);
        let mut packs = Packs::new(self.views);
        let (mut seen, mut begin, mut end) = (0u64, 0u64, 0u64);
        while let Some((offset, _)) = self.next(&mut packs, watch)? {
            let row = self.filled as u64 / 2;
            let token = row.saturating_mul(self.facts.max_length);
            while end <= token {
                let length = match samples.next(watch) {
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

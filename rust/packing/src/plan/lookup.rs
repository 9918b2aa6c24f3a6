//! Looks packs up by number: reads their pieces from the columns of a plan.
//!
//! Invariants: columns may lie in mapped files with any content, so every offset is checked before it is used. There is
//! a tick every `WINDOW` packs and pieces.

use std::ops::Range;

use super::{Field, PlanView};
use crate::error::PackError;
use crate::integers::Integers;
use crate::memory;
use crate::ordered_samples::WINDOW;
use crate::progress::Progress;

/// In `PackBatch::stop`: to the sample's end, which only the lengths tell.
pub const TO_THE_END: i64 = -1;

/// Several packs, as columns.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PackBatch {
    /// Dataset of each pack.
    pub dataset_id: Vec<i64>,
    /// Pack `k` has the pieces `piece_cu[k]..piece_cu[k + 1]`.
    pub piece_cu: Vec<i64>,
    /// Sample of each piece.
    pub sample: Vec<i64>,
    /// First token taken of each piece's sample.
    pub start: Vec<i64>,
    /// One past the last token taken, or `TO_THE_END`.
    pub stop: Vec<i64>,
}

/// A borrowed column of integers, or the owner of one.
pub trait AsIntegers {
    /// The integers.
    fn as_integers(&self) -> Integers<'_>;
}

impl AsIntegers for Integers<'_> {
    fn as_integers(&self) -> Integers<'_> {
        *self
    }
}

/// Lengths that belong to a plan.
pub struct AttachedLengths<C> {
    datasets: Vec<C>,
    /// Index of each dataset's first sample, where indices count through all of them.
    starts: Option<Vec<u64>>,
}

impl<C: AsIntegers> AttachedLengths<C> {
    /// The lengths of each dataset; with `global_pack`, sample indices count through all of them.
    #[must_use]
    pub fn new(datasets: Vec<C>, global_pack: bool) -> Self {
        let starts = global_pack.then(|| {
            let mut starts = Vec::with_capacity(datasets.len());
            let mut next = 0u64;
            for dataset in &datasets {
                starts.push(next);
                next = next.saturating_add(dataset.as_integers().len() as u64);
            }
            starts
        });
        Self { datasets, starts }
    }

    /// Read the tokens of each of `samples`; an error is the position of the first without a length.
    fn read(&self, dataset: u64, samples: &[u64], tokens: &mut [u64]) -> Result<(), usize> {
        let dataset = usize::try_from(dataset).map_err(|_| 0usize)?;
        if let Some(starts) = &self.starts {
            if dataset != 0 {
                return Err(0);
            }
            for (position, (&sample, slot)) in samples.iter().zip(tokens).enumerate() {
                *slot = self.global(starts, sample).filter(|&length| length >> 63 == 0).ok_or(position)?;
            }
            return Ok(());
        }
        let column = self.datasets.get(dataset).ok_or(0usize)?.as_integers();
        if let Some(position) = samples.iter().position(|&sample| sample >= column.len() as u64) {
            return Err(position);
        }
        match column.gather(samples, tokens) >> 63 {
            0 => Ok(()),
            // Lengths that are attached were never checked.
            _ => tokens.iter().position(|&length| length >> 63 != 0).map_or(Ok(()), Err),
        }
    }

    /// Tokens of a sample, counted through all datasets.
    fn global(&self, starts: &[u64], sample: u64) -> Option<u64> {
        // Of empty datasets and the one after them, which start at the same sample, the last.
        let dataset = starts.partition_point(|&start| start <= sample).checked_sub(1)?;
        let column = self.datasets[dataset].as_integers();
        let within = usize::try_from(sample - starts[dataset]).ok()?;
        (within < column.len()).then(|| column.get(within))
    }
}

/// Packs whose pieces are located, but not yet read.
pub struct LocatedPacks {
    numbers: Vec<u64>,
    /// Each pack's first piece.
    begins: Vec<u64>,
    piece_cu: Vec<i64>,
}

/// Find the pieces of the packs numbered `packs`.
///
/// # Errors
/// `NoSuchPack`; `Mismatch` where the offsets contradict themselves; an interrupt.
pub fn locate(
    plan: &PlanView<'_>,
    packs: &Integers<'_>,
    progress: &mut dyn Progress,
) -> Result<LocatedPacks, PackError> {
    let total = plan.packs();
    let available = plan.column(Field::Indices).len() as u64;
    let mut located = LocatedPacks {
        numbers: memory::zeroed(packs.len())?,
        begins: memory::zeroed(packs.len())?,
        piece_cu: memory::zeroed(packs.len() + 1)?,
    };
    let mut pieces = 0u64;
    let mut scratch = [(); 2].map(|()| vec![0u64; packs.len().min(WINDOW)]);
    for start in (0..packs.len()).step_by(WINDOW) {
        progress.tick("finding packs", start as u64, packs.len() as u64)?;
        let window = start..(start + WINDOW).min(packs.len());
        let numbers = &mut located.numbers[window.clone()];
        let begins = &mut located.begins[window.clone()];
        let [before, ends] = scratch.each_mut().map(|column| &mut column[..window.len()]);
        packs.read(start, numbers);
        if let Some(&number) = numbers.iter().find(|&&number| number >= total as u64) {
            let index = if packs.kind().is_signed() { i128::from(number as i64) } else { i128::from(number) };
            return Err(PackError::NoSuchPack { index, packs: total });
        }
        for (slot, &number) in before.iter_mut().zip(&*numbers) {
            *slot = number.saturating_sub(1);
        }
        gather(plan, Field::IndicesCuLen, numbers, ends)?;
        gather(plan, Field::IndicesCuLen, before, begins)?;
        let piece_cu = &mut located.piece_cu[start + 1..];
        for (((&number, begin), &end), slot) in numbers.iter().zip(begins).zip(&*ends).zip(piece_cu) {
            if number == 0 {
                *begin = 0;
            }
            if *begin >= end || end > available {
                return Err(PackError::Mismatch(format!(
                    "pack {number}: indices_cu_len says pieces {begin} to {end} of {available}; \
                     the plan is damaged, make it again"
                )));
            }
            // A sum that has no room in 63 bits has none in memory either.
            pieces = pieces.saturating_add(end - *begin).min(i64::MAX as u64);
            *slot = pieces as i64;
        }
    }
    Ok(located)
}

fn gather(plan: &PlanView<'_>, field: Field, at: &[u64], out: &mut [u64]) -> Result<(), PackError> {
    if plan.column(field).gather(at, out) >> 63 != 0 {
        return Err(PackError::Mismatch(format!("{} has negative values; the plan is damaged", field.name())));
    }
    Ok(())
}

impl LocatedPacks {
    /// Pieces of all the packs.
    #[must_use]
    pub fn pieces(&self) -> usize {
        self.piece_cu.last().map_or(0, |&pieces| pieces as usize)
    }

    /// The fields of packs, and those of pieces that the plan has, whose values the packs are read from.
    fn ranges<'s>(&'s self, plan: &'s PlanView<'_>) -> impl Iterator<Item = (Field, Range<usize>)> + 's {
        let packs = self.numbers.iter().zip(&self.begins).zip(self.piece_cu.windows(2));
        packs.flat_map(move |((&number, &begin), cu)| {
            let (number, begin) = (number as usize, begin as usize);
            let pieces = begin..begin + (cu[1] - cu[0]) as usize;
            plan.fields()
                .iter()
                .map(move |&field| (field, if field.is_per_piece() { pieces.clone() } else { number..number + 1 }))
        })
    }

    /// Whether all that is to be read was compared with its checksums before.
    #[must_use]
    pub fn is_checked(&self, plan: &PlanView<'_>) -> bool {
        self.ranges(plan).all(|(field, range)| plan.is_checked(field, range))
    }

    /// Compare what is to be read with its checksums.
    fn check(&self, plan: &PlanView<'_>) -> Result<(), PackError> {
        if plan.are_checks_done() {
            return Ok(());
        }
        self.ranges(plan).try_for_each(|(field, range)| plan.check(field, range))
    }

    /// Read the packs.
    ///
    /// Columns are read one after the other, for up to `WINDOW` packs or pieces at a time, so that their cache misses
    /// overlap.
    ///
    /// # Errors
    /// `Format` where a file is damaged; `Mismatch` where the columns contradict the lengths or hold negative values; an
    /// interrupt.
    pub fn read<C: AsIntegers>(
        self,
        plan: &PlanView<'_>,
        lengths: Option<&AttachedLengths<C>>,
        progress: &mut dyn Progress,
    ) -> Result<PackBatch, PackError> {
        self.check(plan)?;
        let packs = self.numbers.len();
        let mut dataset_id = memory::zeroed::<i64>(packs)?;
        let mut pieces = PieceReader::new(plan, &self, lengths)?;
        let mut scratch = [(); 3].map(|()| vec![0u64; packs.min(WINDOW)]);
        for start in (0..packs).step_by(WINDOW) {
            progress.tick("reading packs", start as u64, packs as u64)?;
            let window = start..(start + WINDOW).min(packs);
            let (numbers, begins) = (&self.numbers[window.clone()], &self.begins[window.clone()]);
            for &begin in begins {
                pieces.prefetch(begin as usize);
            }
            let [ids, first, last] = scratch.each_mut().map(|column| &mut column[..window.len()]);
            gather(plan, Field::DatasetId, numbers, ids)?;
            gather(plan, Field::StartOffset, numbers, first)?;
            gather(plan, Field::EndOffset, numbers, last)?;
            for (pack, (&dataset, &begin)) in window.clone().zip(ids.iter().zip(begins)) {
                dataset_id[pack] = dataset as i64;
                let count = self.piece_cu[pack + 1] - self.piece_cu[pack];
                pieces.read(begin as usize, count as usize, dataset, progress)?;
            }
            pieces.finish_window()?;
            if plan.has_piece_ranges() {
                continue;
            }
            for (pack, (&first, &last)) in window.zip(first.iter().zip(&*last)) {
                pieces.start[self.piece_cu[pack] as usize] = first;
                pieces.stop[self.piece_cu[pack + 1] as usize - 1] = last;
            }
        }
        // Collected in place.
        let signed = |values: Vec<u64>| values.into_iter().map(|value| value as i64).collect();
        let [sample, start, stop] = [pieces.sample, pieces.start, pieces.stop].map(signed);
        Ok(PackBatch { dataset_id, piece_cu: self.piece_cu, sample, start, stop })
    }
}

/// The pieces of all the packs, as far as they are read. Lengths are read for a window of them: up to `WINDOW`, all of
/// one dataset.
struct PieceReader<'a, C> {
    plan: &'a PlanView<'a>,
    located: &'a LocatedPacks,
    lengths: Option<&'a AttachedLengths<C>>,
    sample: Vec<u64>,
    start: Vec<u64>,
    stop: Vec<u64>,
    /// Lengths of the samples of a window, to check the stops that the plan holds.
    ends: Vec<u64>,
    window: Range<usize>,
    /// Of the window.
    dataset: u64,
}

impl<'a, C: AsIntegers> PieceReader<'a, C> {
    fn new(
        plan: &'a PlanView<'a>,
        located: &'a LocatedPacks,
        lengths: Option<&'a AttachedLengths<C>>,
    ) -> Result<Self, PackError> {
        let column = || memory::zeroed(located.pieces());
        let (sample, start, stop) = (column()?, column()?, column()?);
        Ok(Self { plan, located, lengths, sample, start, stop, ends: Vec::new(), window: 0..0, dataset: 0 })
    }

    /// Prefetch the piece at `begin`.
    fn prefetch(&self, begin: usize) {
        self.plan.column(Field::Indices).prefetch(begin);
        if self.plan.has_piece_ranges() {
            self.plan.column(Field::PieceStart).prefetch(begin);
            self.plan.column(Field::PieceStop).prefetch(begin);
        }
    }

    /// Read the next `count` pieces, which the columns have from `begin` on.
    fn read(
        &mut self,
        mut begin: usize,
        mut count: usize,
        dataset: u64,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        if dataset != self.dataset {
            self.finish_window()?;
            self.dataset = dataset;
        }
        while count > 0 {
            let take = count.min(WINDOW - self.window.len());
            let slots = self.window.end..self.window.end + take;
            for &field in self.plan.fields() {
                let values = match field {
                    Field::Indices => &mut self.sample,
                    Field::PieceStart => &mut self.start,
                    Field::PieceStop => &mut self.stop,
                    _ => continue,
                };
                if self.plan.column(field).read(begin, &mut values[slots.clone()]) >> 63 != 0 {
                    return Err(PackError::Mismatch(format!(
                        "{} has negative values; the plan is damaged",
                        field.name()
                    )));
                }
            }
            self.window.end = slots.end;
            (begin, count) = (begin + take, count - take);
            if self.window.len() == WINDOW {
                self.finish_window()?;
                progress.tick("reading pieces", slots.end as u64, self.sample.len() as u64)?;
            }
        }
        Ok(())
    }

    /// Give the pieces of the window the ends of their samples, where the plan does not hold them, and begin another one.
    fn finish_window(&mut self) -> Result<(), PackError> {
        if self.plan.has_piece_ranges() {
            return self.check_stops();
        }
        let window = self.window.clone();
        let stops = &mut self.stop[window.clone()];
        match self.lengths {
            None => stops.fill(TO_THE_END as u64),
            Some(_) if window.is_empty() => {}
            Some(lengths) => lengths
                .read(self.dataset, &self.sample[window.clone()], stops)
                .map_err(|position| self.no_such_sample(window.start + position))?,
        }
        self.window = window.end..window.end;
        Ok(())
    }

    /// Compare the stops that the plan holds with the lengths, and begin another window.
    fn check_stops(&mut self) -> Result<(), PackError> {
        let window = self.window.clone();
        if let (Some(lengths), false) = (self.lengths, window.is_empty()) {
            let mut ends = std::mem::take(&mut self.ends);
            ends.resize(window.len(), 0);
            let stops = &self.stop[window.clone()];
            lengths
                .read(self.dataset, &self.sample[window.clone()], &mut ends)
                .map_err(|position| self.no_such_sample(window.start + position))?;
            if let Some(position) = stops.iter().zip(&ends).position(|(stop, end)| stop > end) {
                let piece = window.start + position;
                return Err(PackError::Mismatch(format!(
                    "pack {} takes tokens up to {} of sample {}, which has {}",
                    self.pack_of(piece),
                    self.stop[piece],
                    self.sample[piece],
                    ends[position]
                )));
            }
            self.ends = ends;
        }
        self.window = window.end..window.end;
        Ok(())
    }

    /// The number of the pack that a piece belongs to.
    fn pack_of(&self, piece: usize) -> u64 {
        self.located.numbers[self.located.piece_cu.partition_point(|&pieces| pieces as usize <= piece) - 1]
    }

    #[cold]
    fn no_such_sample(&self, piece: usize) -> PackError {
        PackError::Mismatch(format!(
            "pack {} takes sample {} of dataset {}, but the lengths have no such sample, or none of 0 to 2^63 - 1 for it",
            self.pack_of(piece),
            self.sample[piece],
            self.dataset
        ))
    }
}

/// The packs numbered `packs`; each number must be in range.
///
/// # Errors
/// As `locate` and `LocatedPacks::read`.
pub fn lookup<C: AsIntegers>(
    plan: &PlanView<'_>,
    packs: &Integers<'_>,
    lengths: Option<&AttachedLengths<C>>,
    progress: &mut dyn Progress,
) -> Result<PackBatch, PackError> {
    locate(plan, packs, progress)?.read(plan, lengths, progress)
}

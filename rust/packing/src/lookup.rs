//! Packs by number: their pieces, read from the columns of a plan.
//!
//! What always holds: columns may lie in mapped files with any content, so every offset is checked
//! before it is used.

use crate::error::PackError;
use crate::integers::Integers;
use crate::memory;
use crate::plan::{Field, Views};

/// In `Lookup::stop`: to the sample's end, which only the lengths tell.
pub const TO_THE_END: i64 = -1;

/// Several packs, column by column.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lookup {
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

/// Lengths that belong to a plan.
#[derive(Clone, Default)]
pub struct Lengths<'a> {
    /// One column a dataset.
    pub datasets: Vec<Integers<'a>>,
    /// Whether sample indices count through all datasets.
    pub global_pack: bool,
}

impl Lengths<'_> {
    /// Tokens of a sample, if there is such a sample.
    #[must_use]
    pub fn get(&self, dataset: i64, sample: i64) -> Option<i64> {
        let mut sample = usize::try_from(sample).ok()?;
        let dataset = usize::try_from(dataset).ok()?;
        if !self.global_pack {
            let column = self.datasets.get(dataset)?;
            return (sample < column.len()).then(|| column.get(sample) as i64);
        }
        for column in &self.datasets {
            if sample < column.len() {
                return Some(column.get(sample) as i64);
            }
            sample -= column.len();
        }
        None
    }
}

/// The packs numbered `packs`; each number must be in range.
///
/// Columns are read one after the other for all packs, so that their cache misses overlap.
///
/// # Errors
/// `NoSuchPack`; `Mismatch` where the columns contradict themselves or the lengths.
pub fn lookup(views: &Views<'_>, packs: &Integers<'_>, lengths: Option<&Lengths<'_>>) -> Result<Lookup, PackError> {
    let total = views.packs();
    let mut numbers = memory::zeroed::<u64>(packs.len())?;
    packs.read(0, &mut numbers);
    if let Some(&number) = numbers.iter().find(|&&number| number >= total as u64) {
        let index = if packs.kind().is_signed() { i128::from(number as i64) } else { i128::from(number) };
        return Err(PackError::NoSuchPack { index, packs: total });
    }
    let gather = |field: Field, at: &[u64]| {
        let mut values = memory::zeroed::<u64>(at.len())?;
        if views.column(field).gather(at, &mut values) >> 63 != 0 {
            return Err(PackError::Mismatch(format!("{} has negative values; the plan is damaged", field.name())));
        }
        Ok(values)
    };
    let ends = gather(Field::IndicesCuLen, &numbers)?;
    let mut begins = gather(Field::IndicesCuLen, &numbers.iter().map(|&n| n.saturating_sub(1)).collect::<Vec<_>>())?;
    let indices = views.column(Field::Indices);
    let mut piece_cu = Vec::with_capacity(numbers.len() + 1);
    piece_cu.push(0i64);
    let mut pieces = 0u64;
    for ((&number, begin), &end) in numbers.iter().zip(&mut begins).zip(&ends) {
        if number == 0 {
            *begin = 0;
        }
        if *begin >= end || end > indices.len() as u64 {
            return Err(PackError::Mismatch(format!(
                "pack {number}: indices_cu_len says pieces {begin} to {end} of {}; the plan is damaged, make it again",
                indices.len()
            )));
        }
        indices.prefetch(*begin as usize);
        pieces += end - *begin;
        piece_cu.push(pieces as i64);
    }
    let mut found = Lookup {
        dataset_id: gather(Field::DatasetId, &numbers)?.into_iter().map(|id| id as i64).collect(),
        piece_cu,
        sample: memory::zeroed(pieces as usize)?,
        start: memory::zeroed(pieces as usize)?,
        stop: Vec::new(),
    };
    let starts = gather(Field::StartOffset, &numbers)?;
    let stops = gather(Field::EndOffset, &numbers)?;
    let mut slots = found.sample.iter_mut();
    let mut seen = 0u64;
    for (&begin, &end) in begins.iter().zip(&ends) {
        for (piece, slot) in (begin..end).zip(&mut slots) {
            let sample = indices.get(piece as usize);
            seen |= sample;
            *slot = sample as i64;
        }
    }
    if seen >> 63 != 0 {
        return Err(PackError::Mismatch("indices has negative values; the plan is damaged".into()));
    }
    found.stop = match lengths {
        None => {
            let mut stops = memory::zeroed(found.sample.len())?;
            stops.fill(TO_THE_END);
            stops
        }
        Some(lengths) => stops_by_length(&found, &numbers, lengths)?,
    };
    for (pack, (&start, &stop)) in starts.iter().zip(&stops).enumerate() {
        found.start[found.piece_cu[pack] as usize] = start as i64;
        found.stop[found.piece_cu[pack + 1] as usize - 1] = stop as i64;
    }
    Ok(found)
}

/// The length of each piece's sample.
fn stops_by_length(found: &Lookup, numbers: &[u64], lengths: &Lengths<'_>) -> Result<Vec<i64>, PackError> {
    let mut stops = Vec::with_capacity(found.sample.len());
    for (pack, &dataset) in found.dataset_id.iter().enumerate() {
        for &sample in &found.sample[found.piece_cu[pack] as usize..found.piece_cu[pack + 1] as usize] {
            let Some(length) = lengths.get(dataset, sample) else {
                return Err(PackError::Mismatch(format!(
                    "pack {} takes sample {sample} of dataset {dataset}, but the lengths have no such sample",
                    numbers[pack]
                )));
            };
            stops.push(length);
        }
    }
    Ok(stops)
}

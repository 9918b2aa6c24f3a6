//! Packs by number: their pieces, read from the columns of a plan.
//!
//! What always holds: columns may lie in mapped files with any content, so every offset is checked
//! before it is used.

use crate::error::PackError;
use crate::integers::Integers;
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
/// # Errors
/// `NoSuchPack`; `Mismatch` where the columns contradict themselves or the lengths.
pub fn lookup(views: &Views<'_>, packs: &Integers<'_>, lengths: Option<&Lengths<'_>>) -> Result<Lookup, PackError> {
    let cumulative = views.column(Field::IndicesCuLen);
    let indices = views.column(Field::Indices);
    let total = cumulative.len();
    let mut found = Lookup::default();
    found.dataset_id.reserve(packs.len());
    found.piece_cu.reserve(packs.len() + 1);
    found.piece_cu.push(0);
    let mut scratch: Vec<u64> = Vec::new();
    for position in 0..packs.len() {
        let number = packs.get(position);
        if number >= total as u64 {
            return Err(PackError::NoSuchPack { index: number as i64, packs: total });
        }
        let pack = number as usize;
        let begin = if pack == 0 { 0 } else { cumulative.get(pack - 1) };
        let end = cumulative.get(pack);
        if begin >= end || end > indices.len() as u64 {
            return Err(PackError::Mismatch(format!(
                "pack {pack}: indices_cu_len says pieces {begin} to {end} of {}; the plan is damaged, make it again",
                indices.len()
            )));
        }
        scratch.resize((end - begin) as usize, 0);
        indices.read(begin as usize, &mut scratch);
        let dataset = views.column(Field::DatasetId).get(pack) as i64;
        found.dataset_id.push(dataset);
        let first = found.sample.len();
        found.sample.extend(scratch.iter().map(|&sample| sample as i64));
        found.start.resize(found.sample.len(), 0);
        found.start[first] = views.column(Field::StartOffset).get(pack) as i64;
        match lengths {
            None => found.stop.resize(found.sample.len(), TO_THE_END),
            Some(lengths) => {
                for &sample in &found.sample[first..] {
                    let length = lengths.get(dataset, sample).ok_or_else(|| {
                        PackError::Mismatch(format!(
                            "pack {pack} takes sample {sample} of dataset {dataset}, but the lengths have no such sample"
                        ))
                    })?;
                    found.stop.push(length);
                }
            }
        }
        if let Some(last) = found.stop.last_mut() {
            *last = views.column(Field::EndOffset).get(pack) as i64;
        }
        found.piece_cu.push(found.sample.len() as i64);
    }
    Ok(found)
}

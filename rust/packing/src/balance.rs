//! Splits samples into parts of nearly equal cost, and into batches of bounded tokens.
//!
//! The method is the largest differencing of Karmarkar and Karp, for any number of parts. It begins with one partition
//! for each sample. It always joins the two partitions whose parts differ most, the heaviest part of one with the
//! lightest part of the other, until one partition is left.
//!
//! Invariants:
//! 1. Sums are exact: a total of 2¹²⁸ or more is refused before any part is added to another.
//! 2. Every comparison ends with the index of a sample, so the result depends on the inputs alone.
//! 3. No part is empty: a partition has as many parts as samples, or all of them.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeSet, BinaryHeap};

use crate::error::PackError;
use crate::integers::Integers;
use crate::memory;
use crate::ordered_samples::WINDOW;
use crate::progress::Progress;

/// The cost of a sample.
#[derive(Clone, Copy, Debug)]
pub enum Cost<'a> {
    /// Its tokens.
    Tokens,
    /// The work of a transformer on it: tokens² + 24,576 · tokens.
    Attention,
    /// A number for each sample.
    Given(Integers<'a>),
}

/// Indices of samples.
type Group = Vec<i64>;

/// In a layer of hidden size h, a token takes 12·h² operations in the matrices, and a pair of tokens takes 2·h in
/// attention. So a token costs as much as 6·h pairs. Models of 7 billion parameters have h = 4096.
const PAIRS_PER_TOKEN: u128 = 6 * 4096;
/// Ends the list of the samples of a part.
const NONE: usize = usize::MAX;

/// Split the samples into `parts` parts of nearly equal cost.
///
/// Every sample is in one part, and every part has a sample. Each part's indices ascend. The parts come in the order of
/// their costs, heaviest first; of equal parts, the one with the lowest index is first.
///
/// # Errors
/// `Invalid`: a negative length or cost, a total of 2¹²⁸ or more, no parts, more parts than samples, or costs of another
/// number than lengths. With `equal_counts` also a number of samples that is no multiple of `parts`. An interrupt.
pub fn balanced_parts(
    lengths: Integers<'_>,
    parts: usize,
    cost: Cost<'_>,
    equal_counts: bool,
    progress: &mut dyn Progress,
) -> Result<Vec<Group>, PackError> {
    let samples = lengths.len();
    if parts == 0 || parts > samples {
        return invalid(format!(
            "parts is {parts}, and there are {samples} samples; give at least one part, and a sample for each part"
        ));
    }
    if equal_counts && !samples.is_multiple_of(parts) {
        let over = samples % parts;
        return invalid(format!(
            "equal_counts: {samples} samples cannot be split into {parts} parts of one count; leave out {over} of them, \
             add {}, or set equal_counts=False",
            parts - over
        ));
    }
    let mut costs = read(lengths, "lengths", progress)?;
    match cost {
        Cost::Tokens => {}
        Cost::Attention => {
            for (sample, cost) in costs.iter_mut().enumerate() {
                let pairs = cost.checked_add(PAIRS_PER_TOKEN).and_then(|pairs| pairs.checked_mul(*cost));
                *cost = pairs.ok_or_else(|| too_large(sample))?;
            }
        }
        Cost::Given(given) if given.len() == samples => costs = read(given, "cost", progress)?,
        Cost::Given(given) => {
            return invalid(format!(
                "cost has {} entries, and lengths has {samples}; give one cost a sample",
                given.len()
            ));
        }
    }
    total(&costs)?;
    largest_differencing(&costs, parts, equal_counts, progress)
}

/// Split the samples into batches of at most `max_tokens` tokens: into few of them, or into exactly `count`.
///
/// Without `count`, the number of batches is the least that any split can have if largest differencing into so many
/// parts keeps the limit. Otherwise it is that of best-fit decreasing. Batches are ordered as the parts of `balanced_parts`.
///
/// # Errors
/// `Invalid`: no samples, a negative length, a sample above `max_tokens`, or a `count` that is above the number of
/// samples or below the number of batches without it. An interrupt.
pub fn micro_batches(
    lengths: Integers<'_>,
    max_tokens: u64,
    count: Option<usize>,
    progress: &mut dyn Progress,
) -> Result<Vec<Group>, PackError> {
    let lengths = read(lengths, "lengths", progress)?;
    let limit = u128::from(max_tokens);
    if lengths.is_empty() || max_tokens == 0 {
        return invalid(format!(
            "there are {} samples, and max_tokens is {max_tokens}; micro-batches need at least one of each",
            lengths.len()
        ));
    }
    if let Some(sample) = lengths.iter().position(|&length| length > limit) {
        let above = lengths.iter().filter(|&&length| length > limit).count();
        return invalid(format!(
            "lengths[{sample}] is {}, above max_tokens={max_tokens} ({above} of {} samples are, the longest has {} \
             tokens); truncate or drop them, or raise max_tokens",
            lengths[sample],
            lengths.len(),
            lengths.iter().max().unwrap_or(&0),
        ));
    }
    let few = few_batches(&lengths, limit, progress)?;
    let Some(count) = count.filter(|&count| count != few.len()) else {
        return Ok(few);
    };
    if count < few.len() || count > lengths.len() {
        return invalid(format!(
            "{count} batches are needed on every rank, and the {} samples of this rank make {} … {} batches; distribute \
             the samples more evenly over the ranks, or raise max_tokens",
            lengths.len(),
            few.len(),
            lengths.len(),
        ));
    }
    let balanced = largest_differencing(&lengths, count, false, progress)?;
    if is_within(&balanced, &lengths, limit) {
        return Ok(balanced);
    }
    split_batches(few, count, &lengths, progress)
}

/// Batches of at most `limit` tokens, as `micro_batches` describes them.
fn few_batches(lengths: &[u128], limit: u128, progress: &mut dyn Progress) -> Result<Vec<Group>, PackError> {
    // At most one batch a sample, as no sample is above the limit.
    let least = usize::try_from(total(lengths)?.div_ceil(limit)).unwrap_or(lengths.len()).max(1);
    let balanced = largest_differencing(lengths, least, false, progress)?;
    if is_within(&balanced, lengths, limit) {
        return Ok(balanced);
    }
    let fitted = best_fit_decreasing(lengths, limit, progress)?;
    if fitted.len() > least {
        let balanced = largest_differencing(lengths, fitted.len(), false, progress)?;
        if is_within(&balanced, lengths, limit) {
            return Ok(balanced);
        }
    }
    Ok(fitted)
}

/// Split the heaviest batches in two until there are `count`.
fn split_batches(
    mut batches: Vec<Group>,
    count: usize,
    lengths: &[u128],
    progress: &mut dyn Progress,
) -> Result<Vec<Group>, PackError> {
    while batches.len() < count {
        let Some(heaviest) = batches.iter().position(|batch| batch.len() > 1) else {
            break;
        };
        let batch = batches.swap_remove(heaviest);
        let batch_lengths: Vec<u128> = batch.iter().map(|&sample| lengths[sample as usize]).collect();
        for half in largest_differencing(&batch_lengths, 2, false, progress)? {
            batches.push(half.into_iter().map(|position| batch[position as usize]).collect());
        }
        batches = in_order(batches, lengths);
    }
    Ok(batches)
}

/// Put each sample, longest first, into the fullest batch that has room for it.
fn best_fit_decreasing(lengths: &[u128], limit: u128, progress: &mut dyn Progress) -> Result<Vec<Group>, PackError> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_unstable_by_key(|&sample| (Reverse(lengths[sample]), sample));
    let mut batches: Vec<Group> = Vec::new();
    // Free tokens and number of each batch.
    let mut free = BTreeSet::new();
    for (done, sample) in order.into_iter().enumerate() {
        progress.tick("filling batches", done as u64, lengths.len() as u64)?;
        let length = lengths[sample];
        let (room, batch) = free.range((length, 0)..).next().copied().unwrap_or((limit, batches.len()));
        free.remove(&(room, batch));
        free.insert((room - length, batch));
        if batch == batches.len() {
            batches.push(Vec::new());
        }
        batches[batch].push(sample as i64);
    }
    Ok(in_order(batches, lengths))
}

/// Some samples, as a list that begins with `first`. The comparison is by cost, then by number, then by first sample.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Part {
    cost: u128,
    samples: usize,
    first: usize,
    last: usize,
}

/// Parts that share no sample: those that have any, heaviest first.
#[derive(PartialEq, Eq)]
struct Partition {
    /// Cost of the heaviest part above that of the lightest, which may have no sample.
    spread: u128,
    parts: Vec<Part>,
}

impl Partition {
    /// A partition into `count` parts, heaviest first. Parts without samples are left out.
    fn new(parts: Vec<Part>, count: usize) -> Self {
        let heaviest = parts.first().map_or(0, |part| part.cost);
        let lightest = parts.get(count - 1).map_or(0, |part| part.cost);
        Self { spread: heaviest - lightest, parts }
    }

    /// Add the parts of `other`, its lightest to the heaviest of these. `next` has the sample after each in its part.
    fn join(&mut self, mut other: Self, count: usize, next: &mut [usize]) {
        let mut parts = std::mem::take(&mut self.parts);
        let pairs = (parts.len() + other.parts.len()).saturating_sub(count);
        let added = other.parts.split_off(other.parts.len() - pairs);
        let from = parts.len() - pairs;
        for (part, added) in parts[from..].iter_mut().zip(added.into_iter().rev()) {
            next[part.last] = added.first;
            part.last = added.last;
            part.cost += added.cost;
            part.samples += added.samples;
        }
        parts.append(&mut other.parts);
        // A stable sort takes linear time where the list is two ordered runs.
        parts.sort_by(|left, right| right.cmp(left));
        *self = Self::new(parts, count);
    }
}

impl Ord for Partition {
    fn cmp(&self, other: &Self) -> Ordering {
        self.spread.cmp(&other.spread).then_with(|| self.parts.first().cmp(&other.parts.first()))
    }
}

impl PartialOrd for Partition {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Split samples with these costs into `parts` parts, at most as many as samples, by largest differencing.
fn largest_differencing(
    costs: &[u128],
    parts: usize,
    equal_counts: bool,
    progress: &mut dyn Progress,
) -> Result<Vec<Group>, PackError> {
    let mut next = memory::with_capacity(costs.len())?;
    next.resize(costs.len(), NONE);
    let mut singles = memory::with_capacity(costs.len())?;
    singles.extend(costs.iter().enumerate().map(|(sample, &cost)| Part {
        cost,
        samples: 1,
        first: sample,
        last: sample,
    }));
    let mut partitions = memory::with_capacity(costs.len())?;
    if equal_counts {
        // A partition with one sample in every part keeps the counts equal, whatever it is joined with.
        singles.sort_unstable_by(|left, right| right.cmp(left));
        partitions.extend(singles.chunks(parts).map(|chunk| Partition::new(chunk.to_vec(), parts)));
    } else {
        partitions.extend(singles.iter().map(|&part| Partition::new(vec![part], parts)));
    }
    drop(singles);
    let total = partitions.len() as u64;
    let mut heap = BinaryHeap::from(partitions);
    let mut widest = heap.pop();
    while let (Some(partition), Some(second)) = (&mut widest, heap.pop()) {
        progress.tick("balancing", total - heap.len() as u64, total)?;
        partition.join(second, parts, &mut next);
        if let Some(mut top) = heap.peek_mut().filter(|top| **top > *partition) {
            std::mem::swap(&mut *top, partition);
        }
    }
    let groups = widest.into_iter().flat_map(|partition| partition.parts).map(|part| {
        let mut group = Vec::with_capacity(part.samples);
        let mut sample = part.first;
        while sample != NONE {
            group.push(sample as i64);
            sample = next[sample];
        }
        group
    });
    Ok(in_order(groups.collect(), costs))
}

/// Sort the samples of each group, and the groups by cost, heaviest first.
fn in_order(mut groups: Vec<Group>, costs: &[u128]) -> Vec<Group> {
    groups.iter_mut().for_each(|group| group.sort_unstable());
    groups.sort_by_cached_key(|group| (Reverse(cost_of(group, costs)), group.first().copied()));
    groups
}

/// Whether the first of the groups, which is the heaviest, is within the limit.
fn is_within(groups: &[Group], lengths: &[u128], limit: u128) -> bool {
    groups.first().is_none_or(|group| cost_of(group, lengths) <= limit)
}

fn cost_of(group: &[i64], costs: &[u128]) -> u128 {
    group.iter().map(|&sample| costs[sample as usize]).sum()
}

/// The sum of all costs.
fn total(costs: &[u128]) -> Result<u128, PackError> {
    let mut sum = 0u128;
    for (sample, &cost) in costs.iter().enumerate() {
        sum = sum.checked_add(cost).ok_or_else(|| too_large(sample))?;
    }
    Ok(sum)
}

fn too_large(sample: usize) -> PackError {
    PackError::Invalid(format!(
        "the costs of samples 0 … {sample} add up to 2^128 or more; give smaller lengths or costs"
    ))
}

/// The values of a column, none of them negative.
fn read(column: Integers<'_>, name: &str, progress: &mut dyn Progress) -> Result<Vec<u128>, PackError> {
    let mut values = memory::with_capacity(column.len())?;
    for position in 0..column.len() {
        if position.is_multiple_of(WINDOW) {
            progress.tick("reading", position as u64, column.len() as u64)?;
        }
        let value = column.as_given(column.get(position));
        match u128::try_from(value) {
            Ok(value) => values.push(value),
            Err(_) => return invalid(format!("{name}[{position}] is {value}; it must be at least 0")),
        }
    }
    Ok(values)
}

fn invalid<T>(message: String) -> Result<T, PackError> {
    Err(PackError::Invalid(message))
}

//! The first pass over the lengths and costs: checks, sums and hashes them, in the order they lie in memory.

use crate::error::PackError;
use crate::fingerprint::{self, ColumnHash, LEAF, ParameterHash};
use crate::integers::Integers;
use crate::ordered_samples::SampleLengths;
use crate::plan::PlanInteger;
use crate::progress::Progress;
use crate::request::PackRequest;
use crate::simd::vectorized;
use crate::threads::Threads;

/// Leaves that a thread scans between two ticks: a few milliseconds.
const LEAVES_A_TICK: usize = 256;

/// What the first pass found in the lengths of one stream.
pub(crate) struct ScanResult {
    pub(crate) tokens: u64,
    pub(crate) longest: u64,
    /// Samples with one token or more.
    pub(crate) filled: u64,
    /// Samples and hash of each part.
    pub(crate) parts: Vec<(u64, u128)>,
}

/// What one leaf of a column holds.
#[derive(Default)]
struct LeafSummary {
    number: usize,
    tokens: u128,
    longest: u64,
    filled: usize,
    digest: u128,
    /// The bitwise or of all values.
    seen: u64,
}

/// Check, sum and hash all lengths of a stream.
///
/// # Errors
/// `NegativeLength` or `TotalTooLarge` with the first sample at fault; an interrupt.
pub(crate) fn scan(
    lengths: &SampleLengths<'_>,
    threads: &Threads,
    progress: &mut dyn Progress,
) -> Result<ScanResult, PackError> {
    let mut scan = ScanResult { tokens: 0, longest: 0, filled: 0, parts: Vec::with_capacity(lengths.parts().len()) };
    for (number, part) in lengths.parts().iter().enumerate() {
        let dataset = lengths.dataset_id() + number;
        let mut hash = ColumnHash::default();
        for_each_leaf(part, threads, progress, "checking lengths", |leaf| {
            let sum = u64::try_from(u128::from(scan.tokens) + leaf.tokens).ok().filter(|&sum| sum < 1 << 63);
            let (Some(sum), 0) = (sum, leaf.seen >> 63) else {
                return Err(first_bad_length(part, dataset, leaf.number * LEAF, scan.tokens));
            };
            hash.push(leaf.digest);
            scan.tokens = sum;
            scan.longest = scan.longest.max(leaf.longest);
            scan.filled += leaf.filled as u64;
            Ok(())
        })?;
        scan.parts.push((part.len() as u64, hash.finish(part.len() as u64)));
    }
    Ok(scan)
}

/// The hash of a column of any integers.
pub(crate) fn hash_column(
    column: &Integers<'_>,
    threads: &Threads,
    progress: &mut dyn Progress,
) -> Result<u128, PackError> {
    let mut hash = ColumnHash::default();
    for_each_leaf(column, threads, progress, "hashing the order", |leaf| {
        hash.push(leaf.digest);
        Ok(())
    })?;
    Ok(hash.finish(column.len() as u64))
}

/// Check the costs of a dataset, and hash them.
///
/// # Errors
/// `BadCost` with the first sample at fault; an interrupt.
fn hash_costs(
    column: &Integers<'_>,
    dataset: usize,
    threads: &Threads,
    progress: &mut dyn Progress,
) -> Result<u128, PackError> {
    let mut hash = ColumnHash::default();
    for_each_leaf(column, threads, progress, "checking costs", |leaf| {
        if leaf.seen >> 63 != 0 {
            let start = leaf.number * LEAF;
            let is_bad = |&sample: &usize| column.get(sample) >> 63 != 0;
            let sample = (start..column.len().min(start + LEAF)).find(is_bad).ok_or(PackError::InputChanged)?;
            return Err(PackError::BadCost { dataset, sample, value: column.as_given(column.get(sample)) });
        }
        hash.push(leaf.digest);
        Ok(())
    })?;
    Ok(hash.finish(column.len() as u64))
}

/// Read all leaves of a column, and hand them to `take` in order.
fn for_each_leaf(
    column: &Integers<'_>,
    threads: &Threads,
    progress: &mut dyn Progress,
    phase: &'static str,
    mut take: impl FnMut(&LeafSummary) -> Result<(), PackError>,
) -> Result<(), PackError> {
    let leaves = column.len().div_ceil(LEAF);
    let step = LEAVES_A_TICK * threads.count();
    let mut window: Vec<LeafSummary> = Vec::new();
    for begin in (0..leaves).step_by(step) {
        progress.tick(phase, (begin * LEAF) as u64, column.len() as u64)?;
        window.clear();
        window.extend((begin..leaves.min(begin + step)).map(|number| LeafSummary { number, ..LeafSummary::default() }));
        threads.for_each(&mut window, |_, leaf| leaf.read(column));
        window.iter().try_for_each(&mut take)?;
    }
    Ok(())
}

impl LeafSummary {
    fn read(&mut self, column: &Integers<'_>) {
        let start = self.number * LEAF;
        let mut buffer = [0u32; LEAF];
        let narrow = &mut buffer[..LEAF.min(column.len() - start)];
        self.seen = column.read(start, narrow);
        if self.seen <= u64::from(u32::MAX) {
            let (tokens, longest, filled) = vectorized(|| {
                narrow.iter().fold((0u64, 0u32, 0u32), |(sum, longest, filled), &length| {
                    (sum + u64::from(length), longest.max(length), filled + u32::from(length != 0))
                })
            });
            (self.tokens, self.longest, self.filled) = (tokens.into(), longest.into(), filled as usize);
            self.digest = fingerprint::leaf(narrow);
            return;
        }
        let mut wide = vec![0u64; narrow.len()];
        self.seen = column.read(start, &mut wide);
        self.tokens = wide.iter().map(|&length| u128::from(length)).sum();
        self.longest = wide.iter().copied().max().unwrap_or(0);
        self.filled = wide.iter().filter(|&&length| length != 0).count();
        self.digest = fingerprint::leaf(&wide);
    }
}

/// The error that names the first bad length of a leaf; `tokens` is the sum of all lengths before `start`.
#[cold]
fn first_bad_length(part: &Integers<'_>, dataset: usize, start: usize, mut tokens: u64) -> PackError {
    for sample in start..part.len().min(start + LEAF) {
        let value = part.get(sample);
        if value >> 63 != 0 && part.kind().is_signed() {
            return PackError::NegativeLength { dataset, sample, value: value as i64 };
        }
        match tokens.checked_add(value).filter(|&sum| sum < 1 << 63) {
            Some(sum) => tokens = sum,
            None => return PackError::TotalTooLarge { dataset, sample },
        }
    }
    PackError::InputChanged
}

/// The costs of a request.
pub(crate) struct CheckedCosts<'a> {
    /// Laid out as the lengths are.
    streams: Vec<SampleLengths<'a>>,
    max_cost: u64,
    /// Hash of each dataset's costs.
    digests: Vec<u128>,
}

/// The costs of the samples of one stream.
#[derive(Clone, Copy)]
pub(crate) struct StreamCosts<'r> {
    samples: &'r SampleLengths<'r>,
    /// What the samples of a pack cost together at most.
    pub(crate) max_cost: u64,
}

impl<'a> CheckedCosts<'a> {
    /// Check and hash the costs of a request, if it has any.
    ///
    /// # Errors
    /// `BadCost`; an interrupt.
    pub(crate) fn new(
        request: &PackRequest<'a>,
        threads: &Threads,
        progress: &mut dyn Progress,
    ) -> Result<Option<Self>, PackError> {
        let (Some(columns), Some(max_cost)) = (&request.costs, request.max_cost) else { return Ok(None) };
        let digests = columns
            .iter()
            .enumerate()
            .map(|(dataset, column)| hash_costs(column, dataset, threads, progress))
            .collect::<Result<_, _>>()?;
        let streams = SampleLengths::streams(columns, request.global_pack);
        Ok(Some(Self { streams, max_cost, digests }))
    }

    /// Add all that determines the plan.
    pub(crate) fn push_to(&self, hash: &mut ParameterHash) {
        hash.push("max_cost", &self.max_cost.to_le_bytes());
        for digest in &self.digests {
            hash.push("costs", &digest.to_le_bytes());
        }
    }

    pub(crate) fn max_cost(&self) -> u64 {
        self.max_cost
    }

    /// The costs of stream `stream`, which exists.
    pub(crate) fn of_stream(&self, stream: usize) -> StreamCosts<'_> {
        StreamCosts { samples: &self.streams[stream], max_cost: self.max_cost }
    }
}

impl StreamCosts<'_> {
    /// The cost of one sample, which exists.
    pub(crate) fn of<P: PlanInteger>(self, sample: P) -> u64 {
        self.samples.get(sample.widen() as usize)
    }
}

//! The first pass: every length is checked, summed and hashed, in the order it lies in memory, and copied where that
//! is of use.

use crate::crew::Crew;
use crate::error::PackError;
use crate::fingerprint::{self, ColumnHash, LEAF};
use crate::integers::{Integers, Word};
use crate::processor::widest;
use crate::watch::Watch;

/// Leaves between two looks at the watch: a few milliseconds on one thread.
const LEAVES_A_TICK: usize = 256;
/// Leaves that a thread scans at a time.
const LEAVES_A_RUN: usize = 16;

/// Lengths that are cut as one stream: one dataset, or several seen as one.
pub(crate) struct Dataset<'a> {
    parts: Vec<Integers<'a>>,
    /// Index of each part's first sample.
    starts: Vec<usize>,
    len: usize,
    id: usize,
}

impl<'a> Dataset<'a> {
    /// Lengths of `parts` end to end, as dataset `id` of the plan.
    pub(crate) fn new(parts: Vec<Integers<'a>>, id: usize) -> Self {
        let mut starts = Vec::with_capacity(parts.len());
        let mut len = 0usize;
        for part in &parts {
            starts.push(len);
            len += part.len();
        }
        Self { parts, starts, len, id }
    }

    /// Samples.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn id(&self) -> usize {
        self.id
    }

    /// The lengths, if they are one part.
    pub(super) fn only_part(&self) -> Option<Integers<'a>> {
        match self.parts[..] {
            [only] => Some(only),
            _ => None,
        }
    }

    /// As `Integers::read`, across parts.
    pub(crate) fn read<W: Word>(&self, start: usize, out: &mut [W]) -> u64 {
        let mut seen = 0u64;
        let mut done = 0usize;
        let mut part = self.part_of(start);
        while done < out.len() {
            let within = start + done - self.starts[part];
            let take = (self.parts[part].len() - within).min(out.len() - done);
            seen |= self.parts[part].read(within, &mut out[done..done + take]);
            done += take;
            part += 1;
        }
        seen
    }

    fn part_of(&self, index: usize) -> usize {
        self.starts.partition_point(|&start| start <= index).saturating_sub(1)
    }

    /// As `Integers::gather`, across parts.
    pub(crate) fn gather<W: Word>(&self, indices: &[W], out: &mut [W]) -> u64 {
        self.gather_while(indices, out, false, |_, _| ())
    }

    /// As `Integers::gather_while`, across parts.
    pub(crate) fn gather_while<W: Word>(
        &self,
        indices: &[W],
        out: &mut [W],
        are_asked: bool,
        mut each: impl FnMut(usize, u64),
    ) -> u64 {
        if let [only] = &self.parts[..] {
            return only.gather_while(indices, out, are_asked, each);
        }
        let mut seen = 0u64;
        for (position, (&index, slot)) in indices.iter().zip(out).enumerate() {
            each(position, index.widen());
            let index = index.widen() as usize;
            let part = self.part_of(index);
            let value = self.parts[part].get(index - self.starts[part]);
            seen |= value;
            *slot = W::truncate(value);
        }
        seen
    }
}

/// What the first pass found.
pub(super) struct Scan {
    pub(super) tokens: u64,
    pub(super) longest: u64,
    /// Samples and hash of each part.
    pub(super) parts: Vec<(u64, u128)>,
}

/// One leaf's share of a scan.
#[derive(Default)]
struct LeafScan {
    tokens: u128,
    longest: u64,
    digest: u128,
    seen: u64,
}

/// Check, sum and hash all lengths of a dataset, and copy them into `copy`, which is empty or has room for those of the
/// only part. It means nothing where a length does not fit.
pub(super) fn scan(
    dataset: &Dataset<'_>,
    copy: &mut [u16],
    crew: &Crew,
    watch: &mut dyn Watch,
) -> Result<Scan, PackError> {
    debug_assert!(copy.is_empty() || dataset.parts.len() == 1, "a copy of the only part");
    let mut result = Scan { tokens: 0, longest: 0, parts: Vec::with_capacity(dataset.parts.len()) };
    for (number, part) in dataset.parts.iter().enumerate() {
        let id = dataset.id + number;
        let mut hash = ColumnHash::default();
        let mut failed = None;
        for_leaves(part, copy, crew, watch, "checking lengths", |start, leaf| {
            if leaf.seen >> 63 != 0 {
                failed.get_or_insert_with(|| bad_length(part, id, start));
                return;
            }
            hash.push(leaf.digest);
            result.longest = result.longest.max(leaf.longest);
            match u64::try_from(u128::from(result.tokens) + leaf.tokens) {
                Ok(sum) if sum < 1 << 63 => result.tokens = sum,
                _ => {
                    failed.get_or_insert_with(|| overflow(part, id, start, result.tokens));
                }
            }
        })?;
        if let Some(error) = failed {
            return Err(error);
        }
        result.parts.push((part.len() as u64, hash.finish(part.len() as u64)));
    }
    Ok(result)
}

/// The hash of a column of any integers.
pub(super) fn hash_column(column: &Integers<'_>, crew: &Crew, watch: &mut dyn Watch) -> Result<u128, PackError> {
    let mut hash = ColumnHash::default();
    for_leaves(column, &mut [], crew, watch, "hashing the order", |_, leaf| hash.push(leaf.digest))?;
    Ok(hash.finish(column.len() as u64))
}

/// Scan all leaves and hand them to `take` in their order. `copy` as in `scan`.
fn for_leaves(
    column: &Integers<'_>,
    mut copy: &mut [u16],
    crew: &Crew,
    watch: &mut dyn Watch,
    phase: &'static str,
    mut take: impl FnMut(usize, LeafScan),
) -> Result<(), PackError> {
    let leaves = column.len().div_ceil(LEAF);
    let bounds = |leaf: usize| (leaf * LEAF, LEAF.min(column.len() - leaf * LEAF));
    let step = LEAVES_A_TICK * crew.threads();
    let mut scans = Vec::new();
    for begin in (0..leaves).step_by(step) {
        watch.tick(phase, (begin * LEAF) as u64, column.len() as u64)?;
        scans.resize_with(step.min(leaves - begin), LeafScan::default);
        let mut runs: Vec<(&mut [LeafScan], &mut [u16])> = Vec::new();
        for run in scans.chunks_mut(LEAVES_A_RUN) {
            let (own, rest) = copy.split_at_mut(copy.len().min(run.len() * LEAF));
            runs.push((run, own));
            copy = rest;
        }
        crew.each(&mut runs, |_, number, (run, copy)| {
            let mut scratch = Vec::new();
            let mut copies = copy.chunks_mut(LEAF);
            for (leaf, scan) in (begin + number * LEAVES_A_RUN..).zip(run.iter_mut()) {
                *scan = scan_leaf(column, bounds(leaf), copies.next().unwrap_or_default(), &mut scratch);
            }
        });
        for (leaf, scan) in (begin..).zip(scans.drain(..)) {
            take(bounds(leaf).0, scan);
        }
    }
    Ok(())
}

fn scan_leaf(
    column: &Integers<'_>,
    (start, count): (usize, usize),
    copy: &mut [u16],
    scratch: &mut Vec<u32>,
) -> LeafScan {
    scratch.resize(LEAF, 0);
    let narrow = &mut scratch[..count];
    let seen = column.read(start, narrow);
    if seen <= u64::from(u32::MAX) {
        widest(|| copy.iter_mut().zip(&*narrow).for_each(|(slot, &length)| *slot = length as u16));
        let (tokens, longest) = widest(|| {
            narrow.iter().fold((0u64, 0u32), |(sum, longest), &length| (sum + u64::from(length), longest.max(length)))
        });
        return LeafScan { tokens: tokens.into(), longest: longest.into(), digest: fingerprint::leaf(narrow), seen };
    }
    let mut wide = vec![0u64; count];
    let seen = column.read(start, &mut wide);
    // Lengths that another process changes may fit by now.
    copy.iter_mut().zip(&wide).for_each(|(slot, &length)| *slot = length as u16);
    LeafScan {
        tokens: wide.iter().map(|&length| u128::from(length)).sum(),
        longest: wide.iter().copied().max().unwrap_or(0),
        digest: fingerprint::leaf(&wide),
        seen,
    }
}

#[cold]
fn bad_length(part: &Integers<'_>, dataset: usize, start: usize) -> PackError {
    for sample in start..part.len().min(start + LEAF) {
        let value = part.get(sample);
        if value >> 63 != 0 {
            return if part.kind().is_signed() {
                PackError::NegativeLength { dataset, sample, value: value as i64 }
            } else {
                PackError::TotalTooLarge { dataset, sample }
            };
        }
    }
    PackError::InputChanged
}

#[cold]
fn overflow(part: &Integers<'_>, dataset: usize, start: usize, before: u64) -> PackError {
    let mut tokens = before;
    for sample in start..part.len().min(start + LEAF) {
        match tokens.checked_add(part.get(sample)).filter(|&sum| sum < 1 << 63) {
            Some(sum) => tokens = sum,
            None => return PackError::TotalTooLarge { dataset, sample },
        }
    }
    PackError::InputChanged
}

//! Sorts the samples of a stream by length, by counting.
//!
//! Invariants: inputs that change between the two passes are an error, or give another plan of the same counts.

use std::ops::Range;

use super::items::{Counts, SampleParts};
use crate::error::PackError;
use crate::fingerprint::ColumnHash;
use crate::inputs::{RandomState, SampleLengths, SampleOrder};
use crate::memory;
use crate::packer::{IndexSource, Packer, SampleReader, ScanResult};
use crate::plan::PlanInteger;
use crate::progress::Progress;
use crate::request::WholeOptions;

/// Items or lengths that are shuffled between two ticks.
const SHUFFLED_A_TICK: usize = 1 << 16;

/// The items of a stream, the longest first; those of one length in the order of their samples.
pub(super) struct SortedSamples<P> {
    /// The sample of each item.
    pub(super) samples: Vec<P>,
    /// For each length, where its run of items ends.
    ends: Vec<P>,
    /// Samples with parts of `max_length` tokens, which are no items: each with the number of such parts up to its last.
    pub(super) full_parts: Vec<(P, u64)>,
    /// Whether an item may be the last part of a sample.
    pub(super) has_last_parts: bool,
}

/// What is sorted, and how.
pub(super) struct Sorting<'r> {
    pub(super) packer: &'r Packer<'r>,
    pub(super) options: &'r WholeOptions,
    pub(super) stream: &'r SampleLengths<'r>,
    pub(super) scan: &'r ScanResult,
}

impl Sorting<'_> {
    fn indices<P: PlanInteger>(&self) -> IndexSource<'_, P> {
        match self.packer.request.order {
            SampleOrder::Given(order) => IndexSource::Given(order),
            _ => IndexSource::Natural(self.stream.len()),
        }
    }

    fn parts(&self, length: u64) -> Result<SampleParts, PackError> {
        SampleParts::new(length, self.packer.request.max_length, self.options.overlong)
    }

    /// Sort the samples, and count them. An order that was given is checked and hashed.
    ///
    /// # Errors
    /// A bad order; `InputChanged`; memory that is refused; an interrupt.
    pub(super) fn sort<P: PlanInteger>(
        &self,
        counts: &mut Counts,
        order_hash: &mut ColumnHash,
        progress: &mut dyn Progress,
    ) -> Result<SortedSamples<P>, PackError> {
        let max_length = self.packer.request.max_length;
        let longest = self.scan.longest.min(max_length) as usize;
        let one = P::truncate(1);
        // How many items there are of each length; then where they end.
        let mut ends = memory::zeroed::<P>(longest + 2)?;
        let mut full_parts = Vec::new();
        let (mut tokens, mut parts_before) = (0u64, 0u64);
        let has_last_parts = self.scan.longest > max_length;
        let threads = &self.packer.threads;
        let reader = SampleReader::new(self.stream, self.indices::<P>(), threads)?;
        reader.for_each_chunk("counting lengths", threads, progress, |chunk, _| {
            order_hash.push(chunk.order_leaf);
            tokens = tokens.saturating_add(chunk.tokens);
            for (&sample, &length) in chunk.indices.iter().zip(&chunk.lengths) {
                let length = length.widen();
                if length.wrapping_sub(1) < longest as u64 {
                    let count = &mut ends[length as usize];
                    *count = count.plus(one);
                    continue;
                }
                let parts = self.parts(length)?;
                counts.note_unusual(length, max_length, parts);
                if parts.full > 0 {
                    parts_before = parts_before.saturating_add(parts.full);
                    full_parts.push((sample, parts_before));
                }
                if parts.last > 0 {
                    let count = ends.get_mut(parts.last as usize).ok_or(PackError::InputChanged)?;
                    *count = count.plus(one);
                }
            }
            Ok(())
        })?;
        if tokens > self.scan.tokens {
            return Err(PackError::InputChanged);
        }
        counts.tokens += tokens;
        let mut next = memory::zeroed::<P>(longest + 2)?;
        let mut end = 0u64;
        for length in (1..=longest).rev() {
            let count = ends[length].widen();
            next[length] = P::truncate(end);
            end += count;
            ends[length] = P::truncate(end);
            let padding = self.options.aligned(length as u64) - length as u64;
            counts.metadata.padding_align = counts.metadata.padding_align.saturating_add(padding * count);
        }
        let mut samples = memory::zeroed::<P>(usize::try_from(end).unwrap_or(usize::MAX))?;
        let again = SampleReader { lengths: self.stream, indices: self.indices::<P>(), used: None };
        again.for_each_chunk("sorting by length", threads, progress, |chunk, _| {
            for (&sample, &length) in chunk.indices.iter().zip(&chunk.lengths) {
                let length = length.widen();
                let length = if length.wrapping_sub(1) < longest as u64 { length } else { self.parts(length)?.last };
                if length > 0 {
                    let slot = next.get_mut(length as usize).ok_or(PackError::InputChanged)?;
                    *samples.get_mut(slot.widen() as usize).ok_or(PackError::InputChanged)? = sample;
                    *slot = slot.plus(one);
                }
            }
            Ok(())
        })?;
        if next != ends {
            return Err(PackError::InputChanged);
        }
        Ok(SortedSamples { samples, ends, full_parts, has_last_parts })
    }
}

impl<P: PlanInteger> SortedSamples<P> {
    /// The lengths of items that there may be, the longest first.
    pub(super) fn lengths(&self) -> impl Iterator<Item = usize> + use<P> {
        (1..self.ends.len() - 1).rev()
    }

    /// Where the items of one length lie.
    pub(super) fn run(&self, length: usize) -> Range<usize> {
        self.ends[length + 1].widen() as usize..self.ends[length].widen() as usize
    }

    /// Packs of one part each.
    pub(super) fn count_full_parts(&self) -> u64 {
        self.full_parts.last().map_or(0, |&(_, parts)| parts)
    }

    /// Shuffle the items of each length, the longest first.
    ///
    /// # Errors
    /// An interrupt.
    pub(super) fn shuffle(&mut self, random: &mut RandomState, progress: &mut dyn Progress) -> Result<(), PackError> {
        let mut since_tick = 0usize;
        for length in self.lengths() {
            let run = self.run(length);
            since_tick += 1 + run.len();
            if since_tick >= SHUFFLED_A_TICK {
                since_tick = 0;
                progress.tick("shuffling", run.start as u64, self.samples.len() as u64)?;
            }
            if run.len() > 1 {
                random.shuffle(&mut self.samples[run], progress)?;
            }
        }
        Ok(())
    }
}

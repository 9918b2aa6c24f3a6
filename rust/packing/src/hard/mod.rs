//! Hard packing: the ordered samples are one stream of tokens, cut every `max_length`.
//!
//! Source of the method: concatenate-and-cut as GPT-style pre-training does it, with the array layout of XTuner's
//! HardPackDataset. A first pass checks, sums and hashes the lengths (`scan`). A second pass reads the ordered samples a
//! chunk at a time (`samples`), cuts each chunk into packs (`cutter`), and appends the packs to the plan (`output`).
//!
//! Working memory beyond inputs and outputs: at most 8 MiB a thread and 16 MiB. With a given order, a bit a sample for
//! each thread, or for all of them where that is more than 32 MiB. With a seed, one index a sample.

mod cutter;
mod output;
mod repeated_samples;
mod request;
mod samples;
mod scan;
mod token_stream_packer;

use std::path::Path;

use crate::error::PackError;
use crate::fingerprint::{Fingerprint, LEAF, ParameterHash};
use crate::folder::{FolderWriter, check_disk_space};
use crate::inputs::{RandomState, SampleLengths, SampleOrder};
use crate::memory;
use crate::plan::{FORMAT_VERSION, OrderKind, Plan, PlanInteger, PlanMetadata};
use crate::progress::Progress;
use crate::threads::Threads;

use output::{MemoryOutput, PlanOutput, WidthProbe};
pub use request::PackRequest;
use samples::IndexSource;
use scan::ScanResult;
use token_stream_packer::{FEW_SAMPLES, TokenStreamPacker};

/// Packs a request whose lengths were checked and hashed.
pub struct HardPacker<'a> {
    request: PackRequest<'a>,
    streams: Vec<SampleLengths<'a>>,
    /// One for each stream.
    scans: Vec<ScanResult>,
    threads: Threads,
    expected_fingerprint: Option<String>,
}

/// The fingerprint of the plan that a request asks for.
///
/// # Errors
/// As `HardPacker::new`. The order is only hashed, not checked.
pub fn fingerprint(request: PackRequest<'_>, progress: &mut dyn Progress) -> Result<Fingerprint, PackError> {
    let packer = HardPacker::new(request, progress)?;
    let order_digest = match packer.request.order {
        SampleOrder::Given(order) => scan::hash_column(&order, &packer.threads, progress)?,
        _ => 0,
    };
    Ok(packer.fingerprint(order_digest))
}

impl<'a> HardPacker<'a> {
    /// Check and hash the lengths.
    ///
    /// # Errors
    /// Lengths that are negative or add up to 2⁶³ tokens, a bad `max_length`, an order with several datasets; an
    /// interrupt.
    pub fn new(request: PackRequest<'a>, progress: &mut dyn Progress) -> Result<Self, PackError> {
        request.check()?;
        let streams = SampleLengths::streams(&request.lengths, request.global_pack);
        let samples = request.lengths.iter().fold(0usize, |sum, lengths| sum.saturating_add(lengths.len()));
        // More threads than leaves would find nothing to do.
        let threads = if samples > FEW_SAMPLES { request.threads.min(samples.div_ceil(LEAF)) } else { 1 };
        let threads = Threads::new(threads);
        let scans: Vec<ScanResult> =
            streams.iter().map(|stream| scan::scan(stream, &threads, progress)).collect::<Result<_, _>>()?;
        // The sum over all streams has to fit too.
        let mut total = 0u64;
        for (dataset, scan) in scans.iter().enumerate() {
            total = total
                .checked_add(scan.tokens)
                .filter(|&sum| sum < 1 << 63)
                .ok_or(PackError::TotalTooLarge { dataset, sample: streams[dataset].len().saturating_sub(1) })?;
        }
        Ok(Self { request, streams, scans, threads, expected_fingerprint: None })
    }

    /// Compute no other plan than the one with this fingerprint, which the same inputs gave before.
    ///
    /// # Errors
    /// `InputChanged` when the inputs give another plan by now. With an order, which is hashed as it is read, `pack` and
    /// `write` raise it, before anything is published.
    pub fn expect_fingerprint(mut self, fingerprint: &str) -> Result<Self, PackError> {
        self.expected_fingerprint = Some(fingerprint.into());
        match self.request.order {
            SampleOrder::Given(_) => Ok(self),
            SampleOrder::Natural | SampleOrder::Seed(_) => {
                self.check_fingerprint(&self.fingerprint(0).to_string()).map(|()| self)
            }
        }
    }

    fn check_fingerprint(&self, found: &str) -> Result<(), PackError> {
        let is_other = self.expected_fingerprint.as_deref().is_some_and(|expected| expected != found);
        if is_other { Err(PackError::InputChanged) } else { Ok(()) }
    }

    fn fingerprint(&self, order_digest: u128) -> Fingerprint {
        let mut hash = ParameterHash::new("tundish plan");
        hash.push("format_version", &FORMAT_VERSION.to_le_bytes());
        hash.push("mode", b"hard");
        hash.push("max_length", &self.request.max_length.to_le_bytes());
        hash.push("drop_last", &[u8::from(self.request.drop_last)]);
        hash.push("global_pack", &[u8::from(self.request.global_pack)]);
        match self.request.order {
            SampleOrder::Natural => hash.push("order", b"natural"),
            SampleOrder::Seed(seed) => hash.push("seed", &seed.to_le_bytes()),
            SampleOrder::Given(_) => hash.push("order", &order_digest.to_le_bytes()),
        }
        for scan in &self.scans {
            for (samples, digest) in &scan.parts {
                hash.push("samples", &samples.to_le_bytes());
                hash.push("lengths", &digest.to_le_bytes());
            }
        }
        hash.finish()
    }

    /// The most packs and pieces that the plan can have.
    fn most(&self) -> (u64, u64) {
        let (mut packs, mut pieces) = (0u64, 0u64);
        for (stream, scan) in self.streams.iter().zip(&self.scans) {
            let closed = scan.tokens / self.request.max_length;
            let has_tail = !self.request.drop_last && scan.tokens % self.request.max_length != 0;
            packs = packs.saturating_add(closed + u64::from(has_tail));
            let samples = match self.request.order {
                SampleOrder::Given(order) => order.len(),
                _ => stream.len(),
            };
            // A piece begins with a sample or with a pack; the open pack is among the samples.
            pieces = pieces.saturating_add(closed).saturating_add(samples as u64);
        }
        (packs, pieces)
    }

    /// The least packs and pieces that the plan can have, whatever the order is.
    fn least(&self) -> (u64, u64) {
        let max_length = self.request.max_length;
        let (mut packs, mut pieces) = (0u64, 0u64);
        for (stream, scan) in self.streams.iter().zip(&self.scans) {
            let left_out = match self.request.order {
                SampleOrder::Given(order) => (stream.len() - order.len()) as u64,
                _ => 0,
            };
            // Of the tokens that are left when an order leaves samples out, nothing is known.
            let (tokens, tail) =
                if left_out == 0 { (scan.tokens, scan.tokens % max_length) } else { (0, max_length - 1) };
            let (closed, dropped) =
                if self.request.drop_last { (tokens / max_length, tail) } else { (tokens.div_ceil(max_length), 0) };
            packs = packs.saturating_add(closed);
            // A sample that has tokens is a piece, unless it lies in the dropped tail, with one token or more.
            pieces = pieces.saturating_add(scan.filled.saturating_sub(left_out).saturating_sub(dropped).max(closed));
        }
        (packs, pieces)
    }

    /// Whether the plan is computed in 32 bits: all sums that the cutter makes fit.
    fn is_narrow(&self) -> bool {
        let largest = i32::MAX as u64;
        let (packs, pieces) = self.most();
        let longest = self.scans.iter().map(|scan| scan.longest).max().unwrap_or(0);
        packs <= largest
            && pieces <= largest
            && self.request.max_length.saturating_add(longest) <= largest
            && self.streams.iter().all(|stream| stream.len() as u64 <= largest)
    }

    /// Which columns have 8 bytes a value, if the plan is not narrow: a pass over all samples that keeps nothing.
    fn wide_columns(&self, progress: &mut dyn Progress) -> Result<[bool; 6], PackError> {
        let mut probe = WidthProbe::default();
        self.run::<i64>(&mut probe, progress)?;
        Ok(probe.wide_columns())
    }

    /// Compute the plan in memory.
    ///
    /// # Errors
    /// A bad order; a plan larger than the machine's memory; an interrupt.
    pub fn pack(&self, progress: &mut dyn Progress) -> Result<Plan, PackError> {
        let (packs, pieces) = self.most();
        let is_narrow = self.is_narrow();
        let bytes = (u128::from(packs) * 5 + u128::from(pieces)) * if is_narrow { 4 } else { 8 };
        let available = memory::physical_bytes();
        if bytes > u128::from(available) {
            return Err(PackError::TooLarge { bytes, packs, pieces, available });
        }
        let computed = if is_narrow {
            MemoryOutput::new(packs, pieces, [false; 6]).and_then(|output| self.pack_into::<i32>(output, progress))
        } else {
            let wide = self.wide_columns(progress)?;
            MemoryOutput::new(packs, pieces, wide).and_then(|output| self.pack_into::<i64>(output, progress))
        };
        computed.map_err(|error| match error {
            PackError::OutOfMemory { bytes, .. } => PackError::OutOfMemory { bytes, plan_in_memory: true },
            other => other,
        })
    }

    fn pack_into<P: PlanInteger>(
        &self,
        mut output: MemoryOutput,
        progress: &mut dyn Progress,
    ) -> Result<Plan, PackError> {
        let metadata = self.run::<P>(&mut output, progress)?;
        Ok(Plan { columns: output.into_columns(), metadata })
    }

    /// Compute the plan straight into a folder that is published when it is complete and durable.
    ///
    /// # Errors
    /// As `pack`; `NoRoom`, before any work; `PackError::Commit` when the folder cannot be written or `target` is taken.
    pub fn write(&self, target: &Path, progress: &mut dyn Progress) -> Result<PlanMetadata, PackError> {
        let (packs, pieces) = self.least();
        check_disk_space(target, packs, pieces)?;
        if self.is_narrow() {
            self.write_columns::<i32>(target, [false; 6], progress)
        } else {
            self.write_columns::<i64>(target, self.wide_columns(progress)?, progress)
        }
    }

    fn write_columns<P: PlanInteger>(
        &self,
        target: &Path,
        wide: [bool; 6],
        progress: &mut dyn Progress,
    ) -> Result<PlanMetadata, PackError> {
        let mut writer = FolderWriter::create(target, wide)?;
        match self.run::<P>(&mut writer, progress) {
            Ok(metadata) => writer.publish(&metadata, progress).map(|()| metadata),
            Err(error) => {
                writer.abandon();
                Err(error)
            }
        }
    }

    fn run<P: PlanInteger>(
        &self,
        output: &mut dyn PlanOutput<P>,
        progress: &mut dyn Progress,
    ) -> Result<PlanMetadata, PackError> {
        let request = &self.request;
        let (order, seed) = match request.order {
            SampleOrder::Natural => (OrderKind::Natural, None),
            SampleOrder::Given(_) => (OrderKind::Given, None),
            SampleOrder::Seed(seed) => (OrderKind::Seed, Some(seed)),
        };
        let mut random = seed.map(RandomState::new);
        let mut packer = TokenStreamPacker::<P>::new(request.max_length, request.drop_last, &self.threads, output);
        for (lengths, scan) in self.streams.iter().zip(&self.scans) {
            let drawn: Vec<P>;
            let indices = match (request.order, &mut random) {
                (SampleOrder::Given(given), _) => IndexSource::Given(given),
                (_, Some(random)) => {
                    drawn = random.shuffled(lengths.len(), progress)?;
                    IndexSource::Drawn(&drawn)
                }
                (_, None) => IndexSource::Natural(lengths.len()),
            };
            packer.pack(lengths, scan, indices, progress)?;
        }
        let TokenStreamPacker { totals, tail_start, order_hash, .. } = packer;
        let order_digest = match request.order {
            SampleOrder::Given(order) => order_hash.finish(order.len() as u64),
            _ => 0,
        };
        let fingerprint = self.fingerprint(order_digest).to_string();
        self.check_fingerprint(&fingerprint)?;
        Ok(PlanMetadata {
            format_version: FORMAT_VERSION,
            mode: "hard".into(),
            max_length: request.max_length,
            drop_last: request.drop_last,
            global_pack: request.global_pack,
            order,
            seed,
            samples: request.lengths.iter().map(|lengths| lengths.len() as u64).collect(),
            tokens: totals.tokens,
            tokens_packed: totals.tokens_packed,
            packs: totals.packs as u64,
            pieces: totals.pieces as u64,
            empty_on_boundary: totals.empty_on_boundary,
            tail_start,
            fingerprint,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::inputs::Integers;
    use crate::progress::NoProgress;

    proptest! {
        #[test]
        fn a_plan_is_never_smaller_than_the_least_and_never_larger_than_the_most(
            lengths in prop::collection::vec(prop_oneof![0u64..3, 0u64..90], 0..60),
            more in prop::collection::vec(0u64..5, 0..9),
            used in 0usize..=60,
            max_length in 1u64..40,
            shift in prop_oneof![Just(0u32), Just(32)],
            drop_last in any::<bool>(),
            global_pack in any::<bool>(),
        ) {
            let lengths: Vec<u64> = lengths.iter().map(|length| length << shift).collect();
            let order: Vec<i64> = (0..lengths.len() as i64).rev().take(used).collect();
            let (one, two) = (vec![&lengths[..]], vec![&lengths[..], &more[..]]);
            let given = SampleOrder::Given(Integers::from(&order[..]));
            for (datasets, order) in [(&one, given), (&two, SampleOrder::Natural), (&two, SampleOrder::Seed(3))] {
                let request = PackRequest {
                    lengths: datasets.iter().map(|&lengths| Integers::from(lengths)).collect(),
                    order,
                    max_length: max_length << shift,
                    drop_last,
                    global_pack,
                    threads: 1,
                };
                let packer = HardPacker::new(request, &mut NoProgress).unwrap();
                let PlanMetadata { packs, pieces, .. } = packer.pack(&mut NoProgress).unwrap().metadata;
                let (least, most) = (packer.least(), packer.most());
                prop_assert!(least.0 <= packs && packs <= most.0 && least.1 <= pieces && pieces <= most.1);
            }
        }
    }
}

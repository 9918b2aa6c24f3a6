//! Shared by all modes: checks and hashes the lengths, bounds the plan, and computes it in memory or in a folder.
//!
//! A first pass checks, sums and hashes the lengths (`scan`). Then the mode reads the ordered samples a chunk at a time
//! (`samples`) and appends packs to the plan (`output`), which counts them and makes their number a multiple.

mod best_fit;
mod cost_fit;
mod hard;
mod ordered;
mod output;
mod samples;
mod stream;
mod whole;

use std::path::Path;

use crate::error::PackError;
use crate::fingerprint::{Fingerprint, LEAF, ParameterHash};
use crate::folder::{FolderWriter, check_disk_space};
use crate::memory;
use crate::ordered_samples::{OrderedSamples, SampleLengths, SampleOrder, check_order};
use crate::plan::{ALGORITHM_VERSION, FORMAT_VERSION, Field, Plan, PlanCounts, PlanInteger, PlanMetadata, WideColumns};
use crate::progress::Progress;
use crate::request::{Overlong, PackRequest, Packing, Remainder, WholeOptions};
use crate::scan::{self, CheckedCosts, ScanResult};
use crate::threads::Threads;

use output::{CountedOutput, MemoryOutput, PackNumbers, PlanOutput, packs_to_keep};
use samples::FEW_SAMPLES;
pub use stream::{StreamPacker, StreamPiece};

/// Packs a request whose lengths were checked and hashed.
pub struct Packer<'a> {
    request: PackRequest<'a>,
    packing: Packing,
    streams: Vec<SampleLengths<'a>>,
    /// One for each stream.
    scans: Vec<ScanResult>,
    costs: Option<CheckedCosts<'a>>,
    threads: Threads,
    expected_fingerprint: Option<String>,
}

/// Counts that a mode reports of the plan that it appended to an output: all but those of packs and pieces, before packs
/// are left out or come again.
struct Packed {
    counts: PlanCounts,
    /// Of hard packing: where the tail starts in its first sample, for each stream.
    tail_start: Vec<u64>,
    /// Hash of an order that was given.
    order_digest: u128,
}

/// Samples that no pack can take.
struct Refused {
    count: u64,
    dataset: usize,
    /// The worst one, or the first of several.
    sample: usize,
    value: u64,
}

/// The fingerprint of the plan that a request asks for.
///
/// # Errors
/// As `Packer::new`. The order is only hashed, not checked, except where it may name samples that are refused.
pub fn plan_fingerprint(request: PackRequest<'_>, progress: &mut dyn Progress) -> Result<Fingerprint, PackError> {
    Packer::new(request, progress)?.with_order_hashed(progress)
}

/// As `plan_fingerprint`, but samples that are too long or cost too much are not refused.
pub(crate) fn unchecked_fingerprint(
    request: PackRequest<'_>,
    progress: &mut dyn Progress,
) -> Result<Fingerprint, PackError> {
    Packer::scanned(request, progress)?.with_order_hashed(progress)
}

impl<'a> Packer<'a> {
    /// Check the request, and check and hash the lengths.
    ///
    /// # Errors
    /// Arguments out of range or that contradict each other; lengths that are negative or add up to 2⁶³ tokens, or longer
    /// than a pack where that is refused; costs that are negative or more than a pack may cost; an interrupt.
    pub fn new(request: PackRequest<'a>, progress: &mut dyn Progress) -> Result<Self, PackError> {
        let packer = Self::scanned(request, progress)?;
        packer.refuse_overlong(progress)?;
        packer.refuse_too_costly(progress)?;
        Ok(packer)
    }

    fn scanned(request: PackRequest<'a>, progress: &mut dyn Progress) -> Result<Self, PackError> {
        let packing = request.check()?;
        let streams = SampleLengths::streams(&request.lengths, request.global_pack);
        let samples = request.lengths.iter().fold(0usize, |sum, lengths| sum.saturating_add(lengths.len()));
        // More threads than leaves would find nothing to do.
        let threads =
            if samples > FEW_SAMPLES { Threads::asked(request.threads).min(samples.div_ceil(LEAF)) } else { 1 };
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
        let costs = CheckedCosts::new(&request, &threads, progress)?;
        Ok(Self { request, packing, streams, scans, costs, threads, expected_fingerprint: None })
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

    fn with_order_hashed(&self, progress: &mut dyn Progress) -> Result<Fingerprint, PackError> {
        let order_digest = match self.request.order {
            SampleOrder::Given(order) => scan::hash_column(&order, &self.threads, progress)?,
            _ => 0,
        };
        Ok(self.fingerprint(order_digest))
    }

    /// The fingerprint of the plan: a hash of all arguments and inputs that determine it. `order_digest` is the hash of an
    /// order that was given.
    fn fingerprint(&self, order_digest: u128) -> Fingerprint {
        let request = &self.request;
        let mut hash = ParameterHash::new("tundish plan");
        hash.push("format_version", &FORMAT_VERSION.to_le_bytes());
        hash.push("algorithm_version", &ALGORITHM_VERSION.to_le_bytes());
        hash.push("mode", request.mode.name().as_bytes());
        hash.push("max_length", &request.max_length.to_le_bytes());
        match self.packing {
            Packing::Hard { drop_last } => hash.push("drop_last", &[u8::from(drop_last)]),
            Packing::Whole(WholeOptions { window, overlong, max_samples, align }) => {
                hash.push("overlong", overlong.name().as_bytes());
                hash.push("align", &align.to_le_bytes());
                for (name, value) in [("window", window), ("max_samples", max_samples)] {
                    if let Some(value) = value {
                        hash.push(name, &value.to_le_bytes());
                    }
                }
            }
        }
        if let Some(costs) = &self.costs {
            costs.push_to(&mut hash);
        }
        if let Some((of, remainder)) = request.multiple() {
            hash.push("multiple_of", &of.to_le_bytes());
            hash.push("remainder", remainder.name().as_bytes());
        }
        hash.push("global_pack", &[u8::from(request.global_pack)]);
        match request.order {
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

    /// Refuse samples of the order that are longer than a pack.
    fn refuse_overlong(&self, progress: &mut dyn Progress) -> Result<(), PackError> {
        let max_length = self.request.max_length;
        let Packing::Whole(WholeOptions { overlong: Overlong::Error, .. }) = self.packing else { return Ok(()) };
        let may_be = |stream: usize| self.scans[stream].longest > max_length;
        match self.find(may_be, |_, _, length| Some(length).filter(|&length| length > max_length), progress)? {
            Some(Refused { count, dataset, sample, value: length }) => {
                Err(PackError::Overlong { count, dataset, sample, length, max_length })
            }
            None => Ok(()),
        }
    }

    /// Refuse samples of the order that cost more than a pack may.
    fn refuse_too_costly(&self, progress: &mut dyn Progress) -> Result<(), PackError> {
        let (Some(costs), Packing::Whole(options)) = (&self.costs, self.packing) else { return Ok(()) };
        let (max_cost, max_length) = (costs.max_cost(), self.request.max_length);
        let cost_of = |stream: usize, sample: u64, length: u64| {
            let is_left_out = length == 0 || (length > max_length && options.overlong == Overlong::Drop);
            let cost = costs.of_stream(stream).of(sample as i64);
            Some(cost).filter(|&cost| cost > max_cost && !is_left_out)
        };
        match self.find(|_| true, cost_of, progress)? {
            Some(Refused { count, dataset, sample, value: cost }) => {
                Err(PackError::TooCostly { count, dataset, sample, cost, max_cost })
            }
            None => Ok(()),
        }
    }

    /// Go through the samples of the order, of the streams that `may_be` at fault. `fault` takes the stream, the sample and
    /// its length.
    fn find(
        &self,
        may_be: impl Fn(usize) -> bool,
        fault: impl Fn(usize, u64, u64) -> Option<u64>,
        progress: &mut dyn Progress,
    ) -> Result<Option<Refused>, PackError> {
        let mut count = 0u64;
        let mut worst: Option<(u64, &SampleLengths<'_>, u64)> = None;
        for (number, stream) in self.streams.iter().enumerate().filter(|&(number, _)| may_be(number)) {
            let order = match self.request.order {
                SampleOrder::Given(order) => {
                    check_order(&order, stream.len(), progress)?;
                    Some(order)
                }
                _ => None,
            };
            let mut samples = OrderedSamples::new("checking lengths", stream, order);
            while let Some((sample, length)) = samples.next(progress)? {
                let Some(value) = fault(number, sample, length) else { continue };
                count += 1;
                if worst.is_none_or(|(most, ..)| value > most) {
                    worst = Some((value, stream, sample));
                }
            }
        }
        Ok(worst.map(|(value, stream, sample)| {
            let (dataset, sample) = stream.locate(sample as usize);
            Refused { count, dataset, sample, value }
        }))
    }

    /// How many samples of a stream are packed, and how many an order leaves out.
    fn ordered_samples(&self, stream: &SampleLengths<'_>) -> (u64, u64) {
        match self.request.order {
            SampleOrder::Given(order) => (order.len() as u64, (stream.len() - order.len()) as u64),
            _ => (stream.len() as u64, 0),
        }
    }

    /// The sum of what `bound` says of the packs and pieces of each stream.
    fn bounds(&self, bound: impl Fn(&SampleLengths<'a>, &ScanResult) -> (u64, u64)) -> (u64, u64) {
        self.streams.iter().zip(&self.scans).fold((0, 0), |(packs, pieces), (stream, scan)| {
            let (more_packs, more_pieces) = bound(stream, scan);
            (packs.saturating_add(more_packs), pieces.saturating_add(more_pieces))
        })
    }

    /// The most packs and pieces that the plan can have, before packs are repeated.
    fn most(&self) -> (u64, u64) {
        self.bounds(|stream, scan| match self.packing {
            Packing::Hard { drop_last } => hard::most(self, drop_last, stream, scan),
            Packing::Whole(options) => whole::most(self, &options, stream, scan),
        })
    }

    /// The least packs and pieces that the plan can have, whatever the order is.
    fn least(&self) -> (u64, u64) {
        let (packs, pieces) = self.bounds(|stream, scan| match self.packing {
            Packing::Hard { drop_last } => hard::least(self, drop_last, stream, scan),
            Packing::Whole(options) => whole::least(self, &options, stream, scan),
        });
        match self.request.multiple() {
            // Of the pieces that are left, nothing is known but that a pack has one.
            Some((of, Remainder::Drop)) => {
                let packs = packs.saturating_sub(of - 1);
                (packs, packs)
            }
            _ => (packs, pieces),
        }
    }

    /// The most packs and pieces that are repeated.
    fn most_repeated(&self) -> (u64, u64) {
        let Some((of, Remainder::Repeat)) = self.request.multiple() else { return (0, 0) };
        // Of fewer packs than `of`, each may come many times.
        let times = if self.least().0 < of { of } else { 1 };
        (of - 1, self.most().1.saturating_mul(times))
    }

    fn has_piece_ranges(&self) -> bool {
        let Packing::Whole(options) = self.packing else { return false };
        matches!(options.overlong, Overlong::Split | Overlong::Truncate)
    }

    fn fields(&self) -> &'static [Field] {
        Field::of_plan(self.has_piece_ranges())
    }

    /// The packs and pieces that the plan can have, with those that are repeated.
    fn most_in_all(&self) -> (u64, u64) {
        let ((packs, pieces), (more_packs, more_pieces)) = (self.most(), self.most_repeated());
        (packs.saturating_add(more_packs), pieces.saturating_add(more_pieces))
    }

    /// Tokens of the longest sample.
    fn longest_sample(&self) -> u64 {
        self.scans.iter().map(|scan| scan.longest).max().unwrap_or(0)
    }

    /// Samples of the largest stream.
    fn most_samples(&self) -> u64 {
        self.streams.iter().map(|stream| stream.len() as u64).max().unwrap_or(0)
    }

    /// Whether the plan is computed in 32 bits: all sums that the modes make fit.
    fn is_narrow(&self) -> bool {
        let (packs, pieces) = self.most_in_all();
        let sums = [packs, pieces, self.request.max_length.saturating_add(self.longest_sample()), self.most_samples()];
        sums.iter().all(|&sum| sum <= i32::MAX as u64)
    }

    /// Which columns have 8 bytes a value: those whose values are not bounded by 32 bits.
    fn wide_columns(&self) -> WideColumns {
        let longest = self.longest_sample();
        Field::ALL.map(|field| {
            let most = match field {
                Field::DatasetId => self.streams.len() as u64,
                Field::Indices => self.most_samples(),
                Field::IndicesCuLen => self.most_in_all().1,
                Field::Longest => longest.min(self.request.max_length),
                Field::StartOffset | Field::EndOffset | Field::PieceStart | Field::PieceStop => longest,
            };
            most > i32::MAX as u64
        })
    }

    /// Compute the plan in memory.
    ///
    /// # Errors
    /// A bad order; a plan larger than the machine's memory; an interrupt.
    pub fn pack(&self, progress: &mut dyn Progress) -> Result<Plan, PackError> {
        let (packs, pieces) = self.most();
        let (fields, wide) = (self.fields(), self.wide_columns());
        let bytes: u128 = fields
            .iter()
            .map(|&field| {
                let values = if field.is_per_piece() { pieces } else { packs };
                u128::from(values) * if wide[field as usize] { 8 } else { 4 }
            })
            .sum();
        let available = memory::physical_bytes();
        if bytes > u128::from(available) {
            return Err(PackError::TooLarge { bytes, packs, pieces, available });
        }
        let computed = MemoryOutput::new(packs, pieces, fields, wide).and_then(|mut output| {
            let metadata = match self.is_narrow() {
                true => self.run::<i32>(&mut output, progress),
                false => self.run::<i64>(&mut output, progress),
            }?;
            Ok(Plan { columns: output.into_columns(), metadata })
        });
        computed.map_err(|error| match error {
            PackError::OutOfMemory { bytes, .. } => PackError::OutOfMemory { bytes, plan_in_memory: true },
            other => other,
        })
    }

    /// Compute the plan straight into a folder that is published when it is complete and durable.
    ///
    /// # Errors
    /// As `pack`; `NoRoom`, before any work; `PackError::Commit` when the folder cannot be written or `target` is taken.
    pub fn write(&self, target: &Path, progress: &mut dyn Progress) -> Result<PlanMetadata, PackError> {
        let (packs, pieces) = self.least();
        check_disk_space(target, packs, pieces, self.fields())?;
        let mut writer = FolderWriter::create(target, self.fields(), self.wide_columns())?;
        let computed = match self.is_narrow() {
            true => self.run::<i32>(&mut writer, progress),
            false => self.run::<i64>(&mut writer, progress),
        };
        match computed {
            Ok(metadata) => writer.publish(&metadata, progress).map(|()| metadata),
            Err(error) => {
                writer.abandon();
                Err(error)
            }
        }
    }

    /// Append all packs that the mode makes.
    fn run_mode<P: PlanInteger>(
        &self,
        output: &mut dyn PlanOutput<P>,
        progress: &mut dyn Progress,
    ) -> Result<Packed, PackError> {
        match self.packing {
            Packing::Hard { drop_last } => hard::run(self, drop_last, output, progress),
            Packing::Whole(options) => whole::run(self, &options, output, progress),
        }
    }

    fn run<P: PlanInteger>(
        &self,
        output: &mut dyn PlanOutput<P>,
        progress: &mut dyn Progress,
    ) -> Result<PlanMetadata, PackError> {
        let keep = match self.request.multiple() {
            Some((of, Remainder::Drop)) => {
                let mut numbers = PackNumbers(vec![0; self.streams.len()]);
                self.run_mode::<P>(&mut numbers, progress)?;
                Some(packs_to_keep(numbers.0, of)?)
            }
            _ => None,
        };
        let mut counted = CountedOutput::new(self, output, keep);
        let packed = self.run_mode::<P>(&mut counted, progress)?;
        counted.repeat(progress)?;
        let counts = counted.finish(&packed);
        if self.request.multiple_of.is_some_and(|of| !counts.packs.is_multiple_of(of)) {
            return Err(PackError::InputChanged);
        }
        let fingerprint = self.fingerprint(packed.order_digest).to_string();
        self.check_fingerprint(&fingerprint)?;
        Ok(PlanMetadata::new(&self.request, self.packing, counts, fingerprint))
    }
}

#[cfg(test)]
mod tests;

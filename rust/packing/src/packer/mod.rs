//! What all modes share: checks and hashes the lengths, bounds the plan, and computes it in memory or in a folder.
//!
//! A first pass checks, sums and hashes the lengths (`scan`). Then the mode reads the ordered samples a chunk at a time
//! (`samples`) and appends packs to the plan (`output`). `multiple` stands between the two where packs are left out or
//! repeated.

mod closed_packs;
mod costs;
mod hard;
mod mixed;
mod multiple;
mod output;
mod plan_fingerprint;
mod refusals;
mod repeated_samples;
mod samples;
mod scan;
mod whole;

use std::ops::Range;
use std::path::Path;

use crate::error::PackError;
use crate::fingerprint::LEAF;
use crate::folder::{FolderWriter, check_disk_space};
use crate::inputs::{SampleLengths, SampleOrder};
use crate::memory;
use crate::plan::{
    FORMAT_VERSION, Field, HardMetadata, MIXED, OrderKind, PartMetadata, Plan, PlanInteger, PlanMetadata,
    WholeMetadata, WideColumns,
};
use crate::progress::Progress;
use crate::request::{Mode, Modes, PackMultiple, PackRequest, Remainder, WholeOptions};
use crate::threads::Threads;

pub(crate) use closed_packs::{ClosedPack, PackMeter, PackRows, PackSplitter};
pub(crate) use costs::{CheckedCosts, StreamCosts};
use output::{MemoryOutput, WidthProbe};
pub(crate) use output::{PackColumns, PlanOutput};
pub use plan_fingerprint::plan_fingerprint;
pub(crate) use plan_fingerprint::unchecked_fingerprint;
pub(crate) use repeated_samples::SeenSamples;
pub(crate) use samples::{
    CHUNK, CHUNKS_A_THREAD, FEW_SAMPLES, IndexSource, ReadFailure, SampleReader, Samples, bad_order,
};
pub(crate) use scan::ScanResult;
pub use whole::StreamWindow;

/// Packs a request whose lengths were checked and hashed.
pub struct Packer<'a> {
    pub(crate) request: PackRequest<'a>,
    pub(crate) streams: Vec<SampleLengths<'a>>,
    /// One for each stream.
    pub(crate) scans: Vec<ScanResult>,
    pub(crate) costs: Option<CheckedCosts<'a>>,
    pub(crate) threads: Threads,
    expected_fingerprint: Option<String>,
}

/// What a mode reports of the plan that it appended to an output.
pub(crate) struct Packed {
    pub(crate) tokens: u64,
    pub(crate) tokens_packed: u64,
    pub(crate) packs: u64,
    pub(crate) pieces: u64,
    pub(crate) hard: Option<HardMetadata>,
    pub(crate) whole: Option<WholeMetadata>,
    /// Hash of an order that was given.
    pub(crate) order_digest: u128,
}

impl<'a> Packer<'a> {
    /// Check and hash the lengths.
    ///
    /// # Errors
    /// Lengths that are negative or add up to 2⁶³ tokens, or longer than a pack where that is refused; costs that are
    /// negative or more than a pack may cost; options that contradict each other; an order with several datasets; an interrupt.
    pub fn new(request: PackRequest<'a>, progress: &mut dyn Progress) -> Result<Self, PackError> {
        let packer = Self::scanned(request, progress)?;
        packer.refuse_overlong(progress)?;
        packer.refuse_too_costly(progress)?;
        Ok(packer)
    }

    fn scanned(request: PackRequest<'a>, progress: &mut dyn Progress) -> Result<Self, PackError> {
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
        let costs = CheckedCosts::new(&request, &threads, progress)?;
        Ok(Self { request, streams, scans, costs, threads, expected_fingerprint: None })
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

    /// The options of a stream of whole samples.
    fn whole_options(&self, stream: usize) -> Option<WholeOptions> {
        match self.request.mode.of(stream) {
            Mode::Whole(options) => Some(options),
            Mode::Hard { .. } => None,
        }
    }

    /// How many samples of a stream are packed, and how many an order leaves out.
    pub(crate) fn ordered_samples(&self, stream: &SampleLengths<'_>) -> (u64, u64) {
        match self.request.order {
            SampleOrder::Given(order) => (order.len() as u64, (stream.len() - order.len()) as u64),
            _ => (stream.len() as u64, 0),
        }
    }

    /// The sum of what `bound` says of the packs and pieces of each stream.
    fn bounds(&self, bound: impl Fn(Mode, &SampleLengths<'a>, &ScanResult) -> (u64, u64)) -> (u64, u64) {
        self.streams.iter().zip(&self.scans).enumerate().fold((0, 0), |(packs, pieces), (number, (stream, scan))| {
            let (more_packs, more_pieces) = bound(self.request.mode.of(number), stream, scan);
            (packs.saturating_add(more_packs), pieces.saturating_add(more_pieces))
        })
    }

    /// The most packs and pieces that the plan can have, before packs are repeated.
    fn most(&self) -> (u64, u64) {
        self.bounds(|mode, stream, scan| match mode {
            Mode::Hard { drop_last } => hard::most(self, drop_last, stream, scan),
            Mode::Whole(options) => whole::most(self, &options, stream, scan),
        })
    }

    /// The least packs and pieces that the plan can have, whatever the order is.
    fn least(&self) -> (u64, u64) {
        let (packs, pieces) = self.bounds(|mode, stream, scan| match mode {
            Mode::Hard { drop_last } => hard::least(self, drop_last, stream, scan),
            Mode::Whole(options) => whole::least(self, &options, stream, scan),
        });
        match self.request.multiple {
            // Of the pieces that are left, nothing is known but that a pack has one.
            Some(PackMultiple { of, remainder: Remainder::Drop }) => {
                let packs = packs.saturating_sub(of - 1);
                (packs, packs)
            }
            _ => (packs, pieces),
        }
    }

    /// The most packs and pieces that are repeated.
    fn most_repeated(&self) -> (u64, u64) {
        let Some(PackMultiple { of, remainder: Remainder::Repeat }) = self.request.multiple else { return (0, 0) };
        // Of fewer packs than `of`, each may come many times.
        let times = if self.least().0 < of { of } else { 1 };
        (of - 1, self.most().1.saturating_mul(times))
    }

    pub(crate) fn has_piece_ranges(&self) -> bool {
        self.request.mode.have_piece_ranges()
    }

    fn fields(&self) -> &'static [Field] {
        Field::of_plan(self.has_piece_ranges())
    }

    /// Whether the plan is computed in 32 bits: all sums that the modes make fit.
    fn is_narrow(&self) -> bool {
        let largest = i32::MAX as u64;
        let ((packs, pieces), (more_packs, more_pieces)) = (self.most(), self.most_repeated());
        let (packs, pieces) = (packs.saturating_add(more_packs), pieces.saturating_add(more_pieces));
        let longest = self.scans.iter().map(|scan| scan.longest).max().unwrap_or(0);
        packs <= largest
            && pieces <= largest
            && self.request.max_length.saturating_add(longest) <= largest
            && self.streams.iter().all(|stream| stream.len() as u64 <= largest)
    }

    /// Which columns have 8 bytes a value, if the plan is not narrow: a pass over all samples that keeps nothing.
    fn wide_columns(&self, progress: &mut dyn Progress) -> Result<WideColumns, PackError> {
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
        let fields = self.fields();
        let is_narrow = self.is_narrow();
        let of_pieces = fields.iter().filter(|field| field.is_per_piece()).count();
        let values = u128::from(packs) * (fields.len() - of_pieces) as u128 + u128::from(pieces) * of_pieces as u128;
        let bytes = values * if is_narrow { 4 } else { 8 };
        let available = memory::physical_bytes();
        if bytes > u128::from(available) {
            return Err(PackError::TooLarge { bytes, packs, pieces, available });
        }
        let wide = if is_narrow { WideColumns::default() } else { self.wide_columns(progress)? };
        let computed = MemoryOutput::new(packs, pieces, fields, wide).and_then(|output| match is_narrow {
            true => self.pack_into::<i32>(output, progress),
            false => self.pack_into::<i64>(output, progress),
        });
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
        check_disk_space(target, packs, pieces, self.fields())?;
        if self.is_narrow() {
            self.write_columns::<i32>(target, WideColumns::default(), progress)
        } else {
            self.write_columns::<i64>(target, self.wide_columns(progress)?, progress)
        }
    }

    fn write_columns<P: PlanInteger>(
        &self,
        target: &Path,
        wide: WideColumns,
        progress: &mut dyn Progress,
    ) -> Result<PlanMetadata, PackError> {
        let mut writer = FolderWriter::create(target, self.fields(), wide)?;
        match self.run::<P>(&mut writer, progress) {
            Ok(metadata) => writer.publish(&metadata, progress).map(|()| metadata),
            Err(error) => {
                writer.abandon();
                Err(error)
            }
        }
    }

    /// Append all packs of the streams in `streams`, which have one mode, as a plan of their own.
    fn run_mode<P: PlanInteger>(
        &self,
        streams: Range<usize>,
        output: &mut dyn PlanOutput<P>,
        progress: &mut dyn Progress,
    ) -> Result<Packed, PackError> {
        match self.request.mode.of(streams.start) {
            Mode::Hard { drop_last } => hard::run(self, drop_last, streams, output, progress),
            Mode::Whole(options) => whole::run(self, &options, streams, output, progress),
        }
    }

    /// Append all packs, before any are left out or repeated.
    fn run_modes<P: PlanInteger>(
        &self,
        output: &mut dyn PlanOutput<P>,
        progress: &mut dyn Progress,
    ) -> Result<Vec<Packed>, PackError> {
        match &self.request.mode {
            Modes::All(_) => Ok(vec![self.run_mode(0..self.streams.len(), output, progress)?]),
            Modes::Each(_) => mixed::run(self, output, progress),
        }
    }

    fn run<P: PlanInteger>(
        &self,
        output: &mut dyn PlanOutput<P>,
        progress: &mut dyn Progress,
    ) -> Result<PlanMetadata, PackError> {
        let request = &self.request;
        let (packed, multiple) = match request.multiple {
            Some(asked) => {
                let (packed, multiple) = multiple::run(self, asked, output, progress)?;
                (packed, Some(multiple))
            }
            None => (self.run_modes(output, progress)?, None),
        };
        let sum = |value: fn(&Packed) -> u64| -> u64 { packed.iter().map(value).sum() };
        let (tokens, tokens_packed) = (sum(|part| part.tokens), sum(|part| part.tokens_packed));
        let (packs, pieces) = (sum(|part| part.packs), sum(|part| part.pieces));
        let order_digest = packed.first().map_or(0, |part| part.order_digest);
        let (order, seed) = match request.order {
            SampleOrder::Natural => (OrderKind::Natural, None),
            SampleOrder::Given(_) => (OrderKind::Given, None),
            SampleOrder::Seed(seed) => (OrderKind::Seed, Some(seed)),
        };
        let fingerprint = self.fingerprint(order_digest).to_string();
        self.check_fingerprint(&fingerprint)?;
        let mut metadata = PlanMetadata {
            format_version: FORMAT_VERSION,
            mode: MIXED.into(),
            max_length: request.max_length,
            global_pack: request.global_pack,
            order,
            seed,
            samples: request.lengths.iter().map(|lengths| lengths.len() as u64).collect(),
            tokens,
            tokens_packed,
            packs,
            pieces,
            hard: None,
            whole: None,
            parts: Vec::new(),
            multiple: None,
            fingerprint,
        };
        let mut parts: Vec<PartMetadata> =
            packed.into_iter().zip(request.mode.all()).map(|(part, mode)| part.into_metadata(*mode)).collect();
        match &request.mode {
            Modes::Each(_) => metadata.parts = parts,
            Modes::All(_) => {
                if let Some(PartMetadata { mode, hard, whole, .. }) = parts.pop() {
                    (metadata.mode, metadata.hard, metadata.whole) = (mode, hard, whole);
                }
            }
        }
        Ok(metadata.with_multiple(multiple))
    }
}

impl Packed {
    fn into_metadata(self, mode: Mode) -> PartMetadata {
        let Self { tokens, tokens_packed, packs, pieces, hard, whole, .. } = self;
        PartMetadata { mode: mode.name().into(), tokens, tokens_packed, packs, pieces, hard, whole }
    }
}

#[cfg(test)]
mod tests;

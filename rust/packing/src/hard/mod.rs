//! Hard packing: the ordered samples are one stream of tokens, cut every `max_length`.
//!
//! Source of the method: concatenate-and-cut as GPT-style pre-training does it, with the array layout
//! of XTuner's HardPackDataset. The lengths are scanned once in their own order (checked, summed,
//! hashed); then the ordered samples are walked in chunks: their indices and lengths are
//! copied into scratch memory, and a linear merge cuts them (`kernel`). Copying first makes the
//! random reads independent of the merge, and keeps inputs that change meanwhile from ever
//! contradicting what was counted.
//!
//! While one chunk is merged the next one's lengths are asked for (`ahead`), so that the memory works beside the
//! arithmetic.
//!
//! With several threads the chunks of a window are loaded, counted and merged apart; what a chunk
//! must know of those before it (tokens, pieces, packs, the open pack) are prefix sums over the
//! chunks of the window (`parallel`).
//!
//! Working memory beyond inputs and outputs: at most 8 MiB a thread and 16 MiB. With a given order, 32 MiB more for a
//! `table` of the lengths, from the scan to the end of the plan, or else for `marks` or `powers`; for a plan that goes
//! to files 64 MiB, as its order is checked by these while the table is there. Where the order leaves samples out or
//! has a wrong entry to be found, one bit a sample. With a seed, one index a sample.
#![allow(unsafe_code)]

mod ahead;
mod chunk;
mod distinct;
mod kernel;
mod least;
mod marks;
mod order;
mod parallel;
mod powers;
mod request;
mod scan;
mod serial;
mod table;

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::cell::Cell;
use crate::crew::Crew;
use crate::error::PackError;
use crate::fingerprint::{ColumnHash, Fingerprint, LEAF, ParameterHash};
use crate::folder::FileSink;
use crate::integers::Word;
use crate::plan::{FORMAT_VERSION, Facts, OrderKind, Plan};
use crate::shuffle::RandomState;
use crate::sink::{Measure, MemorySink, Sink};
use crate::watch::{Lookout, Watch};

use ahead::{Ask, Nothing};
use chunk::{Checks, Source};
use distinct::Distinct;
use kernel::{Cut, Written};
use order::Order;
pub use request::{OrderSource, Request};
pub(crate) use scan::Dataset;
use scan::Scan;
use serial::Stream;
use table::Table;

/// Packs that one chunk may close: bounds the scratch memory of file output, in bytes.
const fn packs_a_chunk<C>() -> u64 {
    (1 << 17) / size_of::<C>() as u64
}

/// A request whose inputs were checked and hashed.
pub struct Prepared<'a> {
    request: Request<'a>,
    streams: Vec<Dataset<'a>>,
    scans: Vec<Scan>,
    /// The lengths once more, for the first plan that is computed.
    table: Mutex<Option<Table>>,
    crew: Crew,
    /// The fingerprint that the plan is to have.
    expected: Option<String>,
}

impl<'a> Prepared<'a> {
    /// Check and hash the lengths.
    ///
    /// # Errors
    /// Lengths that are negative or add up to 2⁶³ tokens, a bad `max_length`, an order with several datasets; an
    /// interrupt.
    pub fn new(request: Request<'a>, watch: &mut dyn Watch) -> Result<Self, PackError> {
        Self::scanned(request, true, watch)
    }

    /// `is_to_be_packed`: whether a plan is to follow.
    fn scanned(request: Request<'a>, is_to_be_packed: bool, watch: &mut dyn Watch) -> Result<Self, PackError> {
        request.check()?;
        let streams: Vec<Dataset<'a>> = if request.global_pack {
            vec![Dataset::new(request.lengths.clone(), 0)]
        } else {
            request.lengths.iter().enumerate().map(|(id, &lengths)| Dataset::new(vec![lengths], id)).collect()
        };
        let samples = request.lengths.iter().fold(0usize, |sum, lengths| sum.saturating_add(lengths.len()));
        // More than one for each leaf would find nothing to do.
        let threads = match samples > parallel::WORTHWHILE_SAMPLES {
            true => request.threads.min(samples.div_ceil(LEAF)),
            false => 1,
        };
        let crew = Crew::new(threads);
        let mut scans = Vec::with_capacity(streams.len());
        let mut table = match (request.order, &streams[..]) {
            (OrderSource::Given(order), [stream]) if is_to_be_packed => {
                Table::new(stream.len(), order.len(), crew.threads())
            }
            // No other order needs a check, and a drawn one takes memory enough.
            _ => None,
        };
        for stream in &streams {
            let copy = table.as_mut().map(Table::room).unwrap_or_default();
            let scan = scan::scan(stream, copy, &crew, watch)?;
            table = table.and_then(|table| table.of_lengths_up_to(scan.longest));
            scans.push(scan);
        }
        // Checked as a whole so that prefix sums over datasets cannot overflow either.
        let mut total = 0u64;
        for (dataset, scan) in scans.iter().enumerate() {
            total = total
                .checked_add(scan.tokens)
                .filter(|&sum| sum < 1 << 63)
                .ok_or(PackError::TotalTooLarge { dataset, sample: streams[dataset].len().saturating_sub(1) })?;
        }
        Ok(Self { request, streams, scans, table: Mutex::new(table), crew, expected: None })
    }

    /// Compute no other plan than the one with this fingerprint, which the same inputs gave before: a plan that is
    /// found by it has to be the one.
    ///
    /// # Errors
    /// `InputChanged` where the inputs give another one by now; here, or, as an order is hashed while it is read, from
    /// `pack` and `write`, before anything is published.
    pub fn expecting(mut self, fingerprint: &str) -> Result<Self, PackError> {
        self.expected = Some(fingerprint.into());
        match self.request.order {
            OrderSource::Given(_) => Ok(self),
            OrderSource::Natural | OrderSource::Seed(_) => {
                self.check_expected(&self.identity(0).to_string()).map(|()| self)
            }
        }
    }

    fn check_expected(&self, found: &str) -> Result<(), PackError> {
        let is_another = self.expected.as_deref().is_some_and(|expected| expected != found);
        if is_another { Err(PackError::InputChanged) } else { Ok(()) }
    }

    fn identity(&self, order_digest: u128) -> Fingerprint {
        let mut hash = ParameterHash::new("tundish plan");
        hash.push("format_version", &FORMAT_VERSION.to_le_bytes());
        hash.push("mode", b"hard");
        hash.push("max_length", &self.request.max_length.to_le_bytes());
        hash.push("drop_last", &[u8::from(self.request.drop_last)]);
        hash.push("global_pack", &[u8::from(self.request.global_pack)]);
        match self.request.order {
            OrderSource::Natural => hash.push("order", b"natural"),
            OrderSource::Seed(seed) => hash.push("seed", &seed.to_le_bytes()),
            OrderSource::Given(_) => hash.push("order", &order_digest.to_le_bytes()),
        }
        for scan in &self.scans {
            for (samples, digest) in &scan.parts {
                hash.push("samples", &samples.to_le_bytes());
                hash.push("lengths", &digest.to_le_bytes());
            }
        }
        hash.finish()
    }

    /// Bounds on packs and pieces over all streams.
    fn bounds(&self) -> (u64, u64) {
        let (mut packs, mut pieces) = (0u64, 0u64);
        for (stream, scan) in self.streams.iter().zip(&self.scans) {
            let closed = scan.tokens / self.request.max_length;
            let tail = u64::from(!self.request.drop_last && scan.tokens % self.request.max_length != 0);
            packs = packs.saturating_add(closed + tail);
            let samples = match self.request.order {
                OrderSource::Given(order) => order.len(),
                _ => stream.len(),
            };
            pieces = pieces.saturating_add(closed).saturating_add(samples as u64);
        }
        (packs, pieces)
    }

    fn is_narrow(&self) -> bool {
        let largest = i32::MAX as u64;
        let (packs, pieces) = self.bounds();
        packs <= largest
            && pieces <= largest
            && self.request.max_length <= largest
            && self.scans.iter().all(|scan| scan.longest <= largest)
            && self.streams.iter().all(|stream| stream.len() as u64 <= largest)
    }

    /// Compute the plan in memory.
    ///
    /// # Errors
    /// A bad order; a plan larger than the machine's memory; an interrupt.
    pub fn pack(&self, watch: &mut dyn Watch) -> Result<Plan, PackError> {
        let (packs, pieces) = self.bounds();
        let narrow = self.is_narrow();
        let bytes = (u128::from(packs) * 5 + u128::from(pieces)) * if narrow { 4 } else { 8 };
        if let Some(available) = crate::memory::physical_bytes().filter(|&available| bytes > u128::from(available)) {
            return Err(PackError::TooLarge { bytes, packs, pieces, available });
        }
        self.pack_into_memory((packs, pieces), narrow, watch).map_err(|error| match error {
            PackError::OutOfMemory { bytes, .. } => PackError::OutOfMemory { bytes, plan_in_memory: true },
            other => other,
        })
    }

    fn pack_into_memory(
        &self,
        (packs, pieces): (u64, u64),
        narrow: bool,
        watch: &mut dyn Watch,
    ) -> Result<Plan, PackError> {
        if narrow {
            let mut sink = MemorySink::<i32>::new(packs, pieces)?;
            let facts = self.run(&mut sink, false, watch)?;
            Ok(Plan { columns: sink.into_columns().map(crate::plan::Column::I32), facts })
        } else {
            let mut sink = MemorySink::<i64>::new(packs, pieces)?;
            let facts = self.run(&mut sink, false, watch)?;
            let mut columns = sink.into_columns().map(crate::plan::Column::I64);
            for column in &mut columns {
                column.narrow(watch)?;
            }
            Ok(Plan { columns, facts })
        }
    }

    /// Compute the plan straight into a folder that is published when it is complete and durable.
    ///
    /// # Errors
    /// As `pack`; `NoRoom`, before any work; `PackError::Commit` when the folder cannot be written or `target` is taken.
    pub fn write(&self, target: &Path, watch: &mut dyn Watch) -> Result<Facts, PackError> {
        self.check_room(target, watch)?;
        if self.is_narrow() {
            // A bad order is refused before anything is written.
            if let (OrderSource::Given(order), [stream]) = (self.request.order, &self.streams[..]) {
                order::check::<i32>(&order, stream.len(), &self.crew, watch)?;
            }
            self.write_files::<i32>(target, [false; 6], watch)
        } else {
            // Which columns need 64 bits is known only at the end, so a first pass finds out, and checks the order.
            // Only plans beyond 2³¹ samples, pieces or tokens a sample come here.
            let mut measure = Measure::default();
            self.run(&mut measure, false, watch)?;
            let wide = measure.needs_64_bits();
            // Its room is as large as that of the files.
            drop(measure);
            self.write_files::<i64>(target, wide, watch)
        }
    }

    /// `wide` tells which columns have 8 bytes a value. The order, if one was given, was checked.
    fn write_files<C: Cell>(&self, target: &Path, wide: [bool; 6], watch: &mut dyn Watch) -> Result<Facts, PackError> {
        let mut sink = FileSink::<C>::create(target, wide)?;
        let computed = self.run(&mut sink, true, watch);
        match computed.and_then(|facts| sink.finish(watch).map(|()| facts)) {
            Ok(facts) => sink.publish(&facts, watch).map(|()| facts),
            Err(PackError::Interrupted) => {
                sink.abandon();
                Err(PackError::Interrupted)
            }
            Err(error) => Err(error),
        }
    }

    fn run<C: Cell>(
        &self,
        sink: &mut dyn Sink<C>,
        order_checked: bool,
        watch: &mut dyn Watch,
    ) -> Result<Facts, PackError> {
        let request = &self.request;
        let mut random = match request.order {
            OrderSource::Seed(seed) => Some(RandomState::new(seed)),
            _ => None,
        };
        let mut packer = Packer::<C> {
            max_length: C::word_of(usize::try_from(request.max_length).map_err(|_| PackError::InputChanged)?),
            crew: &self.crew,
            sink,
            lookout: Lookout::new(watch),
            totals: Totals::default(),
            order_hash: match request.order {
                // Hashed while it is read.
                OrderSource::Given(_) => Some(ColumnHash::default()),
                _ => None,
            },
            order_checked,
        };
        let mut tail_start = Vec::with_capacity(self.streams.len());
        let mut tokens = 0u64;
        for (stream, scan) in self.streams.iter().zip(&self.scans) {
            let shuffled;
            let order = match request.order {
                OrderSource::Natural => Order::Natural(stream.len()),
                OrderSource::Given(given) => Order::Given(given),
                OrderSource::Seed(_) => {
                    let random = random.as_mut().ok_or(PackError::InputChanged)?;
                    shuffled = random.shuffled::<C::Word>(stream.len(), packer.lookout.watch)?;
                    Order::Drawn(&shuffled)
                }
            };
            // Of the only one, if there is one.
            let table = self.table.lock().unwrap_or_else(PoisonError::into_inner).take();
            let (stream_tokens, start) = packer.stream(stream, scan, table, order, request.drop_last)?;
            tokens += stream_tokens;
            tail_start.push(start);
        }
        let totals = packer.totals;
        let order_digest = match (packer.order_hash, request.order) {
            (Some(hash), OrderSource::Given(order)) => hash.finish(order.len() as u64),
            _ => 0,
        };
        let fingerprint = self.identity(order_digest).to_string();
        self.check_expected(&fingerprint)?;
        Ok(Facts {
            format_version: FORMAT_VERSION,
            mode: "hard".into(),
            max_length: request.max_length,
            drop_last: request.drop_last,
            global_pack: request.global_pack,
            order: match request.order {
                OrderSource::Natural => OrderKind::Natural,
                OrderSource::Given(_) => OrderKind::Given,
                OrderSource::Seed(_) => OrderKind::Seed,
            },
            seed: match request.order {
                OrderSource::Seed(seed) => Some(seed),
                _ => None,
            },
            samples: request.lengths.iter().map(|lengths| lengths.len() as u64).collect(),
            tokens,
            tokens_packed: totals.tokens_packed,
            packs: totals.packs as u64,
            pieces: totals.pieces as u64,
            empty_on_boundary: totals.empty_on_boundary,
            tail_start,
            fingerprint,
        })
    }
}

/// What the plan holds so far.
#[derive(Clone, Copy, Default)]
struct Totals {
    pieces: usize,
    /// Pieces of packs that are closed.
    pieces_closed: usize,
    packs: usize,
    empty_on_boundary: u64,
    tokens_packed: u64,
}

/// The state of one computation.
struct Packer<'r, C: Cell> {
    max_length: C::Word,
    crew: &'r Crew,
    sink: &'r mut dyn Sink<C>,
    lookout: Lookout<'r>,
    totals: Totals,
    order_hash: Option<ColumnHash>,
    /// Whether a given order is known to be one.
    order_checked: bool,
}

impl<C: Cell> Packer<'_, C> {
    /// Cut one stream; its tokens, and where the tail left out starts in its first sample.
    fn stream(
        &mut self,
        dataset: &Dataset<'_>,
        scan: &Scan,
        table: Option<Table>,
        order: Order<'_, C>,
        drop_last: bool,
    ) -> Result<(u64, u64), PackError> {
        let mut stream = Stream::<C> {
            cut: Cut::default(),
            tokens: 0,
            limit: scan.tokens,
            empty_run: 0,
            last_length: C::Word::default(),
            id: dataset.id(),
        };
        let packs_before = self.totals.packs;
        let distinct = match order {
            Order::Given(given) if !self.order_checked && table.is_none() => Some(Distinct::new(
                dataset.len(),
                given.len(),
                if self.is_parallel(given.len()) { self.crew.threads() } else { 1 },
            )?),
            _ => None,
        };
        let checks = Checks { table, distinct, hashing: self.order_hash.is_some() };
        let cut = match (order, &checks.table, dataset.only_part()) {
            _ if dataset.len() < ahead::WORTHWHILE_SAMPLES => self.cut(dataset, order, &checks, Nothing, &mut stream),
            (Order::Natural(_), ..) | (_, None, None) => self.cut(dataset, order, &checks, Nothing, &mut stream),
            (_, Some(table), _) => self.cut(dataset, order, &checks, table.ask(), &mut stream),
            (_, None, Some(lengths)) => self.cut(dataset, order, &checks, lengths, &mut stream),
        };
        let sound = match cut {
            // More tokens than there are: of lengths that changed, or of a sample that several threads met, each for
            // the first time. `first_fault` tells which.
            Err(PackError::InputChanged) if matches!(order, Order::Given(_)) => false,
            cut => cut?,
        };
        if let Order::Given(given) = order
            && !(sound
                && checks.distinct.is_none_or(Distinct::holds)
                && checks.table.is_none_or(|table| table.taken(self.crew) == given.len()))
        {
            return Err(order::first_fault(&given, dataset.len(), self.lookout.watch));
        }
        let max_length = self.max_length.widen();
        let closed = (self.totals.packs - packs_before) as u64;
        let filled = stream.cut.filled.widen();
        self.totals.tokens_packed += closed * max_length;
        if filled == 0 {
            return Ok((stream.tokens, 0));
        }
        let start = stream.cut.start.widen();
        if drop_last {
            // Pieces of the pack that stayed open.
            self.sink.retract(self.totals.pieces - self.totals.pieces_closed)?;
            self.totals.pieces = self.totals.pieces_closed;
            return Ok((stream.tokens, start));
        }
        // The stop of the last pack is the total, so empty samples at the very end are beyond it.
        self.sink.retract(stream.empty_run)?;
        self.totals.pieces -= stream.empty_run;
        self.close_short_pack(&stream)?;
        self.totals.tokens_packed += filled;
        Ok((stream.tokens, start))
    }

    /// Cut one stream, but for its end; false, and stopped early, where the order is not one.
    fn cut(
        &mut self,
        dataset: &Dataset<'_>,
        order: Order<'_, C>,
        checks: &Checks,
        ask: impl Ask,
        stream: &mut Stream<C>,
    ) -> Result<bool, PackError> {
        let source = Source { dataset, order, checks, ask };
        match self.is_parallel(order.len()) {
            true => self.cut_in_parallel(&source, stream),
            false => self.cut_serially(&source, stream),
        }
    }

    /// Whether several threads cut an order of so many samples.
    fn is_parallel(&self, samples: usize) -> bool {
        self.crew.threads() > 1 && samples > parallel::WORTHWHILE_SAMPLES
    }

    fn close_short_pack(&mut self, stream: &Stream<C>) -> Result<(), PackError> {
        let room = self.sink.room(0, 1, &mut self.lookout)?;
        room.indices_cu_len[0].write(C::from_word(C::word_of(self.totals.pieces)));
        room.start_offset[0].write(C::from_word(stream.cut.start));
        room.end_offset[0].write(C::from_word(stream.last_length));
        room.longest[0].write(C::from_word(stream.cut.longest));
        // SAFETY: just written.
        unsafe { self.keep(Written { packs: 1, ..Written::default() }, stream) }
    }
}

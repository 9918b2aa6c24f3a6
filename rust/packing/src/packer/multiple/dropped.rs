//! Finds the emptiest packs, and leaves them out.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use crate::error::PackError;
use crate::packer::{ClosedPack, PackColumns, PackMeter, PackRows, PackSplitter, Packer, PlanOutput};
use crate::plan::{MultipleMetadata, PlanInteger};
use crate::progress::Progress;
use crate::request::{Overlong, PackMultiple};

/// What a pack's pieces take of it, and its number; the pack that goes first is the smallest.
type PackKey = (u64, Reverse<u64>);

/// Finds the packs to leave out.
pub(super) struct EmptiestPacks<'r, P> {
    of: u64,
    splitter: PackSplitter<P>,
    meter: PackMeter<'r, P>,
    /// The emptiest packs of each stream, up to `of` - 1.
    candidates: Vec<BinaryHeap<PackKey>>,
    /// Packs of each stream.
    packs: Vec<u64>,
    /// Packs so far.
    total: u64,
}

impl<'r, P: PlanInteger> EmptiestPacks<'r, P> {
    pub(super) fn new(packer: &'r Packer<'r>, asked: PackMultiple) -> Self {
        let streams = packer.streams.len();
        Self {
            of: asked.of,
            splitter: PackSplitter::new(),
            meter: PackMeter::new(packer),
            candidates: (0..streams).map(|_| BinaryHeap::new()).collect(),
            packs: vec![0; streams],
            total: 0,
        }
    }

    /// The numbers of the packs to leave out, ascending.
    pub(super) fn numbers(self) -> Vec<u64> {
        let mut keys = Vec::new();
        for (stream, heap) in self.candidates.into_iter().enumerate() {
            let packs = self.packs[stream];
            keys.extend(heap.into_iter().map(|(taken, number)| (taken, Reverse(packs), Reverse(stream), number)));
        }
        keys.sort_unstable();
        keys.truncate((self.total % self.of) as usize);
        let mut numbers: Vec<u64> = keys.into_iter().map(|(.., Reverse(number))| number).collect();
        numbers.sort_unstable();
        numbers
    }
}

impl<P: PlanInteger> PlanOutput<P> for EmptiestPacks<'_, P> {
    fn append(&mut self, columns: &PackColumns<'_, P>, _progress: &mut dyn Progress) -> Result<(), PackError> {
        let Self { of, splitter, meter, candidates, packs, total } = self;
        let heap = &mut candidates[columns.dataset_id];
        packs[columns.dataset_id] += columns.count() as u64;
        splitter.split(columns, |pack| {
            let size = meter.measure(pack);
            heap.push((size.tokens.saturating_add(size.padding), Reverse(*total)));
            if heap.len() as u64 >= *of {
                heap.pop();
            }
            *total += 1;
            Ok(())
        })
    }

    fn remove_last_pieces(&mut self, count: usize) -> Result<(), PackError> {
        self.splitter.remove_last(count);
        Ok(())
    }
}

/// Hands over all packs but some.
pub(super) struct KeptPacks<'r, 'o, P> {
    splitter: PackSplitter<P>,
    meter: PackMeter<'r, P>,
    max_length: u64,
    /// The packs that are left out, ascending, and how many of them came.
    left_out: Vec<u64>,
    next: usize,
    multiple: MultipleMetadata,
    /// Packs and pieces so far: all packs, and the pieces that are kept.
    packs: u64,
    pieces: u64,
    /// Where the first pack that is left out begins in its sample, by stream.
    tail_start: BTreeMap<usize, u64>,
    /// Parts that are left out of samples that are split, by stream and sample: with all parts of each.
    parts: BTreeMap<(usize, u64), (u64, u64)>,
    /// Packs that are kept, of one call.
    rows: PackRows<P>,
    output: &'o mut dyn PlanOutput<P>,
}

impl<'r, 'o, P: PlanInteger> KeptPacks<'r, 'o, P> {
    pub(super) fn new(
        packer: &'r Packer<'r>,
        asked: PackMultiple,
        left_out: Vec<u64>,
        output: &'o mut dyn PlanOutput<P>,
    ) -> Self {
        Self {
            splitter: PackSplitter::new(),
            meter: PackMeter::new(packer),
            max_length: packer.request.max_length,
            left_out,
            next: 0,
            multiple: MultipleMetadata::new(asked),
            packs: 0,
            pieces: 0,
            tail_start: BTreeMap::new(),
            parts: BTreeMap::new(),
            rows: PackRows::new(),
            output,
        }
    }

    /// What was left out, and where the tail of each stream that lost packs begins.
    pub(super) fn finish(mut self) -> Result<(MultipleMetadata, BTreeMap<usize, u64>), PackError> {
        if self.next < self.left_out.len() || !(self.packs - self.next as u64).is_multiple_of(self.multiple.of) {
            return Err(PackError::InputChanged);
        }
        // A sample with a part in another pack is not left out.
        let whole = self.parts.values().filter(|(left_out, all)| left_out == all).count() as u64;
        self.multiple.samples += whole;
        self.multiple.samples_overlong += whole;
        Ok((self.multiple, self.tail_start))
    }
}

/// Count a pack that is left out.
fn note_left_out<P: PlanInteger>(
    multiple: &mut MultipleMetadata,
    parts: &mut BTreeMap<(usize, u64), (u64, u64)>,
    meter: &mut PackMeter<'_, P>,
    max_length: u64,
    pack: &ClosedPack<'_, P>,
) {
    let size = meter.measure(pack);
    multiple.packs += 1;
    multiple.pieces += pack.indices.len() as u64;
    multiple.tokens = multiple.tokens.saturating_add(size.tokens);
    multiple.padding_align = multiple.padding_align.saturating_add(size.padding);
    let Some(options) = meter.options(pack) else { return };
    for (&sample, &length) in pack.indices.iter().zip(meter.lengths(pack)) {
        let length = length.widen();
        if length > max_length && options.overlong == Overlong::Split {
            parts.entry((pack.dataset_id, sample.widen())).or_insert((0, length.div_ceil(max_length))).0 += 1;
            continue;
        }
        multiple.samples += 1;
        multiple.samples_overlong += u64::from(length > max_length);
    }
}

impl<P: PlanInteger> PlanOutput<P> for KeptPacks<'_, '_, P> {
    fn append(&mut self, columns: &PackColumns<'_, P>, progress: &mut dyn Progress) -> Result<(), PackError> {
        let Self { splitter, meter, max_length, left_out, next, multiple, packs, pieces, .. } = self;
        let (rows, parts, tail_start) = (&mut self.rows, &mut self.parts, &mut self.tail_start);
        rows.clear();
        splitter.split(columns, |pack| {
            if left_out.get(*next).is_some_and(|number| number == packs) {
                *next += 1;
                tail_start.entry(pack.dataset_id).or_insert(pack.start.widen());
                note_left_out(multiple, parts, meter, *max_length, pack);
            } else {
                rows.push(pack, *pieces);
                *pieces += pack.indices.len() as u64;
            }
            *packs += 1;
            Ok(())
        })?;
        self.output.append(&rows.columns(columns.dataset_id), progress)
    }

    fn remove_last_pieces(&mut self, count: usize) -> Result<(), PackError> {
        self.splitter.remove_last(count);
        Ok(())
    }
}

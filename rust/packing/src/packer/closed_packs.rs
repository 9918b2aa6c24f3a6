//! Splits what a mode appends into single packs, measures them, and collects packs.

use crate::error::PackError;
use crate::packer::{PackColumns, Packer};
use crate::plan::PlanInteger;
use crate::request::WholeOptions;

/// One pack with all of its pieces.
pub(crate) struct ClosedPack<'p, P> {
    pub(crate) dataset_id: usize,
    pub(crate) indices: &'p [P],
    /// Starts and stops of the pieces, in a plan that has them.
    pub(crate) ranges: Option<[&'p [P]; 2]>,
    pub(crate) start: P,
    pub(crate) end: P,
    pub(crate) longest: P,
}

/// Keeps pieces until their pack is closed. Hard packing appends pieces of a pack before the pack itself.
pub(crate) struct PackSplitter<P> {
    indices: Vec<P>,
    ranges: Option<[Vec<P>; 2]>,
    /// Pieces of the packs so far.
    pieces: u64,
}

impl<P: PlanInteger> PackSplitter<P> {
    pub(crate) fn new() -> Self {
        Self { indices: Vec::new(), ranges: None, pieces: 0 }
    }

    /// Take pieces and packs, and hand each pack to `visit`.
    pub(crate) fn split(
        &mut self,
        columns: &PackColumns<'_, P>,
        mut visit: impl FnMut(&ClosedPack<'_, P>) -> Result<(), PackError>,
    ) -> Result<(), PackError> {
        self.indices.extend_from_slice(columns.indices);
        if let Some(more) = columns.piece_ranges {
            let ranges = self.ranges.get_or_insert_default();
            ranges.iter_mut().zip(more).for_each(|(column, more)| column.extend_from_slice(more));
        }
        let [cumulative, starts, ends, longests] = columns.packs;
        let mut begin = 0;
        for (pack, count) in cumulative.iter().enumerate() {
            let stop = count.widen().wrapping_sub(self.pieces) as usize;
            let indices = self.indices.get(begin..stop).ok_or(PackError::InputChanged)?;
            let ranges = self.ranges.as_ref().map(|ranges| ranges.each_ref().map(|column| &column[begin..stop]));
            let (start, end, longest) = (starts[pack], ends[pack], longests[pack]);
            visit(&ClosedPack { dataset_id: columns.dataset_id, indices, ranges, start, end, longest })?;
            begin = stop;
        }
        self.indices.drain(..begin);
        self.ranges.iter_mut().flatten().for_each(|column| drop(column.drain(..begin)));
        self.pieces += begin as u64;
        Ok(())
    }

    /// Forget the last `count` pieces, which belong to no pack.
    pub(crate) fn remove_last(&mut self, count: usize) {
        self.indices.truncate(self.indices.len().saturating_sub(count));
    }
}

/// Columns of packs.
pub(crate) struct PackRows<P> {
    indices: Vec<P>,
    ranges: Option<[Vec<P>; 2]>,
    packs: [Vec<P>; 4],
}

impl<P: PlanInteger> PackRows<P> {
    pub(crate) fn new() -> Self {
        Self { indices: Vec::new(), ranges: None, packs: [const { Vec::new() }; 4] }
    }

    /// Append a pack that follows `pieces` pieces in the plan.
    pub(crate) fn push(&mut self, pack: &ClosedPack<'_, P>, pieces: u64) {
        self.indices.extend_from_slice(pack.indices);
        if let Some(ranges) = pack.ranges {
            self.push_ranges(ranges);
        }
        let cumulative = P::truncate(pieces + pack.indices.len() as u64);
        let row = [cumulative, pack.start, pack.end, pack.longest];
        self.packs.iter_mut().zip(row).for_each(|(column, value)| column.push(value));
    }

    /// Append starts and stops of the pieces of a pack.
    pub(crate) fn push_ranges(&mut self, more: [&[P]; 2]) {
        let ranges = self.ranges.get_or_insert_default();
        ranges.iter_mut().zip(more).for_each(|(column, more)| column.extend_from_slice(more));
    }

    pub(crate) fn clear(&mut self) {
        self.indices.clear();
        self.packs.iter_mut().chain(self.ranges.iter_mut().flatten()).for_each(Vec::clear);
    }

    pub(crate) fn columns(&self, dataset_id: usize) -> PackColumns<'_, P> {
        PackColumns {
            dataset_id,
            indices: &self.indices,
            packs: self.packs.each_ref().map(|column| &column[..]),
            piece_ranges: self.ranges.as_ref().map(|ranges| ranges.each_ref().map(|column| &column[..])),
        }
    }
}

/// What the pieces of packs hold.
pub(crate) struct PackMeter<'r, P> {
    packer: &'r Packer<'r>,
    /// Lengths of the samples of a pack.
    lengths: Vec<P>,
    /// Starts and stops of the pieces of a pack.
    ranges: [Vec<P>; 2],
}

/// What the pieces of one pack hold together.
#[derive(Clone, Copy, Default)]
pub(crate) struct PackSize {
    pub(crate) tokens: u64,
    /// Padding because of `align`.
    pub(crate) padding: u64,
}

impl<'r, P: PlanInteger> PackMeter<'r, P> {
    pub(crate) fn new(packer: &'r Packer<'r>) -> Self {
        Self { packer, lengths: Vec::new(), ranges: [Vec::new(), Vec::new()] }
    }

    pub(crate) fn has_piece_ranges(&self) -> bool {
        self.packer.has_piece_ranges()
    }

    /// The options of the pack's dataset, if it has whole samples.
    pub(crate) fn options(&self, pack: &ClosedPack<'_, P>) -> Option<WholeOptions> {
        self.packer.whole_options(pack.dataset_id)
    }

    /// The lengths of the samples of a pack.
    pub(crate) fn lengths(&mut self, pack: &ClosedPack<'_, P>) -> &[P] {
        self.lengths.resize(pack.indices.len(), P::default());
        self.packer.streams[pack.dataset_id].gather(pack.indices, &mut self.lengths);
        &self.lengths
    }

    /// Starts and stops of the pieces of a pack, whether it has them or not.
    pub(crate) fn ranges<'s>(&'s mut self, pack: &ClosedPack<'s, P>) -> [&'s [P]; 2] {
        if let Some(ranges) = pack.ranges {
            return ranges;
        }
        let [starts, stops] = &mut self.ranges;
        starts.clear();
        starts.resize(pack.indices.len(), P::default());
        stops.resize(pack.indices.len(), P::default());
        self.packer.streams[pack.dataset_id].gather(pack.indices, stops);
        if let (Some(first), Some(last)) = (starts.first_mut(), stops.last_mut()) {
            (*first, *last) = (pack.start, pack.end);
        }
        [&*starts, &*stops]
    }

    pub(crate) fn measure(&mut self, pack: &ClosedPack<'_, P>) -> PackSize {
        let options = self.options(pack);
        let [starts, stops] = self.ranges(pack);
        let mut size = PackSize::default();
        for (&start, &stop) in starts.iter().zip(stops) {
            let tokens = stop.minus(start).widen();
            size.tokens = size.tokens.saturating_add(tokens);
            let aligned = options.map_or(tokens, |options| options.aligned(tokens));
            size.padding = size.padding.saturating_add(aligned - tokens);
        }
        size
    }
}

//! Splits what a mode appends into single packs.

use crate::error::PackError;
use crate::packer::{PackColumns, Packer};
use crate::plan::PlanInteger;
use crate::request::{Mode, WholeOptions};

/// One pack with all of its pieces.
pub(super) struct ClosedPack<'p, P> {
    pub(super) dataset_id: usize,
    pub(super) indices: &'p [P],
    /// Starts and stops of the pieces, in a plan that has them.
    pub(super) ranges: Option<[&'p [P]; 2]>,
    pub(super) start: P,
    pub(super) end: P,
    pub(super) longest: P,
}

/// Keeps pieces until their pack is closed. Hard packing appends pieces of a pack before the pack itself.
pub(super) struct PackSplitter<P> {
    indices: Vec<P>,
    ranges: Option<[Vec<P>; 2]>,
    /// Pieces of the packs so far.
    pieces: u64,
}

impl<P: PlanInteger> PackSplitter<P> {
    pub(super) fn new() -> Self {
        Self { indices: Vec::new(), ranges: None, pieces: 0 }
    }

    /// Take pieces and packs, and hand each pack to `visit`.
    pub(super) fn split(
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
    pub(super) fn remove_last(&mut self, count: usize) {
        self.indices.truncate(self.indices.len().saturating_sub(count));
    }
}

/// What the pieces of packs hold.
pub(super) struct PackMeter<'r, P> {
    packer: &'r Packer<'r>,
    options: Option<WholeOptions>,
    /// Lengths of the samples of a pack.
    lengths: Vec<P>,
}

/// What the pieces of one pack hold together.
#[derive(Clone, Copy, Default)]
pub(super) struct PackSize {
    pub(super) tokens: u64,
    /// Padding because of `align`.
    pub(super) padding: u64,
}

impl<'r, P: PlanInteger> PackMeter<'r, P> {
    pub(super) fn new(packer: &'r Packer<'r>) -> Self {
        let options = match packer.request.mode {
            Mode::Hard { .. } => None,
            Mode::Whole(options) => Some(options),
        };
        Self { packer, options, lengths: Vec::new() }
    }

    pub(super) fn options(&self) -> Option<WholeOptions> {
        self.options
    }

    /// The lengths of the samples of a pack.
    pub(super) fn lengths(&mut self, pack: &ClosedPack<'_, P>) -> &[P] {
        self.lengths.resize(pack.indices.len(), P::default());
        self.packer.streams[pack.dataset_id].gather(pack.indices, &mut self.lengths);
        &self.lengths
    }

    pub(super) fn measure(&mut self, pack: &ClosedPack<'_, P>) -> PackSize {
        let options = self.options;
        let mut size = PackSize::default();
        let mut add = |tokens: u64| {
            size.tokens = size.tokens.saturating_add(tokens);
            let aligned = options.map_or(tokens, |options| options.aligned(tokens));
            size.padding = size.padding.saturating_add(aligned - tokens);
        };
        if let Some([starts, stops]) = pack.ranges {
            starts.iter().zip(stops).for_each(|(start, &stop)| add(stop.minus(*start).widen()));
            return size;
        }
        let last = pack.indices.len().saturating_sub(1);
        for (piece, &length) in self.lengths(pack).iter().enumerate() {
            let start = if piece == 0 { pack.start } else { P::default() };
            let stop = if piece == last { pack.end } else { length };
            add(stop.minus(start).widen());
        }
        size
    }
}

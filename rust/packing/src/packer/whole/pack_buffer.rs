//! Packs on their way to the output.

use super::items::Counts;
use crate::error::PackError;
use crate::packer::{PackColumns, PlanOutput};
use crate::plan::PlanInteger;
use crate::progress::Progress;

/// Complete packs, and the pieces of one that is not closed yet.
pub(super) struct PackBuffer<P> {
    /// Sample of each piece.
    pub(super) indices: Vec<P>,
    /// Start and stop of each piece, in a plan that has them.
    pub(super) ranges: Option<[Vec<P>; 2]>,
    /// Cumulative piece counts, starts, ends, longest pieces.
    packs: [Vec<P>; 4],
}

impl<P: PlanInteger> PackBuffer<P> {
    pub(super) fn new(has_ranges: bool) -> Self {
        let ranges = has_ranges.then(|| [Vec::new(), Vec::new()]);
        Self { indices: Vec::new(), ranges, packs: [const { Vec::new() }; 4] }
    }

    /// Close a pack of the pieces since the last one. `end` is where its last piece ends in the sample; with ranges it
    /// is not used.
    pub(super) fn close_pack(&mut self, end: P, longest: P) {
        let values = [P::truncate(self.indices.len() as u64), P::default(), end, longest];
        self.packs.iter_mut().zip(values).for_each(|(column, value)| column.push(value));
    }

    /// Hand the packs, which are drawn from dataset `dataset_id`, to `output`, and forget them.
    pub(super) fn flush(
        &mut self,
        dataset_id: usize,
        counts: &mut Counts,
        output: &mut dyn PlanOutput<P>,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        let [cumulative, starts, ends, _] = &mut self.packs;
        if let Some([piece_starts, piece_stops]) = &self.ranges {
            let mut first = 0;
            for ((start, end), &pieces) in starts.iter_mut().zip(ends).zip(&*cumulative) {
                let pieces = pieces.widen() as usize;
                (*start, *end) = (piece_starts[first], piece_stops[pieces - 1]);
                first = pieces;
            }
        }
        let before = P::truncate(counts.pieces);
        cumulative.iter_mut().for_each(|pieces| *pieces = pieces.plus(before));
        counts.pieces += self.indices.len() as u64;
        counts.packs += cumulative.len() as u64;
        let columns = PackColumns {
            dataset_id,
            indices: &self.indices,
            packs: self.packs.each_ref().map(|column| &column[..]),
            piece_ranges: self.ranges.as_ref().map(|ranges| ranges.each_ref().map(|column| &column[..])),
        };
        output.append(&columns, progress)?;
        self.indices.clear();
        self.packs.iter_mut().chain(self.ranges.iter_mut().flatten()).for_each(Vec::clear);
        Ok(())
    }
}

//! Repeats the first packs at the end.

use crate::error::PackError;
use crate::packer::{ClosedPack, PackColumns, PackMeter, PackSplitter, Packer, PlanOutput};
use crate::plan::{MultipleMetadata, PlanInteger};
use crate::progress::Progress;
use crate::request::PackMultiple;

/// A pack that may come again.
struct FirstPack<P> {
    dataset_id: usize,
    indices: Vec<P>,
    ranges: Option<[Vec<P>; 2]>,
    /// Start, end, longest piece.
    row: [P; 3],
}

/// Hands over all packs, and remembers the first ones.
pub(super) struct RepeatedPacks<'o, P> {
    asked: PackMultiple,
    splitter: PackSplitter<P>,
    /// Up to `asked.of` - 1 packs.
    first: Vec<FirstPack<P>>,
    packs: u64,
    /// Pieces of the packs that are closed.
    pieces: u64,
    output: &'o mut dyn PlanOutput<P>,
}

impl<'o, P: PlanInteger> RepeatedPacks<'o, P> {
    pub(super) fn new(asked: PackMultiple, output: &'o mut dyn PlanOutput<P>) -> Self {
        Self { asked, splitter: PackSplitter::new(), first: Vec::new(), packs: 0, pieces: 0, output }
    }

    /// Append the first packs again, from the first on, as often as they are needed.
    pub(super) fn append_again(
        self,
        packer: &Packer<'_>,
        progress: &mut dyn Progress,
    ) -> Result<MultipleMetadata, PackError> {
        let mut multiple = MultipleMetadata::new(self.asked);
        let lacking = self.packs.next_multiple_of(self.asked.of) - self.packs;
        let again = || self.first.iter().cycle().take(lacking as usize);
        let more: usize = again().map(|pack| pack.indices.len()).sum();
        self.output.reserve(lacking as usize, more)?;
        let mut meter = PackMeter::new(packer);
        for pack in again() {
            let closed = pack.as_closed();
            let size = meter.measure(&closed);
            multiple.packs += 1;
            multiple.pieces += closed.indices.len() as u64;
            multiple.tokens = multiple.tokens.saturating_add(size.tokens);
            multiple.padding_align = multiple.padding_align.saturating_add(size.padding);
            let cumulative = [P::truncate(self.pieces + multiple.pieces)];
            let [start, end, longest] = pack.row.each_ref().map(std::slice::from_ref);
            let columns = PackColumns {
                dataset_id: closed.dataset_id,
                indices: closed.indices,
                packs: [&cumulative, start, end, longest],
                piece_ranges: closed.ranges,
            };
            self.output.append(&columns, progress)?;
        }
        Ok(multiple)
    }
}

impl<P: PlanInteger> FirstPack<P> {
    fn new(pack: &ClosedPack<'_, P>) -> Self {
        Self {
            dataset_id: pack.dataset_id,
            indices: pack.indices.to_vec(),
            ranges: pack.ranges.map(|ranges| ranges.map(<[P]>::to_vec)),
            row: [pack.start, pack.end, pack.longest],
        }
    }

    fn as_closed(&self) -> ClosedPack<'_, P> {
        let [start, end, longest] = self.row;
        let ranges = self.ranges.as_ref().map(|ranges| ranges.each_ref().map(|column| &column[..]));
        ClosedPack { dataset_id: self.dataset_id, indices: &self.indices, ranges, start, end, longest }
    }
}

impl<P: PlanInteger> PlanOutput<P> for RepeatedPacks<'_, P> {
    fn append(&mut self, columns: &PackColumns<'_, P>, progress: &mut dyn Progress) -> Result<(), PackError> {
        let most = self.asked.of - 1;
        if (self.first.len() as u64) < most {
            let first = &mut self.first;
            self.splitter.split(columns, |pack| {
                if (first.len() as u64) < most {
                    first.push(FirstPack::new(pack));
                }
                Ok(())
            })?;
        }
        self.packs += columns.count() as u64;
        if let Some(pieces) = columns.packs[0].last() {
            self.pieces = pieces.widen();
        }
        self.output.append(columns, progress)
    }

    fn remove_last_pieces(&mut self, count: usize) -> Result<(), PackError> {
        self.splitter.remove_last(count);
        self.output.remove_last_pieces(count)
    }
}

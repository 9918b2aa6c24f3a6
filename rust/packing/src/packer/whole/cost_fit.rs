//! Best-fit decreasing with costs: one sample after the other, the longest first.
//!
//! Each sample goes into the pack with the least room that it fits, of those that its cost fits. Samples of one length
//! differ in their costs, so groups of packs that are filled alike, as `pack_groups` counts them, do not exist.

use super::WholePacker;
use super::open_by_room::{OpenByRoom, RoomyPack};
use super::pack_buffer::PackBuffer;
use super::sorted_samples::SortedSamples;
use crate::error::PackError;
use crate::inputs::{RandomState, SampleLengths};
use crate::memory;
use crate::packer::{CHUNK, StreamCosts};
use crate::plan::PlanInteger;
use crate::progress::Progress;

/// A pack by the last of its items, of which each knows the one before it.
struct ItemChain<P> {
    /// One past the last item; 0 for none.
    end: P,
    pieces: P,
}

/// The items of each pack.
struct Placement<P> {
    packs: Vec<ItemChain<P>>,
    /// For each item, one past the item before it in its pack; 0 for none.
    before: Vec<P>,
}

impl<P: PlanInteger> WholePacker<'_, P> {
    /// Pack the items of a stream.
    pub(super) fn pack_cost_fit(
        &mut self,
        stream: &SampleLengths<'_>,
        sorted: &SortedSamples<P>,
        costs: StreamCosts<'_>,
        random: &mut RandomState,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        let placement = self.place_by_cost(sorted, costs, progress)?;
        let order: Vec<P> = random.shuffled(placement.packs.len(), progress)?;
        let max_length = self.packer.request.max_length;
        let mut buffer = PackBuffer::new(self.has_ranges());
        for (done, &number) in order.iter().enumerate() {
            let pack = &placement.packs[number.widen() as usize];
            let begin = buffer.indices.len();
            buffer.indices.resize(begin + pack.pieces.widen() as usize, P::default());
            let mut item = pack.end;
            // The shortest is last in the pack.
            for slot in buffer.indices[begin..].iter_mut().rev() {
                let at = item.widen() as usize - 1;
                (*slot, item) = (sorted.samples[at], placement.before[at]);
            }
            let tokens = |sample: P| P::truncate(stream.get(sample.widen() as usize).min(max_length));
            if let Some([starts, stops]) = &mut buffer.ranges {
                starts.resize(buffer.indices.len(), P::default());
                stops.extend(buffer.indices[begin..].iter().map(|&sample| tokens(sample)));
            }
            let (longest, shortest) = (buffer.indices[begin], buffer.indices[buffer.indices.len() - 1]);
            buffer.close_pack(tokens(shortest), tokens(longest));
            if buffer.indices.len() >= CHUNK {
                progress.tick("packing", done as u64, order.len() as u64)?;
                self.flush(&mut buffer, stream.dataset_id(), progress)?;
            }
        }
        self.flush(&mut buffer, stream.dataset_id(), progress)
    }

    fn place_by_cost(
        &self,
        sorted: &SortedSamples<P>,
        costs: StreamCosts<'_>,
        progress: &mut dyn Progress,
    ) -> Result<Placement<P>, PackError> {
        let (max_length, most_pieces) = (self.packer.request.max_length, self.options.most_pieces());
        let items = sorted.samples.len();
        let mut placement = Placement { packs: Vec::new(), before: memory::zeroed::<P>(items)? };
        let mut open = OpenByRoom::new(max_length);
        for length in sorted.lengths() {
            let size = self.options.aligned(length as u64);
            for item in sorted.run(length) {
                if item.is_multiple_of(CHUNK) {
                    progress.tick("placing samples", item as u64, items as u64)?;
                }
                let cost = costs.of(sorted.samples[item]);
                let found = open.take(size, cost).unwrap_or_else(|| {
                    placement.packs.push(ItemChain { end: P::default(), pieces: P::default() });
                    let number = placement.packs.len() as u64 - 1;
                    RoomyPack { room: max_length, cost_left: costs.max_cost, number }
                });
                let pack = &mut placement.packs[found.number as usize];
                placement.before[item] = pack.end;
                pack.end = P::truncate(item as u64 + 1);
                pack.pieces = pack.pieces.plus(P::truncate(1));
                let (room, cost_left) = (found.room - size, found.cost_left.saturating_sub(cost));
                if room > 0 && pack.pieces.widen() < most_pieces {
                    open.insert(RoomyPack { room, cost_left, number: found.number });
                }
            }
        }
        Ok(placement)
    }
}

//! Best-fit decreasing with costs: one sample after the other, the longest first.
//!
//! Each sample goes into the pack with the least room that it fits, of those that its cost fits. Samples of one length
//! differ in their costs, so groups of packs that are filled alike, as `best_fit` counts them, do not exist.
//!
//! Open packs are grouped by room in buckets. A tree over the buckets holds the largest cost that a pack of each may take, so
//! that buckets whose packs cost too much already are passed over.

use std::collections::BTreeSet;

use super::best_fit::SortedSamples;
use super::samples::CHUNK;
use super::whole::{PackBuffer, WholePacker};
use crate::error::PackError;
use crate::memory;
use crate::ordered_samples::SampleLengths;
use crate::plan::PlanInteger;
use crate::progress::Progress;
use crate::scan::StreamCosts;
use crate::shuffle::RandomState;

/// A pack by the last of its items; each item knows the one before it.
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

/// Buckets at most.
const MOST_BUCKETS: u64 = 1 << 16;

/// A pack that may take more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RoomyPack {
    /// Tokens that it has room for.
    pub(super) room: u64,
    /// Its remaining budget.
    pub(super) cost_left: u64,
    pub(super) number: u64,
}

/// Packs with nearly the same room.
#[derive(Default)]
struct Bucket {
    packs: BTreeSet<RoomyPack>,
    /// Cost left, room and number of each, for the largest cost left.
    by_cost: BTreeSet<(u64, u64, u64)>,
}

/// The packs that may take more.
pub(super) struct OpenByRoom {
    /// Room values a bucket, as a power of two.
    shift: u32,
    buckets: Vec<Bucket>,
    /// A binary tree: node `n` has the children `2 n` and `2 n + 1`, and the last half are the buckets. Each holds the
    /// largest cost left below it and 1, or 0 where no pack is.
    largest: Vec<u64>,
}

impl Bucket {
    /// The pack with the least room of `size` or more that may cost `cost` more; of several, the one with the least cost
    /// left, and then the oldest.
    fn find(&self, size: u64, cost: u64) -> Option<RoomyPack> {
        let mut room = size;
        loop {
            let from = RoomyPack { room, cost_left: cost, number: 0 };
            let &found = self.packs.range(from..).next()?;
            if found.cost_left >= cost {
                return Some(found);
            }
            // The pack has more room, and costs too much already; another one with that room may cost less.
            room = found.room;
        }
    }
}

impl OpenByRoom {
    pub(super) fn new(max_length: u64) -> Self {
        let shift = (max_length / MOST_BUCKETS + 1).next_power_of_two().trailing_zeros();
        let count = ((max_length >> shift) as usize + 1).next_power_of_two();
        let mut buckets = Vec::new();
        buckets.resize_with(count, Bucket::default);
        Self { shift, buckets, largest: vec![0; 2 * count] }
    }

    fn bucket_of(&self, room: u64) -> usize {
        (room >> self.shift) as usize
    }

    /// Remove the pack that `Bucket::find` gives, of all packs.
    pub(super) fn take(&mut self, size: u64, cost: u64) -> Option<RoomyPack> {
        let mut bucket = self.bucket_of(size);
        let found = loop {
            if let Some(found) = self.buckets.get(bucket)?.find(size, cost) {
                break found;
            }
            bucket = self.next_bucket(bucket + 1, cost)?;
        };
        let Bucket { packs, by_cost } = &mut self.buckets[bucket];
        packs.remove(&found);
        by_cost.remove(&(found.cost_left, found.room, found.number));
        self.update(bucket);
        Some(found)
    }

    pub(super) fn insert(&mut self, pack: RoomyPack) {
        let bucket = self.bucket_of(pack.room);
        let Bucket { packs, by_cost } = &mut self.buckets[bucket];
        packs.insert(pack);
        by_cost.insert((pack.cost_left, pack.room, pack.number));
        self.update(bucket);
    }

    /// The first bucket from `start` on with a pack that may cost `cost` more.
    fn next_bucket(&self, start: usize, cost: u64) -> Option<usize> {
        let count = self.buckets.len();
        if start == count {
            return None;
        }
        let mut node = start + count;
        while self.largest[node] <= cost {
            // On to the next subtree to the right.
            while node % 2 == 1 {
                if node == 1 {
                    return None;
                }
                node /= 2;
            }
            node += 1;
        }
        while node < count {
            node = if self.largest[2 * node] > cost { 2 * node } else { 2 * node + 1 };
        }
        Some(node - count)
    }

    fn update(&mut self, bucket: usize) {
        let mut node = bucket + self.buckets.len();
        self.largest[node] = self.buckets[bucket].by_cost.last().map_or(0, |&(cost_left, ..)| cost_left + 1);
        while node > 1 {
            node /= 2;
            self.largest[node] = self.largest[2 * node].max(self.largest[2 * node + 1]);
        }
    }
}

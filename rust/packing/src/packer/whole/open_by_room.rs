//! Open packs by the room that is left in them, each with what it may cost further.
//!
//! Packs are grouped by room in buckets. A tree over the buckets holds the largest cost that a pack of each may take, so that
//! buckets whose packs cost too much already are passed over.

use std::collections::BTreeSet;

/// Buckets at most.
const MOST_BUCKETS: u64 = 1 << 16;

/// A pack that may take more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RoomyPack {
    /// Tokens that it has room for.
    pub(super) room: u64,
    /// What it may cost further.
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

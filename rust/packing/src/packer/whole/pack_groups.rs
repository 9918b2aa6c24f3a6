//! Best-fit decreasing over counts of lengths: groups of packs that are filled alike, instead of single packs.
//!
//! Best-fit decreasing takes samples from the longest to the shortest, and puts each into the pack with the least room
//! that it fits. A pack that took one of several samples of a length is the fullest one that fits the next, as long as it
//! fits. So of a group of packs with the same room, each takes as many of these samples as it can hold, one pack after
//! the other, and at most one pack takes fewer. Two or three groups of packs remain of one.
//!
//! Among packs with the same room, those with the fewest pieces come first.

use std::collections::BTreeMap;

use crate::request::WholeOptions;

/// `Fill::before` of the first fill of a pack.
const NONE: usize = usize::MAX;
/// Packs for each entry of the table that finds the group of a pack.
const PACKS_AN_ENTRY: u64 = 64;

/// The same number of items of one length for each of several packs.
struct Fill {
    /// What these packs were filled with before.
    before: usize,
    /// The first of these packs, among the packs of `before`.
    offset: u64,
    /// The first pack's first item; the next packs' items follow.
    first: u64,
    /// Items for each pack.
    pieces: u64,
    /// Tokens of an item.
    length: u64,
}

/// Packs that were filled alike.
#[derive(Clone, Copy)]
struct Group {
    /// What they were filled with last.
    fill: usize,
    /// The first of them, among the packs of `fill`.
    offset: u64,
    packs: u64,
    pieces: u64,
}

/// Room, pieces, and a number that rises, so that of equal groups the oldest comes first.
type GroupKey = (u64, u64, u64);

/// Places items, the longest first.
pub(super) struct GroupPacker {
    max_length: u64,
    most_pieces: u64,
    options: WholeOptions,
    open: BTreeMap<GroupKey, Group>,
    next_number: u64,
    /// Items placed.
    placed: u64,
    packs: PackGroups,
}

/// All packs, numbered from 0 on.
#[derive(Default)]
pub(super) struct PackGroups {
    fills: Vec<Fill>,
    groups: Vec<Group>,
    /// The first pack of each group.
    begins: Vec<u64>,
    /// For every `PACKS_AN_ENTRY` packs, the group of the first.
    table: Vec<usize>,
    total: u64,
}

impl GroupPacker {
    pub(super) fn new(max_length: u64, options: &WholeOptions) -> Self {
        Self {
            max_length,
            most_pieces: options.most_pieces(),
            options: *options,
            open: BTreeMap::new(),
            next_number: 0,
            placed: 0,
            packs: PackGroups::default(),
        }
    }

    /// Place the next `count` items, each of `length` tokens, which is no more than the length of any before them.
    pub(super) fn place(&mut self, length: u64, mut count: u64) {
        let size = self.options.aligned(length);
        while count > 0 {
            let found = self.open.range((size, 0, 0)..).next().map(|(&key, _)| key);
            let (room, pieces, group) = match found.and_then(|key| self.open.remove_entry(&key)) {
                Some(((room, pieces, number), group)) => {
                    let each = (room / size).min(self.most_pieces - pieces);
                    let used = count.div_ceil(each).min(group.packs);
                    if used < group.packs {
                        let rest = Group { offset: group.offset + used, packs: group.packs - used, ..group };
                        self.open.insert((room, pieces, number), rest);
                    }
                    (room, pieces, Group { packs: used, ..group })
                }
                None => {
                    let each = (self.max_length / size).min(self.most_pieces);
                    let new = Group { fill: NONE, offset: 0, packs: count.div_ceil(each), pieces: 0 };
                    (self.max_length, 0, new)
                }
            };
            let each = (room / size).min(self.most_pieces - pieces);
            let full = group.packs.min(count / each);
            self.fill(room, Group { packs: full, ..group }, each, length);
            count -= full * each;
            if full < group.packs {
                // Fewer are left than the pack could hold.
                self.fill(room, Group { offset: group.offset + full, packs: 1, ..group }, count, length);
                count = 0;
            }
        }
    }

    /// Put the next items into the packs of a group, `each` into each of them.
    fn fill(&mut self, room: u64, group: Group, each: u64, length: u64) {
        if group.packs == 0 {
            return;
        }
        let fill = Fill { before: group.fill, offset: group.offset, first: self.placed, pieces: each, length };
        self.placed += group.packs * each;
        let pieces = group.pieces + each;
        let group = Group { fill: self.packs.fills.len(), offset: 0, packs: group.packs, pieces };
        self.packs.fills.push(fill);
        let room = room - each * self.options.aligned(length);
        if room == 0 || pieces == self.most_pieces {
            self.packs.groups.push(group);
        } else {
            self.open.insert((room, pieces, self.next_number), group);
            self.next_number += 1;
        }
    }

    /// The packs, once all items are placed.
    pub(super) fn finish(self) -> PackGroups {
        let mut packs = self.packs;
        packs.groups.extend(self.open.into_values());
        for (number, group) in packs.groups.iter().enumerate() {
            packs.begins.push(packs.total);
            packs.total += group.packs;
            packs.table.resize(packs.total.div_ceil(PACKS_AN_ENTRY) as usize, number);
        }
        packs
    }
}

impl PackGroups {
    /// How many packs.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Pack `number`, which exists.
    #[inline]
    pub(super) fn pack(&self, number: u64) -> Pack<'_> {
        let mut group = self.table[(number / PACKS_AN_ENTRY) as usize];
        while self.begins.get(group + 1).is_some_and(|&begin| begin <= number) {
            group += 1;
        }
        let Group { fill, offset, pieces, .. } = self.groups[group];
        Pack { fills: &self.fills, fill, rank: offset + (number - self.begins[group]), pieces }
    }
}

/// One pack: iterates over its items, the shortest first.
pub(super) struct Pack<'a> {
    fills: &'a [Fill],
    fill: usize,
    /// Which of the packs of `fill` it is.
    rank: u64,
    pub(super) pieces: u64,
}

/// Items of a pack that have one length and follow each other.
pub(super) struct Items {
    /// The first item, in the sorted order.
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) length: u64,
}

impl Iterator for Pack<'_> {
    type Item = Items;

    #[inline]
    fn next(&mut self) -> Option<Items> {
        let fill = self.fills.get(self.fill)?;
        let first = (fill.first + self.rank * fill.pieces) as usize;
        (self.fill, self.rank) = (fill.before, self.rank + fill.offset);
        Some(Items { first, count: fill.pieces as usize, length: fill.length })
    }
}

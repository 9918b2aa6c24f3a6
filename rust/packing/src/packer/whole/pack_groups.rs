//! Best-fit decreasing over counts of lengths: groups of packs that are filled alike, instead of single packs.
//!
//! Best-fit decreasing takes samples from the longest to the shortest, and puts each into the pack with the least room
//! that it fits. A pack that took one of several samples of a length is the fullest one that fits the next, as long as it
//! fits. So of a group of packs with the same room, each takes as many of these samples as it can hold, one pack after
//! the other, and at most one pack takes fewer. Two or three groups of packs remain of one.
//!
//! Among packs with the same room, those with the fewest pieces come first.

use std::collections::BTreeMap;

use crate::plan::PlanInteger;
use crate::request::WholeOptions;

/// `Fill::before` of the first fill of a pack: a number that no fill has.
const NONE: u64 = u64::MAX;
/// Packs for each entry of the table that finds the group of a pack.
const PACKS_AN_ENTRY: u64 = 64;

/// The same number of items of one length for each of several packs.
struct Fill<P> {
    /// What these packs were filled with before.
    before: P,
    /// The first of these packs, among the packs of `before`.
    offset: P,
    /// The first pack's first item; the next packs' items follow.
    first: P,
    /// Items for each pack.
    pieces: P,
    /// Tokens of an item.
    length: P,
}

/// Packs that were filled alike, and may take more.
#[derive(Clone, Copy)]
struct OpenGroup {
    /// What they were filled with last.
    fill: u64,
    /// The first of them, among the packs of `fill`.
    offset: u64,
    packs: u64,
    pieces: u64,
}

/// Packs that were filled alike, all of them following each other.
struct Group<P> {
    /// As in `OpenGroup`.
    fill: P,
    offset: P,
    pieces: P,
    /// The first pack.
    begin: P,
}

/// Room, pieces, and a number that rises, so that of equal groups the oldest comes first.
type GroupKey = (u64, u64, u64);

/// Places items, the longest first.
pub(super) struct GroupPacker<P> {
    max_length: u64,
    most_pieces: u64,
    options: WholeOptions,
    open: BTreeMap<GroupKey, OpenGroup>,
    next_number: u64,
    /// Items placed.
    placed: u64,
    packs: PackGroups<P>,
}

/// All packs, numbered from 0 on.
///
/// They are read in a random order, so the integers are as narrow as the plan allows: caches hold more of them.
pub(super) struct PackGroups<P> {
    fills: Vec<Fill<P>>,
    groups: Vec<Group<P>>,
    /// For every `PACKS_AN_ENTRY` packs, the group of the first.
    table: Vec<P>,
    total: u64,
}

impl<P: PlanInteger> GroupPacker<P> {
    pub(super) fn new(max_length: u64, options: &WholeOptions) -> Self {
        Self {
            max_length,
            most_pieces: options.most_pieces(),
            options: *options,
            open: BTreeMap::new(),
            next_number: 0,
            placed: 0,
            packs: PackGroups { fills: Vec::new(), groups: Vec::new(), table: Vec::new(), total: 0 },
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
                        let rest = OpenGroup { offset: group.offset + used, packs: group.packs - used, ..group };
                        self.open.insert((room, pieces, number), rest);
                    }
                    (room, pieces, OpenGroup { packs: used, ..group })
                }
                None => {
                    let each = (self.max_length / size).min(self.most_pieces);
                    let new = OpenGroup { fill: NONE, offset: 0, packs: count.div_ceil(each), pieces: 0 };
                    (self.max_length, 0, new)
                }
            };
            let each = (room / size).min(self.most_pieces - pieces);
            let full = group.packs.min(count / each);
            self.fill(room, OpenGroup { packs: full, ..group }, each, length);
            count -= full * each;
            if full < group.packs {
                // Fewer are left than the pack could hold.
                self.fill(room, OpenGroup { offset: group.offset + full, packs: 1, ..group }, count, length);
                count = 0;
            }
        }
    }

    /// Put the next items into the packs of a group, `each` into each of them.
    fn fill(&mut self, room: u64, group: OpenGroup, each: u64, length: u64) {
        if group.packs == 0 {
            return;
        }
        let number = self.packs.fills.len() as u64;
        self.packs.fills.push(Fill {
            before: P::truncate(group.fill),
            offset: P::truncate(group.offset),
            first: P::truncate(self.placed),
            pieces: P::truncate(each),
            length: P::truncate(length),
        });
        self.placed += group.packs * each;
        let pieces = group.pieces + each;
        let group = OpenGroup { fill: number, offset: 0, packs: group.packs, pieces };
        let room = room - each * self.options.aligned(length);
        if room == 0 || pieces == self.most_pieces {
            self.packs.close(group);
        } else {
            self.open.insert((room, pieces, self.next_number), group);
            self.next_number += 1;
        }
    }

    /// The packs, once all items are placed.
    pub(super) fn finish(self) -> PackGroups<P> {
        let mut packs = self.packs;
        self.open.into_values().for_each(|group| packs.close(group));
        packs
    }
}

impl<P: PlanInteger> PackGroups<P> {
    /// Let nothing more into the packs of a group.
    fn close(&mut self, group: OpenGroup) {
        let OpenGroup { fill, offset, packs, pieces } = group;
        let [fill, offset, pieces, begin] = [fill, offset, pieces, self.total].map(P::truncate);
        let number = self.groups.len() as u64;
        self.groups.push(Group { fill, offset, pieces, begin });
        self.total += packs;
        self.table.resize(self.total.div_ceil(PACKS_AN_ENTRY) as usize, P::truncate(number));
    }

    /// How many packs.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Pack `number`, which exists.
    #[inline]
    pub(super) fn pack(&self, number: u64) -> Pack<'_, P> {
        let mut at = self.table[(number / PACKS_AN_ENTRY) as usize].widen() as usize;
        while self.groups.get(at + 1).is_some_and(|next| next.begin.widen() <= number) {
            at += 1;
        }
        let &Group { fill, offset, pieces, begin } = &self.groups[at];
        let rank = offset.widen() + (number - begin.widen());
        Pack { fills: &self.fills, fill, rank, pieces: pieces.widen() as usize }
    }
}

/// One pack: iterates over its items, the shortest first.
pub(super) struct Pack<'a, P> {
    fills: &'a [Fill<P>],
    fill: P,
    /// Which of the packs of `fill` it is.
    rank: u64,
    pub(super) pieces: usize,
}

/// Items of a pack that have one length and follow each other.
pub(super) struct Items<P> {
    /// The first item, in the sorted order.
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) length: P,
}

impl<P: PlanInteger> Iterator for Pack<'_, P> {
    type Item = Items<P>;

    #[inline]
    fn next(&mut self) -> Option<Items<P>> {
        let &Fill { before, offset, first, pieces, length } = self.fills.get(self.fill.widen() as usize)?;
        let first = first.widen() + self.rank * pieces.widen();
        (self.fill, self.rank) = (before, self.rank + offset.widen());
        Some(Items { first: first as usize, count: pieces.widen() as usize, length })
    }
}

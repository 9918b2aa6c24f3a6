//! Best-fit decreasing over all samples of a stream.
//!
//! The samples are sorted by length, by counting (`SortedSamples`). Groups of packs are filled by counts (`PackGroups`),
//! and the packs are written in a random order, each from where its items lie in the sorted samples.
//!
//! Best-fit decreasing takes samples from the longest to the shortest, and puts each into the pack with the least room
//! that it fits. Once a pack took a sample, it stays the best fit for that length until it is full. So of a group of packs
//! with the same room, each takes as many samples of a length as it can hold, one pack after the other. At most one pack
//! takes fewer. Two or three groups of packs remain of one. Among packs with the same room, those with
//! the fewest pieces come first.
//!
//! Invariants: inputs that change between the two passes of the sort are an error, or give another plan of the same counts.

use std::collections::BTreeMap;
use std::ops::Range;

use super::Packer;
use super::samples::{CHUNK, CHUNKS_A_THREAD, FEW_SAMPLES, IndexSource, SampleReader};
use super::whole::{Counts, PackBuffer, SampleParts, WholePacker};
use crate::error::PackError;
use crate::fingerprint::ColumnHash;
use crate::memory;
use crate::ordered_samples::{SampleLengths, SampleOrder};
use crate::plan::PlanInteger;
use crate::progress::Progress;
use crate::request::WholeOptions;
use crate::scan::ScanResult;
use crate::shuffle::RandomState;
use crate::threads::Threads;

/// Lengths that are placed between two ticks.
const LENGTHS_A_TICK: usize = 256;

/// Packs that are written together.
struct Chunk<P> {
    /// Where in the order of the packs they are.
    start: usize,
    count: usize,
    buffer: PackBuffer<P>,
    /// Lengths of the samples, where they are needed.
    lengths: Vec<P>,
}

/// Writes the packs of one stream.
struct PackWriter<'r, P> {
    max_length: u64,
    stream: &'r SampleLengths<'r>,
    sorted: SortedSamples<P>,
    groups: PackGroups,
    /// The packs in the order in which they are written.
    order: Vec<P>,
}

impl<P: PlanInteger> WholePacker<'_, P> {
    /// Pack a stream. Without `is_shuffled` the samples of one length keep their order.
    pub(super) fn pack_best_fit(
        &mut self,
        stream: &SampleLengths<'_>,
        scan: &ScanResult,
        random: &mut RandomState,
        is_shuffled: bool,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        let max_length = self.packer.request.max_length;
        let sorting = Sorting { packer: self.packer, options: self.options, stream, scan };
        let mut sorted = sorting.sort::<P>(&mut self.counts, &mut self.order_hash, progress)?;
        if is_shuffled {
            sorted.shuffle(random, progress)?;
        }
        if let Some(costs) = self.costs {
            return self.pack_cost_fit(stream, &sorted, costs, random, progress);
        }
        let mut groups = GroupPacker::new(max_length, self.options);
        for (number, length) in sorted.lengths().enumerate() {
            if number.is_multiple_of(LENGTHS_A_TICK) {
                progress.tick("placing samples", number as u64, scan.longest.min(max_length))?;
            }
            groups.place(length as u64, sorted.run(length).len() as u64);
        }
        let groups = groups.finish();
        let packs = usize::try_from(groups.total() + sorted.count_full_parts()).unwrap_or(usize::MAX);
        let order = random.shuffled(packs, progress)?;
        let writer = PackWriter { max_length, stream, sorted, groups, order };
        self.write_packs(&writer, progress)
    }

    fn write_packs(&mut self, writer: &PackWriter<'_, P>, progress: &mut dyn Progress) -> Result<(), PackError> {
        let packs = writer.order.len();
        if packs == 0 {
            return Ok(());
        }
        let (packer, pieces) = (self.packer, writer.sorted.samples.len());
        let threads = if pieces > FEW_SAMPLES { &packer.threads } else { &Threads::new(1) };
        let window = if threads.count() == 1 { 1 } else { threads.count() * CHUNKS_A_THREAD };
        // As many packs as have about as many pieces as a chunk.
        let step = (CHUNK / pieces.div_ceil(packs).max(1)).max(1);
        let mut chunks: Vec<Chunk<P>> = Vec::new();
        let has_ranges = self.has_ranges();
        chunks.resize_with(window.min(packs.div_ceil(step)), || Chunk::new(has_ranges));
        for begin in (0..packs).step_by(step * window) {
            progress.tick("packing", begin as u64, packs as u64)?;
            let used = (packs - begin).div_ceil(step).min(window);
            let chunks = &mut chunks[..used];
            for (chunk, start) in chunks.iter_mut().zip((begin..).step_by(step)) {
                (chunk.start, chunk.count) = (start, step.min(packs - start));
            }
            threads.for_each(chunks, |_, chunk| writer.write(chunk));
            for chunk in chunks {
                self.flush(&mut chunk.buffer, writer.stream.dataset_id(), progress)?;
            }
        }
        Ok(())
    }
}

impl<P: PlanInteger> Chunk<P> {
    fn new(has_ranges: bool) -> Self {
        Self { start: 0, count: 0, buffer: PackBuffer::new(has_ranges), lengths: Vec::new() }
    }
}

impl<P: PlanInteger> PackWriter<'_, P> {
    fn write(&self, chunk: &mut Chunk<P>) {
        let full_parts = self.sorted.count_full_parts();
        for &number in &self.order[chunk.start..chunk.start + chunk.count] {
            match number.widen().checked_sub(full_parts) {
                None => self.write_full_part(number.widen(), &mut chunk.buffer),
                Some(number) => self.write_pack(number, &mut chunk.buffer),
            }
        }
        if self.sorted.has_last_parts && chunk.buffer.ranges.is_some() {
            self.move_last_parts(chunk);
        }
    }

    /// Write a pack that holds part `number` of those that fill a pack.
    fn write_full_part(&self, number: u64, buffer: &mut PackBuffer<P>) {
        let parts = &self.sorted.full_parts;
        let at = parts.partition_point(|&(_, end)| end <= number);
        let before = at.checked_sub(1).map_or(0, |before| parts[before].1);
        let start = (number - before) * self.max_length;
        let (start, stop) = (P::truncate(start), P::truncate(start + self.max_length));
        buffer.indices.push(parts[at].0);
        if let Some([starts, stops]) = &mut buffer.ranges {
            starts.push(start);
            stops.push(stop);
        }
        buffer.close_pack(stop, P::truncate(self.max_length));
    }

    fn write_pack(&self, number: u64, buffer: &mut PackBuffer<P>) {
        let pack = self.groups.pack(number);
        let begin = buffer.indices.len();
        let mut end = begin + pack.pieces as usize;
        buffer.indices.resize(end, P::default());
        if let Some([starts, stops]) = &mut buffer.ranges {
            starts.resize(end, P::default());
            stops.resize(end, P::default());
        }
        let (mut shortest, mut longest) = (None, 0);
        // The shortest come first here, and last in the pack.
        for items in pack {
            let slots = end - items.count..end;
            let samples = &self.sorted.samples[items.first..items.first + items.count];
            match samples {
                // A call of memcpy takes longer.
                &[sample] => buffer.indices[slots.start] = sample,
                samples => buffer.indices[slots.clone()].copy_from_slice(samples),
            }
            if let Some([_, stops]) = &mut buffer.ranges {
                stops[slots.clone()].fill(P::truncate(items.length));
            }
            shortest = shortest.or(Some(items.length));
            (longest, end) = (items.length, slots.start);
        }
        buffer.close_pack(P::truncate(shortest.unwrap_or_default()), P::truncate(longest));
    }

    /// Move items that are the last parts of their samples to where those lie.
    fn move_last_parts(&self, chunk: &mut Chunk<P>) {
        let Chunk { buffer: PackBuffer { indices, ranges: Some([starts, stops]), .. }, lengths, .. } = chunk else {
            return;
        };
        lengths.resize(indices.len(), P::default());
        self.stream.gather(indices, lengths);
        let max_length = P::truncate(self.max_length);
        for ((start, stop), &length) in starts.iter_mut().zip(stops).zip(&*lengths) {
            // Parts that fill a pack lie where they should.
            if length > max_length && *stop < max_length {
                (*start, *stop) = (length.minus(*stop), length);
            }
        }
    }
}

/// Items or lengths that are shuffled between two ticks.
const SHUFFLED_A_TICK: usize = 1 << 16;

/// The items of a stream, the longest first; those of one length in the order of their samples.
pub(super) struct SortedSamples<P> {
    /// The sample of each item.
    pub(super) samples: Vec<P>,
    /// For each length, where its run of items ends.
    ends: Vec<P>,
    /// Samples with parts of `max_length` tokens, which are no items: each with the number of such parts up to its last.
    pub(super) full_parts: Vec<(P, u64)>,
    /// Whether an item may be the last part of a sample.
    pub(super) has_last_parts: bool,
}

/// What is sorted, and how.
pub(super) struct Sorting<'r> {
    pub(super) packer: &'r Packer<'r>,
    pub(super) options: &'r WholeOptions,
    pub(super) stream: &'r SampleLengths<'r>,
    pub(super) scan: &'r ScanResult,
}

impl Sorting<'_> {
    fn indices<P: PlanInteger>(&self) -> IndexSource<'_, P> {
        match self.packer.request.order {
            SampleOrder::Given(order) => IndexSource::Given(order),
            _ => IndexSource::Natural(self.stream.len()),
        }
    }

    fn parts(&self, length: u64) -> Result<SampleParts, PackError> {
        SampleParts::new(length, self.packer.request.max_length, self.options.overlong)
    }

    /// Sort the samples, and count them. An order that was given is checked and hashed.
    ///
    /// # Errors
    /// A bad order; `InputChanged`; memory that is refused; an interrupt.
    pub(super) fn sort<P: PlanInteger>(
        &self,
        counts: &mut Counts,
        order_hash: &mut ColumnHash,
        progress: &mut dyn Progress,
    ) -> Result<SortedSamples<P>, PackError> {
        let max_length = self.packer.request.max_length;
        let longest = self.scan.longest.min(max_length) as usize;
        let one = P::truncate(1);
        // How many items there are of each length; then where they end.
        let mut ends = memory::zeroed::<P>(longest + 2)?;
        let mut full_parts = Vec::new();
        let (mut tokens, mut parts_before) = (0u64, 0u64);
        let has_last_parts = self.scan.longest > max_length;
        let threads = &self.packer.threads;
        let reader = SampleReader::new(self.stream, self.indices::<P>(), threads)?;
        reader.for_each_chunk("counting lengths", threads, progress, |chunk, _| {
            order_hash.push(chunk.order_leaf);
            tokens = tokens.saturating_add(chunk.tokens);
            for (&sample, &length) in chunk.indices.iter().zip(&chunk.lengths) {
                let length = length.widen();
                if length.wrapping_sub(1) < longest as u64 {
                    let count = &mut ends[length as usize];
                    *count = count.plus(one);
                    continue;
                }
                let parts = self.parts(length)?;
                counts.note_unusual(length, max_length, parts);
                if parts.full > 0 {
                    parts_before = parts_before.saturating_add(parts.full);
                    full_parts.push((sample, parts_before));
                }
                if parts.last > 0 {
                    let count = ends.get_mut(parts.last as usize).ok_or(PackError::InputChanged)?;
                    *count = count.plus(one);
                }
            }
            Ok(())
        })?;
        if tokens > self.scan.tokens {
            return Err(PackError::InputChanged);
        }
        counts.counts.tokens += tokens;
        let mut next = memory::zeroed::<P>(longest + 2)?;
        let mut end = 0u64;
        for length in (1..=longest).rev() {
            let count = ends[length].widen();
            next[length] = P::truncate(end);
            end += count;
            ends[length] = P::truncate(end);
            let padding = self.options.aligned(length as u64) - length as u64;
            counts.counts.padding_align = counts.counts.padding_align.saturating_add(padding * count);
        }
        let mut samples = memory::zeroed::<P>(usize::try_from(end).unwrap_or(usize::MAX))?;
        let again = SampleReader { lengths: self.stream, indices: self.indices::<P>(), used: None };
        again.for_each_chunk("sorting by length", threads, progress, |chunk, _| {
            for (&sample, &length) in chunk.indices.iter().zip(&chunk.lengths) {
                let length = length.widen();
                let length = if length.wrapping_sub(1) < longest as u64 { length } else { self.parts(length)?.last };
                if length > 0 {
                    let slot = next.get_mut(length as usize).ok_or(PackError::InputChanged)?;
                    *samples.get_mut(slot.widen() as usize).ok_or(PackError::InputChanged)? = sample;
                    *slot = slot.plus(one);
                }
            }
            Ok(())
        })?;
        if next != ends {
            return Err(PackError::InputChanged);
        }
        Ok(SortedSamples { samples, ends, full_parts, has_last_parts })
    }
}

impl<P: PlanInteger> SortedSamples<P> {
    /// The lengths of items that there may be, the longest first.
    pub(super) fn lengths(&self) -> impl Iterator<Item = usize> + use<P> {
        (1..self.ends.len() - 1).rev()
    }

    /// Where the items of one length lie.
    pub(super) fn run(&self, length: usize) -> Range<usize> {
        self.ends[length + 1].widen() as usize..self.ends[length].widen() as usize
    }

    /// Packs of one part each.
    pub(super) fn count_full_parts(&self) -> u64 {
        self.full_parts.last().map_or(0, |&(_, parts)| parts)
    }

    /// Shuffle the items of each length, the longest first.
    ///
    /// # Errors
    /// An interrupt.
    pub(super) fn shuffle(&mut self, random: &mut RandomState, progress: &mut dyn Progress) -> Result<(), PackError> {
        let mut since_tick = 0usize;
        for length in self.lengths() {
            let run = self.run(length);
            since_tick += 1 + run.len();
            if since_tick >= SHUFFLED_A_TICK {
                since_tick = 0;
                progress.tick("shuffling", run.start as u64, self.samples.len() as u64)?;
            }
            if run.len() > 1 {
                random.shuffle(&mut self.samples[run], progress)?;
            }
        }
        Ok(())
    }
}

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

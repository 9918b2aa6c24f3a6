//! Best fit over a window of open packs, in the order of the samples; with a window of one pack, next fit.
//!
//! Each sample goes into the open pack with the least room that it fits, or opens another pack, and then the oldest
//! open pack is closed. Packs are numbered in the order in which they were opened.

use super::WholePacker;
use super::items::SampleParts;
use super::pack_buffer::PackBuffer;
use crate::error::PackError;
use crate::inputs::SampleLengths;
use crate::packer::{CHUNK, IndexSource, SampleReader, ScanResult};
use crate::plan::PlanInteger;
use crate::progress::Progress;
use crate::simd::vectorized;

/// Tokens of a sample that are packed together.
#[derive(Clone, Copy)]
struct Item<P> {
    sample: P,
    start: P,
    stop: P,
}

/// The pieces of a pack that is open.
struct OpenPack<P> {
    indices: Vec<P>,
    ranges: [Vec<P>; 2],
    end: P,
    longest: P,
}

/// The packs that were opened last. A slot that holds no pack yet has no room.
struct OpenPacks<P> {
    /// Room of each, 0 where no more pieces are allowed. Apart from the rest, so that it is searched fast.
    free: Vec<u32>,
    packs: Vec<OpenPack<P>>,
    /// What each may cost further.
    cost_left: Vec<u64>,
    max_cost: u64,
    /// The slot of the oldest pack, which the next one takes.
    oldest: usize,
    /// Closed packs.
    closed: PackBuffer<P>,
}

impl<P: PlanInteger> OpenPack<P> {
    fn new() -> Self {
        Self { indices: Vec::new(), ranges: [Vec::new(), Vec::new()], end: P::default(), longest: P::default() }
    }

    #[inline(always)]
    fn push(&mut self, item: Item<P>, has_ranges: bool) {
        self.indices.push(item.sample);
        if has_ranges {
            self.ranges[0].push(item.start);
            self.ranges[1].push(item.stop);
        }
        self.end = item.stop;
        self.longest = self.longest.max(item.stop.minus(item.start));
    }

    /// Move the pack to `closed`, if it holds any pieces.
    fn close(&mut self, closed: &mut PackBuffer<P>) {
        if self.indices.is_empty() {
            return;
        }
        closed.indices.append(&mut self.indices);
        if let Some(ranges) = &mut closed.ranges {
            ranges.iter_mut().zip(&mut self.ranges).for_each(|(closed, open)| closed.append(open));
        }
        closed.close_pack(self.end, self.longest);
        self.longest = P::default();
    }
}

impl<P: PlanInteger> OpenPacks<P> {
    fn new(window: usize, has_ranges: bool, max_cost: u64) -> Self {
        let mut packs = Vec::new();
        packs.resize_with(window, OpenPack::new);
        let (free, cost_left) = (vec![0; window], vec![0; window]);
        Self { free, packs, cost_left, max_cost, oldest: 0, closed: PackBuffer::new(has_ranges) }
    }

    /// The slot of the pack with the least room of `size` tokens or more, the oldest of several.
    #[inline(always)]
    fn best(&self, size: u32) -> Option<usize> {
        // A pack with too little room wraps around to more than any pack has.
        let left_over = self.free.iter().fold(u32::MAX, |least, room| least.min(room.wrapping_sub(size)));
        if left_over > i32::MAX as u32 {
            return None;
        }
        let room = left_over + size;
        let (newer, older) = self.free.split_at(self.oldest);
        let is_best = |&other: &u32| other == room;
        older.iter().position(is_best).map(|slot| slot + self.oldest).or_else(|| newer.iter().position(is_best))
    }

    /// As `best`, of the packs that may cost `cost` more.
    fn best_with_cost(&self, size: u32, cost: u64) -> Option<usize> {
        (self.oldest..self.free.len())
            .chain(0..self.oldest)
            .filter(|&slot| self.free[slot] >= size && self.cost_left[slot] >= cost)
            .min_by_key(|&slot| self.free[slot])
    }

    /// Close the oldest pack, and open another one in its slot.
    fn open(&mut self, max_length: u32) -> usize {
        let slot = self.oldest;
        self.packs[slot].close(&mut self.closed);
        (self.free[slot], self.cost_left[slot]) = (max_length, self.max_cost);
        self.oldest = if slot + 1 == self.packs.len() { 0 } else { slot + 1 };
        slot
    }

    fn close_all(&mut self) {
        let (newer, older) = self.packs.split_at_mut(self.oldest);
        older.iter_mut().chain(newer).for_each(|pack| pack.close(&mut self.closed));
    }
}

impl<P: PlanInteger> WholePacker<'_, P> {
    /// Pack a stream with `window` packs open at once.
    pub(super) fn pack_ordered(
        &mut self,
        stream: &SampleLengths<'_>,
        scan: &ScanResult,
        indices: IndexSource<'_, P>,
        window: u64,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        let dataset_id = stream.dataset_id();
        let max_cost = self.costs.map_or(0, |costs| costs.max_cost);
        let mut open = OpenPacks::<P>::new(window as usize, self.has_ranges(), max_cost);
        let packer = self.packer;
        let reader = SampleReader::new(stream, indices, &packer.threads)?;
        let mut tokens = 0u64;
        reader.for_each_chunk("packing", &packer.threads, progress, |chunk, progress| {
            self.order_hash.push(chunk.order_leaf);
            tokens = tokens.saturating_add(chunk.tokens);
            // The output has room for the tokens that the first pass found.
            if tokens > scan.tokens {
                return Err(PackError::InputChanged);
            }
            let mut done = 0;
            while done < chunk.indices.len() {
                let (indices, lengths) = (&chunk.indices[done..], &chunk.lengths[done..]);
                done += vectorized(|| self.place_usual(&mut open, indices, lengths));
                if let (Some(&sample), Some(&length)) = (chunk.indices.get(done), chunk.lengths.get(done)) {
                    self.place_unusual(&mut open, sample, length, dataset_id, progress)?;
                    done += 1;
                }
            }
            self.flush(&mut open.closed, dataset_id, progress)
        })?;
        self.counts.tokens += tokens;
        open.close_all();
        self.flush(&mut open.closed, dataset_id, progress)
    }

    /// Place samples up to the first that is empty or longer than a pack; how many.
    #[inline(always)]
    fn place_usual(&mut self, open: &mut OpenPacks<P>, indices: &[P], lengths: &[P]) -> usize {
        let max_length = self.packer.request.max_length;
        let zero = P::default();
        for (done, (&sample, &length)) in indices.iter().zip(lengths).enumerate() {
            if length.widen().wrapping_sub(1) >= max_length {
                return done;
            }
            self.place(open, Item { sample, start: zero, stop: length });
        }
        indices.len()
    }

    #[inline(always)]
    fn place(&mut self, open: &mut OpenPacks<P>, item: Item<P>) {
        let tokens = item.stop.minus(item.start).widen();
        let size = self.options.aligned(tokens);
        self.counts.metadata.padding_align += size - tokens;
        // No size and no room is above 2^28.
        let size = size as u32;
        let cost = self.costs.map(|costs| costs.of(item.sample));
        let best = match cost {
            None => open.best(size),
            Some(cost) => open.best_with_cost(size, cost),
        };
        let slot = match best {
            Some(slot) => slot,
            None => open.open(self.packer.request.max_length as u32),
        };
        if let Some(cost) = cost {
            open.cost_left[slot] = open.cost_left[slot].saturating_sub(cost);
        }
        let pack = &mut open.packs[slot];
        pack.push(item, open.closed.ranges.is_some());
        let is_full = pack.indices.len() as u64 == self.options.most_pieces();
        open.free[slot] = if is_full { 0 } else { open.free[slot] - size };
    }

    /// Place the parts of a sample that is empty or longer than a pack.
    fn place_unusual(
        &mut self,
        open: &mut OpenPacks<P>,
        sample: P,
        length: P,
        dataset_id: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        let max_length = self.packer.request.max_length;
        let parts = SampleParts::new(length.widen(), max_length, self.options.overlong)?;
        self.counts.note_unusual(length.widen(), max_length, parts);
        let mut start = 0;
        for _ in 0..parts.full {
            let stop = start + max_length;
            self.place(open, Item { sample, start: P::truncate(start), stop: P::truncate(stop) });
            start = stop;
            if open.closed.indices.len() >= CHUNK {
                progress.tick("packing", start, length.widen())?;
                self.flush(&mut open.closed, dataset_id, progress)?;
            }
        }
        if parts.last > 0 {
            let stop = start + parts.last;
            self.place(open, Item { sample, start: P::truncate(start), stop: P::truncate(stop) });
        }
        Ok(())
    }
}

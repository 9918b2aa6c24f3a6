//! Best fit over a window of open packs, in the order of the samples; with a window of one pack, next fit.
//!
//! Each sample goes into the open pack with the least room that it fits, or opens another pack, and then the oldest
//! open pack is closed. Packs are numbered in the order in which they were opened.

use super::WholePacker;
use super::items::SampleParts;
use super::pack_buffer::PackBuffer;
use super::pack_window::PackWindow;
use crate::error::PackError;
use crate::inputs::SampleLengths;
use crate::packer::{CHUNK, IndexSource, SampleReader, ScanResult};
use crate::plan::PlanInteger;
use crate::progress::Progress;

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

/// The packs that were opened last.
struct OpenPacks<P> {
    window: PackWindow,
    /// One for each slot of `window`.
    packs: Vec<OpenPack<P>>,
    /// What the pack in each slot may cost further.
    cost_left: Vec<u64>,
    max_cost: u64,
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
    fn new(window: u64, max_length: u64, has_ranges: bool, max_cost: u64) -> Self {
        let mut packs = Vec::new();
        packs.resize_with(window as usize, OpenPack::new);
        Self {
            window: PackWindow::new(window, max_length),
            packs,
            cost_left: vec![0; window as usize],
            max_cost,
            closed: PackBuffer::new(has_ranges),
        }
    }

    fn close_all(&mut self) {
        for slot in self.window.slots() {
            self.packs[slot].close(&mut self.closed);
        }
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
        let mut open = OpenPacks::<P>::new(window, self.packer.request.max_length, self.has_ranges(), max_cost);
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
                done += self.place_usual(&mut open, indices, lengths);
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
        let (size, cost) = (size as u32, self.costs.map(|costs| costs.of(item.sample)));
        let placed = match cost {
            None => open.window.place(size),
            Some(cost) => open.window.place_where(size, |slot| open.cost_left[slot] >= cost),
        };
        let pack = &mut open.packs[placed.slot];
        if placed.is_new {
            pack.close(&mut open.closed);
            open.cost_left[placed.slot] = open.max_cost;
        }
        if let Some(cost) = cost {
            open.cost_left[placed.slot] = open.cost_left[placed.slot].saturating_sub(cost);
        }
        pack.push(item, open.closed.ranges.is_some());
        if pack.indices.len() as u64 == self.options.most_pieces() {
            open.window.fill_up(&placed);
        }
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

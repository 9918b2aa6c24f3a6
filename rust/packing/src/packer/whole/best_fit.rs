//! Best-fit decreasing over all samples of a stream.
//!
//! The samples are sorted by length (`sorted_samples`), groups of packs are filled by counts (`pack_groups`), and the
//! packs are written in a random order, each from where its items lie in the sorted samples.

use super::WholePacker;
use super::pack_buffer::PackBuffer;
use super::pack_groups::{GroupPacker, PackGroups};
use super::sorted_samples::{SortedSamples, Sorting};
use crate::error::PackError;
use crate::inputs::{RandomState, SampleLengths};
use crate::packer::{CHUNK, CHUNKS_A_THREAD, FEW_SAMPLES, ScanResult};
use crate::plan::PlanInteger;
use crate::progress::Progress;
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

//! Where the packs of a plan go as they are made: into memory, or to the files of a folder.
//!
//! On the way `CountedOutput` counts them and makes their number a multiple: the last packs of the largest dataset are left
//! out, never all of one, or the first packs come again. Working memory: to leave packs out, one number a dataset; to repeat
//! packs, the pieces of `multiple_of` packs.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use super::{Packed, Packer};
use crate::error::PackError;
use crate::folder::FolderWriter;
use crate::plan::{Column, Field, PlanCounts, PlanInteger, WideColumns};
use crate::progress::Progress;
use crate::request::{Overlong, Packing, Remainder};

/// The fields of `PackColumns::packs`.
const PACK_FIELDS: [Field; 4] = [Field::IndicesCuLen, Field::StartOffset, Field::EndOffset, Field::Longest];
/// The fields of `PackColumns::piece_ranges`.
const RANGE_FIELDS: [Field; 2] = [Field::PieceStart, Field::PieceStop];

/// Pieces, and packs of one dataset, column by column.
pub(crate) struct PackColumns<'a, P> {
    pub(crate) dataset_id: usize,
    pub(crate) indices: &'a [P],
    /// Cumulative piece counts, starts, ends, longest pieces.
    pub(crate) packs: [&'a [P]; 4],
    /// Starts and stops of the pieces, in a plan that has them.
    pub(crate) piece_ranges: Option<[&'a [P]; 2]>,
}

impl<'a, P> PackColumns<'a, P> {
    pub(crate) fn count(&self) -> usize {
        self.packs[0].len()
    }

    /// The columns but for the dataset, each with its field.
    fn fields(&self) -> impl Iterator<Item = (Field, &'a [P])> {
        let ranges = RANGE_FIELDS.into_iter().zip(self.piece_ranges.into_iter().flatten());
        [(Field::Indices, self.indices)].into_iter().chain(PACK_FIELDS.into_iter().zip(self.packs)).chain(ranges)
    }
}

/// Takes the packs of a plan in order.
pub(crate) trait PlanOutput<P> {
    /// Append pieces and packs.
    fn append(&mut self, packs: &PackColumns<'_, P>, progress: &mut dyn Progress) -> Result<(), PackError>;

    /// Remove the last `count` pieces, of a plan without piece ranges.
    fn remove_last_pieces(&mut self, count: usize) -> Result<(), PackError>;

    /// Make room for packs and pieces beyond those that were expected.
    fn reserve(&mut self, packs: usize, pieces: usize) -> Result<(), PackError> {
        let _ = (packs, pieces);
        Ok(())
    }
}

/// Keeps the columns in memory.
pub(crate) struct MemoryOutput {
    columns: Vec<Column>,
}

impl MemoryOutput {
    /// For at most `packs` packs and `pieces` pieces.
    pub(crate) fn new(packs: u64, pieces: u64, fields: &[Field], wide: WideColumns) -> Result<Self, PackError> {
        let column = |&field: &Field| {
            let len = if field.is_per_piece() { pieces } else { packs };
            Column::with_capacity(usize::try_from(len).unwrap_or(usize::MAX), wide[field as usize])
        };
        Ok(Self { columns: fields.iter().map(column).collect::<Result<_, _>>()? })
    }

    /// The columns in the order of `Field::ALL`.
    pub(crate) fn into_columns(self) -> Vec<Column> {
        self.columns
    }

    fn column(&mut self, field: Field) -> &mut Column {
        &mut self.columns[field as usize]
    }

    /// Refuse more than the bounds, which held for the lengths as the first pass found them.
    fn check_room(&self, pieces: usize, packs: usize) -> Result<(), PackError> {
        let has_room =
            |(column, field): (&Column, Field)| column.room() >= if field.is_per_piece() { pieces } else { packs };
        if self.columns.iter().zip(Field::ALL).all(has_room) { Ok(()) } else { Err(PackError::InputChanged) }
    }
}

impl<P: PlanInteger> PlanOutput<P> for MemoryOutput {
    fn append(&mut self, packs: &PackColumns<'_, P>, _progress: &mut dyn Progress) -> Result<(), PackError> {
        self.check_room(packs.indices.len(), packs.count())?;
        self.column(Field::DatasetId).append_repeated(packs.dataset_id, packs.count());
        for (field, values) in packs.fields() {
            self.column(field).append(values);
        }
        Ok(())
    }

    fn remove_last_pieces(&mut self, count: usize) -> Result<(), PackError> {
        let column = self.column(Field::Indices);
        column.truncate(column.len() - count);
        Ok(())
    }

    fn reserve(&mut self, packs: usize, pieces: usize) -> Result<(), PackError> {
        self.columns
            .iter_mut()
            .zip(Field::ALL)
            .try_for_each(|(column, field)| column.reserve(if field.is_per_piece() { pieces } else { packs }))
    }
}

impl<P: PlanInteger> PlanOutput<P> for FolderWriter {
    fn append(&mut self, packs: &PackColumns<'_, P>, progress: &mut dyn Progress) -> Result<(), PackError> {
        self.append(Field::DatasetId, &vec![P::truncate(packs.dataset_id as u64); packs.count()], progress)?;
        for (field, values) in packs.fields() {
            self.append(field, values, progress)?;
        }
        Ok(())
    }

    fn remove_last_pieces(&mut self, count: usize) -> Result<(), PackError> {
        if count == 0 { Ok(()) } else { self.remove_last(Field::Indices, count as u64) }
    }
}

/// Counts the packs of each stream, and keeps nothing.
pub(super) struct PackNumbers(pub(super) Vec<u64>);

impl<P: PlanInteger> PlanOutput<P> for PackNumbers {
    fn append(&mut self, packs: &PackColumns<'_, P>, _progress: &mut dyn Progress) -> Result<(), PackError> {
        self.0[packs.dataset_id] += packs.count() as u64;
        Ok(())
    }

    fn remove_last_pieces(&mut self, _count: usize) -> Result<(), PackError> {
        Ok(())
    }
}

/// How many packs of each stream to keep, of those that it has, so that their sum is a multiple of `of`.
pub(super) fn packs_to_keep(mut packs: Vec<u64>, of: u64) -> Result<Vec<u64>, PackError> {
    let total: u64 = packs.iter().sum();
    let mut left = total % of;
    let mut largest_first: Vec<usize> = (0..packs.len()).collect();
    largest_first.sort_by_key(|&stream| Reverse(packs[stream]));
    for stream in largest_first {
        let dropped = left.min(packs[stream].saturating_sub(1));
        packs[stream] -= dropped;
        left -= dropped;
    }
    if left > 0 {
        return Err(PackError::Invalid(format!(
            "the plan has {total} packs, and multiple_of={of} would leave out all packs of a dataset: choose a smaller \
             multiple_of, or remainder='repeat'"
        )));
    }
    Ok(packs)
}

/// The packs of one stream so far.
#[derive(Clone, Copy, Default)]
struct StreamPacks {
    packs: u64,
    /// Whether the last pack lies within one sample that an earlier pack began.
    is_inside: bool,
    /// Where the first pack that was left out begins in its first sample.
    next_start: Option<u64>,
}

/// Hands packs on, counts them, and leaves out or remembers some.
pub(super) struct CountedOutput<'r, 'o, P> {
    packer: &'r Packer<'r>,
    output: &'o mut dyn PlanOutput<P>,
    /// Of what was handed on.
    counts: PlanCounts,
    /// Pieces of the packs that were handed on, and of those that came again.
    closed: u64,
    repeated_pieces: u64,
    /// In hard packing, packs that go on in a sample which another pack began, and such samples.
    continued: u64,
    cut: u64,
    streams: Vec<StreamPacks>,
    /// How many packs of each stream are handed on.
    keep: Option<Vec<u64>>,
    /// Pieces so far, with those that are left out.
    seen: u64,
    /// Of the packs that are left out.
    dropped: PlanCounts,
    /// Parts that are left out of samples that are split, by stream and sample.
    dropped_parts: BTreeMap<(usize, u64), u64>,
    first: Option<FirstPacks<P>>,
}

impl<'r, 'o, P: PlanInteger> CountedOutput<'r, 'o, P> {
    pub(super) fn new(packer: &'r Packer<'r>, output: &'o mut dyn PlanOutput<P>, keep: Option<Vec<u64>>) -> Self {
        let first = match packer.request.multiple() {
            Some((of, Remainder::Repeat)) => Some(FirstPacks::new(of as usize - 1, packer.has_piece_ranges())),
            _ => None,
        };
        Self {
            packer,
            output,
            counts: PlanCounts::default(),
            closed: 0,
            repeated_pieces: 0,
            continued: 0,
            cut: 0,
            streams: vec![StreamPacks::default(); packer.streams.len()],
            keep,
            seen: 0,
            dropped: PlanCounts::default(),
            dropped_parts: BTreeMap::new(),
            first,
        }
    }

    /// Count packs, and hand them on.
    fn hand_on(&mut self, columns: &PackColumns<'_, P>, progress: &mut dyn Progress) -> Result<(), PackError> {
        let [cumulative, starts, _, longests] = columns.packs;
        let stream = &mut self.streams[columns.dataset_id];
        let (mut most, mut longest) = (0u64, 0u64);
        for ((&end, &start), &longest_here) in cumulative.iter().zip(starts).zip(longests) {
            let (end, goes_on) = (end.widen(), start > P::default());
            let pieces = end.wrapping_sub(self.closed);
            (most, longest) = (most.max(pieces), longest.max(longest_here.widen()));
            self.continued += u64::from(goes_on);
            self.cut += u64::from(goes_on && !stream.is_inside);
            stream.is_inside = goes_on && pieces == 1;
            self.closed = end;
        }
        stream.packs += columns.count() as u64;
        self.counts.packs += columns.count() as u64;
        self.counts.pieces += columns.indices.len() as u64;
        self.counts.max_pieces_per_pack = self.counts.max_pieces_per_pack.max(most);
        self.counts.longest = self.counts.longest.max(longest);
        self.output.append(columns, progress)
    }

    /// Start and stop of each piece of a dataset's packs. In a plan without ranges, each is a whole sample.
    fn ranges(&self, dataset_id: usize, indices: &[P], ranges: Option<[&[P]; 2]>) -> Vec<[u64; 2]> {
        if let Some([starts, stops]) = ranges {
            return starts.iter().zip(stops).map(|(start, stop)| [start.widen(), stop.widen()]).collect();
        }
        let mut stops = vec![0u64; indices.len()];
        let samples: Vec<u64> = indices.iter().map(|sample| sample.widen()).collect();
        self.packer.streams[dataset_id].gather(&samples, &mut stops);
        stops.into_iter().map(|stop| [0, stop]).collect()
    }

    /// The room that a piece takes beyond its tokens.
    fn padding(&self, tokens: u64) -> u64 {
        match self.packer.packing {
            Packing::Hard { .. } => 0,
            Packing::Whole(options) => options.aligned(tokens) - tokens,
        }
    }

    /// Count packs that are left out, with these pieces.
    fn note_dropped(&mut self, dataset_id: usize, packs: u64, indices: &[P], ranges: Option<[&[P]; 2]>) {
        self.dropped.packs += packs;
        let max_length = self.packer.request.max_length;
        let Packing::Whole(options) = self.packer.packing else {
            self.dropped.tokens += packs * max_length;
            return;
        };
        for (&sample, [start, stop]) in indices.iter().zip(self.ranges(dataset_id, indices, ranges)) {
            self.dropped.tokens += stop.saturating_sub(start);
            self.dropped.padding_align += self.padding(stop.saturating_sub(start));
            let length = self.packer.streams[dataset_id].get(sample.widen() as usize);
            if length > max_length && options.overlong == Overlong::Split {
                // A sample with a part in another pack is not left out.
                let parts = self.dropped_parts.entry((dataset_id, sample.widen())).or_default();
                *parts += 1;
                if *parts < length.div_ceil(max_length) {
                    continue;
                }
            }
            self.dropped.samples += 1;
            self.dropped.samples_cut += u64::from(length > max_length);
        }
    }

    /// Append the first packs again, as often as they are needed.
    pub(super) fn repeat(&mut self, progress: &mut dyn Progress) -> Result<(), PackError> {
        let Some(first) = self.first.take() else { return Ok(()) };
        let of = first.most as u64 + 1;
        let lacking = (self.counts.packs.next_multiple_of(of) - self.counts.packs) as usize;
        let again = || (0..first.dataset_ids.len()).cycle().take(lacking);
        let pieces: usize = again().map(|pack| first.pieces(pack).len()).sum();
        self.output.reserve(lacking, pieces)?;
        for pack in again() {
            let range = first.pieces(pack);
            let dataset_id = first.dataset_ids[pack];
            let [_, start, end, longest] = first.packs.each_ref().map(|column| &column[pack..=pack]);
            let cumulative = [P::truncate(self.closed + range.len() as u64)];
            let columns = PackColumns {
                dataset_id,
                indices: &first.indices[range.clone()],
                packs: [&cumulative, start, end, longest],
                piece_ranges: first
                    .ranges
                    .as_ref()
                    .map(|ranges| ranges.each_ref().map(|column| &column[range.clone()])),
            };
            let mut ranges = self.ranges(dataset_id, columns.indices, columns.piece_ranges);
            if let Some(piece) = ranges.first_mut() {
                piece[0] = start[0].widen();
            }
            if let Some(piece) = ranges.last_mut() {
                piece[1] = end[0].widen();
            }
            for [start, stop] in ranges {
                self.counts.tokens_repeated += stop.saturating_sub(start);
                self.counts.padding_align += self.padding(stop.saturating_sub(start));
            }
            // No sample is counted again.
            let (continued, cut, stream) = (self.continued, self.cut, self.streams[dataset_id]);
            self.hand_on(&columns, progress)?;
            (self.continued, self.cut, self.streams[dataset_id]) = (continued, cut, stream);
            self.counts.packs_repeated += 1;
            self.repeated_pieces += columns.indices.len() as u64;
        }
        Ok(())
    }

    /// The counts of the plan, with what the mode reports.
    pub(super) fn finish(self, packed: &Packed) -> PlanCounts {
        let Self { counts, dropped, .. } = self;
        let reported = &packed.counts;
        let (samples, samples_cut) = match self.packer.packing {
            Packing::Whole(_) => (reported.samples - dropped.samples, reported.samples_cut - dropped.samples_cut),
            Packing::Hard { drop_last } => {
                let tails = self.streams.iter().zip(&packed.tail_start).filter(|(stream, tail)| {
                    let next_start = stream.next_start.unwrap_or(if drop_last { **tail } else { 0 });
                    next_start > 0 && stream.packs > 0 && !stream.is_inside
                });
                (counts.pieces - self.repeated_pieces - self.continued, self.cut + tails.count() as u64)
            }
        };
        PlanCounts {
            samples,
            samples_cut,
            tokens_packed: reported.tokens_packed.saturating_sub(dropped.tokens),
            packs_dropped: dropped.packs,
            padding_align: (reported.padding_align + counts.padding_align).saturating_sub(dropped.padding_align),
            packs: counts.packs,
            pieces: counts.pieces,
            packs_repeated: counts.packs_repeated,
            tokens_repeated: counts.tokens_repeated,
            max_pieces_per_pack: counts.max_pieces_per_pack,
            longest: counts.longest,
            ..reported.clone()
        }
    }
}

impl<P: PlanInteger> PlanOutput<P> for CountedOutput<'_, '_, P> {
    fn append(&mut self, columns: &PackColumns<'_, P>, progress: &mut dyn Progress) -> Result<(), PackError> {
        let (seen, id) = (self.seen, columns.dataset_id);
        self.seen += columns.indices.len() as u64;
        if let Some(first) = &mut self.first {
            first.note(columns);
        }
        let Some(keep) = &self.keep else { return self.hand_on(columns, progress) };
        let keep = keep.get(id).copied().unwrap_or_default();
        let stream = &mut self.streams[id];
        let [cumulative, starts, ends, longests] = columns.packs;
        let kept = keep.saturating_sub(stream.packs).min(columns.count() as u64) as usize;
        let is_full = stream.packs + kept as u64 == keep;
        if kept < columns.count() {
            stream.next_start.get_or_insert(starts[kept].widen());
        }
        // Behind the last pack that is kept, no piece is.
        let pieces = match cumulative[..kept].last() {
            _ if !is_full => columns.indices.len(),
            Some(last) => (last.widen().wrapping_sub(seen) as usize).min(columns.indices.len()),
            None => 0,
        };
        let ranges = columns.piece_ranges.map(|ranges| ranges.map(|column| &column[..pieces]));
        let dropped_ranges = columns.piece_ranges.map(|ranges| ranges.map(|column| &column[pieces..]));
        let (indices, dropped) = columns.indices.split_at(pieces);
        self.note_dropped(id, (columns.count() - kept) as u64, dropped, dropped_ranges);
        let offset = P::truncate(seen - self.counts.pieces);
        let cumulative: Vec<P> = cumulative[..kept].iter().map(|&end| end.minus(offset)).collect();
        let packs = [&cumulative[..], &starts[..kept], &ends[..kept], &longests[..kept]];
        self.hand_on(&PackColumns { dataset_id: id, indices, packs, piece_ranges: ranges }, progress)
    }

    fn remove_last_pieces(&mut self, count: usize) -> Result<(), PackError> {
        self.seen -= count as u64;
        if self.keep.is_some() {
            // They are behind the last pack that is kept.
            return Ok(());
        }
        self.counts.pieces -= count as u64;
        if let Some(first) = &mut self.first {
            first.indices.truncate(self.seen as usize);
        }
        self.output.remove_last_pieces(count)
    }
}

/// The first packs, which may come again.
struct FirstPacks<P> {
    most: usize,
    dataset_ids: Vec<usize>,
    indices: Vec<P>,
    ranges: Option<[Vec<P>; 2]>,
    /// As in `PackColumns::packs`.
    packs: [Vec<P>; 4],
}

impl<P: PlanInteger> FirstPacks<P> {
    fn new(most: usize, has_ranges: bool) -> Self {
        Self {
            most,
            dataset_ids: Vec::new(),
            indices: Vec::new(),
            ranges: has_ranges.then(|| [Vec::new(), Vec::new()]),
            packs: [const { Vec::new() }; 4],
        }
    }

    /// Remember packs, with all pieces so far, until there are enough.
    fn note(&mut self, columns: &PackColumns<'_, P>) {
        let room = (self.most - self.dataset_ids.len()).min(columns.count());
        if self.dataset_ids.len() == self.most {
            return;
        }
        self.indices.extend_from_slice(columns.indices);
        if let (Some(ranges), Some(more)) = (&mut self.ranges, columns.piece_ranges) {
            ranges.iter_mut().zip(more).for_each(|(column, more)| column.extend_from_slice(more));
        }
        self.dataset_ids.resize(self.dataset_ids.len() + room, columns.dataset_id);
        self.packs.iter_mut().zip(columns.packs).for_each(|(column, more)| column.extend_from_slice(&more[..room]));
    }

    /// The pieces of a pack.
    fn pieces(&self, pack: usize) -> Range<usize> {
        let begin = pack.checked_sub(1).map_or(0, |before| self.packs[0][before].widen() as usize);
        begin..self.packs[0][pack].widen() as usize
    }
}

//! What is known of one file: which bytes were handed in, how many are written, and the checksum of those summed.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::checksum::Checksum;

/// The progress of one file.
#[derive(Debug)]
pub(crate) struct Progress {
    size: u64,
    /// Start and end of what was handed in; neighbours are one range.
    handed_in: BTreeMap<u64, u64>,
    bytes_written: u64,
    /// Start of what is summed, its length and its checksum; neighbours are one run.
    summed: BTreeMap<u64, (u64, Checksum)>,
}

impl Progress {
    pub(crate) fn new(size: u64) -> Self {
        Progress { size, handed_in: BTreeMap::new(), bytes_written: 0, summed: BTreeMap::new() }
    }

    /// Notes that `range`, which is not empty and within the file, was handed in; `false` and nothing noted when a
    /// part of it was before.
    pub(crate) fn hand_in(&mut self, range: Range<u64>) -> bool {
        let before = self.handed_in.range(..range.end).next_back().map(|(&start, &end)| (start, end));
        let touches = before.filter(|&(_, end)| end == range.start);
        if before.is_some_and(|(_, end)| end > range.start) {
            return false;
        }
        let end = self.handed_in.remove(&range.end).unwrap_or(range.end);
        self.handed_in.insert(touches.map_or(range.start, |(start, _)| start), end);
        true
    }

    /// The first byte that was not handed in; `None` when all were.
    pub(crate) fn first_gap(&self) -> Option<u64> {
        let gap = match self.handed_in.first_key_value() {
            Some((0, &end)) => end,
            _ => 0,
        };
        (gap < self.size).then_some(gap)
    }

    /// Notes that `length` bytes were written, which were handed in; whether those were the last of the file.
    pub(crate) fn wrote(&mut self, length: u64) -> bool {
        self.bytes_written += length;
        self.bytes_written == self.size
    }

    /// Notes the checksum of `length` bytes at `offset`.
    pub(crate) fn sum(&mut self, offset: u64, length: u64, checksum: Checksum) {
        let (mut start, mut run) = (offset, (length, checksum));
        if let Some((length, sum)) = self.summed.remove(&(offset + length)) {
            run = (run.0 + length, run.1.then(sum, length));
        }
        if let Some((&before, &(length, sum))) = self.summed.range(..offset).next_back()
            && before + length == offset
        {
            start = before;
            run = (length + run.0, sum.then(run.1, run.0));
        }
        self.summed.insert(start, run);
    }

    /// The checksum of the whole file, once all of it is summed.
    pub(crate) fn checksum(&self) -> Checksum {
        self.summed.first_key_value().map_or(Checksum::EMPTY, |(_, &(_, checksum))| checksum)
    }
}

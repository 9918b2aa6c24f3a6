//! The progress of one file: submitted ranges, written bytes, and the checksum of summed ranges.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::checksum::Checksum;

/// The progress of one file.
#[derive(Debug)]
pub(crate) struct FileProgress {
    size: u64,
    /// Start and end of each submitted range; adjacent ranges are merged.
    submitted: BTreeMap<u64, u64>,
    bytes_written: u64,
    /// Start of each summed range, with its length and checksum; adjacent ranges are merged.
    summed: BTreeMap<u64, (u64, Checksum)>,
}

impl FileProgress {
    pub(crate) fn new(size: u64) -> Self {
        FileProgress { size, submitted: BTreeMap::new(), bytes_written: 0, summed: BTreeMap::new() }
    }

    /// Records a submitted range, which is not empty and lies within the file. Returns `false`, and records nothing, if
    /// a part of it was submitted before.
    pub(crate) fn submit(&mut self, range: Range<u64>) -> bool {
        let before = self.submitted.range(..range.end).next_back().map(|(&start, &end)| (start, end));
        let touches = before.filter(|&(_, end)| end == range.start);
        if before.is_some_and(|(_, end)| end > range.start) {
            return false;
        }
        let end = self.submitted.remove(&range.end).unwrap_or(range.end);
        self.submitted.insert(touches.map_or(range.start, |(start, _)| start), end);
        true
    }

    /// The first byte that was not submitted; `None` when all were.
    pub(crate) fn first_gap(&self) -> Option<u64> {
        let gap = match self.submitted.first_key_value() {
            Some((0, &end)) => end,
            _ => 0,
        };
        (gap < self.size).then_some(gap)
    }

    /// Records that `length` submitted bytes were written; whether they were the last of the file.
    pub(crate) fn wrote(&mut self, length: u64) -> bool {
        self.bytes_written += length;
        self.bytes_written == self.size
    }

    /// Records the checksum of `length` bytes at `offset`.
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

    /// The checksum of the whole file, after all of it was summed.
    pub(crate) fn checksum(&self) -> Checksum {
        self.summed.first_key_value().map_or(Checksum::EMPTY, |(_, &(_, checksum))| checksum)
    }
}

//! Copies that are cut into chunks, which threads take in turn.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::AtomicUsize;

/// `length` bytes from `source` to `target`.
#[derive(Clone, Copy, Debug)]
pub struct CopyRange {
    /// The first byte to read.
    pub source: *const u8,
    /// The first byte to write.
    pub target: *mut u8,
    /// Bytes.
    pub length: usize,
}

// SAFETY: only addresses; the caller of `copy` answers for the memory there.
unsafe impl Send for CopyRange {}
// SAFETY: as above.
unsafe impl Sync for CopyRange {}

/// Copies as one run of bytes, from which threads take chunks.
#[derive(Debug)]
pub(crate) struct CopyQueue {
    copies: Vec<CopyRange>,
    /// The end of each copy in the run.
    ends: Vec<usize>,
    pub(crate) total: usize,
    /// The first byte that no thread has taken.
    pub(crate) next: AtomicUsize,
}

impl CopyQueue {
    pub(crate) fn new(copies: Vec<CopyRange>) -> Self {
        let mut total = 0;
        let end_of = |copy: &CopyRange| {
            total += copy.length;
            total
        };
        let ends = copies.iter().map(end_of).collect();
        CopyQueue { copies, ends, total, next: AtomicUsize::new(0) }
    }

    /// The parts of the copies that lie in `bytes` of the run, in order.
    pub(crate) fn parts(&self, bytes: Range<usize>) -> impl Iterator<Item = CopyRange> {
        let first = self.ends.partition_point(|&end| end <= bytes.start);
        self.copies[first..].iter().zip(&self.ends[first..]).map_while(move |(copy, end)| {
            let begin = end - copy.length;
            let (from, to) = (bytes.start.max(begin), bytes.end.min(*end));
            (begin < bytes.end).then(|| copy.after(from - begin).before(to - from))
        })
    }
}

impl CopyRange {
    /// All but its first `bytes`.
    pub(crate) fn after(self, bytes: usize) -> Self {
        // Nothing is read or written here.
        let (source, target) = (self.source.wrapping_add(bytes), self.target.wrapping_add(bytes));
        CopyRange { source, target, length: self.length - bytes }
    }

    /// The first `bytes` of the range.
    pub(crate) fn before(self, bytes: usize) -> Self {
        CopyRange { length: bytes, ..self }
    }
}

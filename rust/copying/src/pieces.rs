//! Copies that are cut into pieces, which threads take in turn.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::AtomicUsize;

/// `length` bytes from `source` to `target`.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    /// The first byte that is read.
    pub source: *const u8,
    /// Where it goes.
    pub target: *mut u8,
    /// How many.
    pub length: usize,
}

// SAFETY: only addresses; anyone who calls `copy` answers for what is there.
unsafe impl Send for Copy {}
// SAFETY: as above.
unsafe impl Sync for Copy {}

/// All copies, counted through one after the other and cut into pieces, which threads take in turn.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// Its own, as threads may look at them when anyone who handed them in is gone.
    pub(crate) copies: Vec<Copy>,
    /// Where each copy ends.
    pub(crate) ends: Vec<usize>,
    pub(crate) total: usize,
    /// The first byte that no thread has taken.
    pub(crate) next: AtomicUsize,
}

impl Pieces {
    pub(crate) fn of(copies: &[Copy]) -> Self {
        let mut total = 0;
        let end_of = |copy: &Copy| {
            total += copy.length;
            total
        };
        let ends = copies.iter().map(end_of).collect();
        Pieces { copies: copies.to_vec(), ends, total, next: AtomicUsize::new(0) }
    }

    /// What the copies have of `bytes`, in order.
    pub(crate) fn parts(&self, bytes: Range<usize>) -> impl Iterator<Item = Copy> {
        let first = self.ends.partition_point(|&end| end <= bytes.start);
        self.copies[first..].iter().zip(&self.ends[first..]).map_while(move |(copy, end)| {
            let begin = end - copy.length;
            let (from, to) = (bytes.start.max(begin), bytes.end.min(*end));
            (begin < bytes.end).then(|| copy.after(from - begin).before(to - from))
        })
    }
}

impl Copy {
    /// All but its first `bytes`, of which it has as many.
    pub(crate) fn after(self, bytes: usize) -> Self {
        // Nothing is read or written here.
        let (source, target) = (self.source.wrapping_add(bytes), self.target.wrapping_add(bytes));
        Copy { source, target, length: self.length - bytes }
    }

    /// Its first `bytes` alone.
    pub(crate) fn before(self, bytes: usize) -> Self {
        Copy { length: bytes, ..self }
    }
}

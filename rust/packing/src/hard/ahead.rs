//! Asking the memory for what will be read soon, one place a sample, beside work that waits for no memory.
//!
//! What always holds: nothing here changes what is computed.

use crate::fingerprint::LEAF;
use crate::integers::Integers;
use crate::memory;

/// Of fewer samples the caches next to the processor hold most lengths.
pub(super) const WORTHWHILE_SAMPLES: usize = 1 << 21;

/// How to ask for the length of a sample. A type for each way, so that the loops that ask are compiled for it.
pub(super) trait Ask: Copy + Send + Sync {
    /// Samples whose lengths are asked for before any of them is read. Few enough that the processor still knows by
    /// then where their pages lie, and has their lines in its second-level cache.
    const RUN: usize = 1024;
    fn ask(self, index: u64);
}

/// What comes one behind the other is not worth asking for: the processor sees that by itself.
#[derive(Clone, Copy)]
pub(super) struct Nothing;

impl Ask for Nothing {
    const RUN: usize = LEAF;
    #[inline(always)]
    fn ask(self, _index: u64) {}
}

/// Lengths of two bytes, one behind the other.
#[derive(Clone, Copy)]
pub(super) struct Narrow(pub(super) usize);

impl Ask for Narrow {
    #[inline(always)]
    fn ask(self, index: u64) {
        memory::prefetch_address((self.0 as *const u16).wrapping_add(index as usize).cast());
    }
}

/// Lengths of one column of the caller's.
impl Ask for Integers<'_> {
    #[inline(always)]
    fn ask(self, index: u64) {
        self.prefetch(index as usize);
    }
}

/// The samples whose lengths are to be asked for.
#[derive(Clone, Copy)]
pub(super) struct Ahead<'i, W, A> {
    pub(super) ask: A,
    pub(super) indices: &'i [W],
}

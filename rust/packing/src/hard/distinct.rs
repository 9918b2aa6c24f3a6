//! Whether an order names no sample twice, found out while it is read.
//!
//! What always holds: an order that names each of its samples once passes, whichever threads read it. One that does not
//! is found: by marks for certain, and by sums of powers, which large orders of all samples are held against, but for
//! the chance that `powers` tells.

use super::ahead::{Ask, Nothing};
use super::marks::Marks;
use super::powers::Powers;
use crate::error::PackError;
use crate::integers::Word;

/// Of more samples than these, sums of powers take less time than marks, which lie far from the processor then.
const MARKED: usize = 1 << 24;

/// How it is found out.
pub(super) enum Distinct {
    /// By a bit a sample.
    Marks(Marks),
    /// By the powers of the indices.
    Powers(Powers),
}

impl Distinct {
    /// For an order that names `named` of `samples` samples, read by the threads numbered 0 … `threads` - 1.
    pub(super) fn new(samples: usize, named: usize, threads: usize) -> Result<Self, PackError> {
        // Of samples that an order leaves out no sum is known.
        if named == samples && samples > MARKED {
            return Powers::new(samples, threads).map(Self::Powers);
        }
        Marks::new(samples, threads).map(Self::Marks)
    }

    /// Powers take note of `indices`, once, and ask for their lengths meanwhile; marks do so as they are gathered.
    /// Whether the lengths were asked for.
    pub(super) fn note_and_ask<W: Word, A: Ask>(&self, thread: usize, indices: &[W], ask: A) -> bool {
        match self {
            Self::Marks(_) => false,
            Self::Powers(powers) => {
                powers.add(thread, indices, ask);
                A::IS_ASKING
            }
        }
    }

    /// Take note of `indices`, none of them out of range; whether none was named before as far as it is known yet.
    pub(super) fn note<W: Word>(&self, thread: usize, indices: &[W]) -> bool {
        match self {
            Self::Marks(marks) => marks.mark(thread, indices),
            Self::Powers(powers) => {
                powers.add(thread, indices, Nothing);
                true
            }
        }
    }

    /// Whether the whole order named no sample twice, where no part of it was found to.
    pub(super) fn holds(self) -> bool {
        match self {
            Self::Marks(marks) => marks.are_disjoint(),
            Self::Powers(powers) => powers.are_all(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_orders_of_all_samples_take_no_bit_a_sample() {
        let is_marked = |samples, named| matches!(Distinct::new(samples, named, 2).unwrap(), Distinct::Marks(_));
        assert!(is_marked(MARKED, MARKED) && is_marked(MARKED + 1, MARKED));
        assert!(!is_marked(MARKED + 1, MARKED + 1));
    }
}

//! Which samples an order has used: one bit each, so that a repeated one is found.
//!
//! With several threads there are several bit arrays, each marked by one thread at a time, as many as
//! `EXTRA_MARK_BYTES` allows; a sample marked in two of them is found when they are joined.

use super::EXTRA_MARK_BYTES;
use crate::error::PackError;
use crate::integers::{Integers, Word};
use crate::memory;

/// One bit a sample.
pub(crate) struct Bits(Vec<u64>);

impl Bits {
    /// A bit for each of `samples` samples.
    pub(crate) fn new(samples: usize) -> Result<Self, PackError> {
        memory::zeroed(samples.div_ceil(64)).map(Self)
    }

    /// Mark samples, none of them out of range; whether all of them were unmarked.
    pub(crate) fn mark<W: Word>(&mut self, indices: &[W]) -> bool {
        let bits = &mut self.0[..];
        let mut repeated = 0u64;
        for &index in indices {
            let index = index.widen();
            let word = &mut bits[(index >> 6) as usize];
            let bit = 1u64 << (index & 63);
            repeated |= *word & bit;
            *word |= bit;
        }
        repeated == 0
    }
}

/// The bit arrays of one order.
pub(super) struct Marks {
    groups: Vec<Bits>,
}

impl Marks {
    pub(super) fn new(samples: usize, threads: usize) -> Result<Self, PackError> {
        let extra = EXTRA_MARK_BYTES / samples.div_ceil(64).max(1) / 8;
        let groups = threads.min(1 + extra);
        Ok(Self { groups: (0..groups).map(|_| Bits::new(samples)).collect::<Result<_, _>>()? })
    }

    /// The arrays, to be marked by one thread each.
    pub(super) fn groups(&mut self) -> &mut [Bits] {
        &mut self.groups
    }

    /// Mark on the calling thread; whether all were unmarked.
    pub(super) fn mark<W: Word>(&mut self, indices: &[W]) -> bool {
        self.groups[0].mark(indices)
    }

    /// Join the arrays; whether no sample was marked in two of them.
    pub(super) fn finish(mut self) -> bool {
        let Some((all, rest)) = self.groups.split_first_mut() else { return true };
        rest.iter().all(|bits| {
            all.0.iter_mut().zip(&bits.0).all(|(word, other)| {
                let distinct = *word & other == 0;
                *word |= other;
                distinct
            })
        })
    }
}

/// The error that names the first repetition in an order that has one: walks it once more, so that
/// the answer does not depend on the number of threads.
#[cold]
pub(super) fn first_repetition(order: &Integers<'_>, samples: usize) -> PackError {
    let mut bits = match Bits::new(samples) {
        Ok(bits) => bits,
        Err(error) => return error,
    };
    for position in 0..order.len() {
        let sample = order.get(position);
        if sample >= samples as u64 {
            return PackError::InputChanged;
        }
        if !bits.mark(&[sample]) {
            return PackError::OrderRepeated { position, sample: sample as usize };
        }
    }
    PackError::InputChanged
}

//! Whether an order names no sample twice.
//!
//! An order of all samples is a permutation exactly if its indices are, as a multiset, those of all samples. The
//! two multisets are compared by the sum of a 64-bit hash over each (`Tally`), which costs no memory and no
//! access to any. The hash has a key that each process draws from the system's randomness, so no order can be made to
//! collide; one that repeats a sample passes with a probability of about 2⁻⁶⁴. An order of some of the
//! samples takes one bit a sample (`Bits`). Either way a repetition that was found is then named by an exact walk.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::OnceLock;

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

/// The sum of the hashes of indices, less that of the positions they stand at: zero for a permutation.
///
/// Source of hashing multisets by sums: D. Clarke et al., "Incremental Multiset Hash Functions" (2003).
#[derive(Clone, Copy)]
pub(super) struct Tally {
    sum: u64,
    key: u64,
}

/// The key of this process's tallies.
fn key() -> u64 {
    static KEY: OnceLock<u64> = OnceLock::new();
    *KEY.get_or_init(|| RandomState::new().build_hasher().finish())
}

impl Default for Tally {
    fn default() -> Self {
        Self { sum: 0, key: key() }
    }
}

impl Tally {
    /// Count `index` at `position`.
    #[inline(always)]
    pub(super) fn count(&mut self, index: u64, position: u64) {
        self.sum = self.sum.wrapping_add(mix(index, self.key)).wrapping_sub(mix(position, self.key));
    }

    /// Join the tallies of two runs of an order.
    pub(super) fn join(&mut self, other: Self) {
        self.sum = self.sum.wrapping_add(other.sum);
    }

    /// Whether as many hashes were put in as taken out.
    pub(super) fn is_even(self) -> bool {
        self.sum == 0
    }
}

/// A bijection of 64 bits whose every output bit depends on every input bit (the finalizer of A. Appleby's MurmurHash3,
/// of a keyed index).
#[inline(always)]
fn mix(index: u64, key: u64) -> u64 {
    let mut hash = index.wrapping_add(key);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^ (hash >> 33)
}

/// The error that names the first repetition in an order that has one: walks it from the start, so that the
/// answer does not depend on the number of threads.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_two_changes_of_a_permutation_are_noticed() {
        let samples = 40u64;
        for (first, second) in (0..samples).flat_map(|a| (0..samples).map(move |b| (a, b))) {
            for (left, right) in (0..samples).flat_map(|a| (0..samples).map(move |b| (a, b))) {
                let mut order: Vec<u64> = (0..samples).rev().collect();
                order[first as usize] = left;
                order[second as usize] = right;
                let mut tally = Tally::default();
                order.iter().zip(0..).for_each(|(&index, position)| tally.count(index, position));
                let mut sorted = order.clone();
                sorted.sort_unstable();
                assert_eq!(tally.is_even(), sorted.iter().copied().eq(0..samples));
            }
        }
    }
}

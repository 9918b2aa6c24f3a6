//! The identity of a plan: a 128-bit hash of everything that determines it.
//!
//! Invariants: equal values give equal fingerprints whatever their dtype, stride, chunking,
//! thread count or platform; array boundaries are hashed too, so that two splits of the same
//! lengths into datasets differ. The hash is XXH3 (Yann Collet), over leaves of fixed size, so that
//! leaves are hashed in any order and on any thread, each while it lies in the cache.

use xxhash_rust::xxh3::{Xxh3, xxh3_128_with_seed};

use crate::integers::ColumnWord;
use crate::memory::{self, PlainInteger};

/// Values a leaf; part of the format: another number gives other fingerprints.
pub const LEAF: usize = 8192;

/// A fingerprint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fingerprint(pub u128);

impl core::fmt::Display for Fingerprint {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(formatter, "{:032x}", self.0)
    }
}

const NARROW_SEED: u64 = 32;
const WIDE_SEED: u64 = 64;

/// The hash of up to `LEAF` values. A leaf whose values all fit 32 bits is hashed as 32-bit words, whatever type it came
/// in.
pub(crate) fn leaf<W: ColumnWord + PlainInteger>(values: &[W]) -> u128 {
    if size_of::<W>() == size_of::<u32>() {
        return xxh3_128_with_seed(memory::as_bytes(values), NARROW_SEED);
    }
    if values.iter().fold(0, |seen, value| seen | value.widen()) > u64::from(u32::MAX) {
        return xxh3_128_with_seed(memory::as_bytes(values), WIDE_SEED);
    }
    let narrow: Vec<u32> = values.iter().map(|value| value.widen() as u32).collect();
    xxh3_128_with_seed(memory::as_bytes(&narrow), NARROW_SEED)
}

/// The hash of a column: its leaves in order, and how many values it has.
#[derive(Default)]
pub struct ColumnHash {
    leaves: Xxh3,
}

impl ColumnHash {
    /// Add the next leaf.
    pub fn push(&mut self, leaf: u128) {
        self.leaves.update(&leaf.to_le_bytes());
    }

    /// The hash of a column of `count` values.
    #[must_use]
    pub fn finish(mut self, count: u64) -> u128 {
        self.leaves.update(&count.to_le_bytes());
        self.leaves.digest128()
    }
}

/// Hashes named parameters, each with its name and length, so that no two lists of them run together.
pub struct ParameterHash {
    state: Xxh3,
}

impl ParameterHash {
    /// Start with the name of what is hashed.
    #[must_use]
    pub fn new(domain: &str) -> Self {
        let mut hash = Self { state: Xxh3::new() };
        hash.push("domain", domain.as_bytes());
        hash
    }

    /// Add one parameter.
    pub fn push(&mut self, name: &str, value: &[u8]) {
        for part in [name.as_bytes(), value] {
            self.state.update(&(part.len() as u64).to_le_bytes());
            self.state.update(part);
        }
    }

    /// The fingerprint of all parameters so far.
    #[must_use]
    pub fn finish(&self) -> Fingerprint {
        Fingerprint(self.state.digest128())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_hash_alike_whatever_their_width() {
        let narrow = [0i32, 7, i32::MAX];
        assert_eq!(leaf(&narrow), leaf(&narrow.map(i64::from)));
        assert_eq!(leaf(&[7u32, u32::MAX]), leaf(&[7u64, u64::from(u32::MAX)]));
        assert_ne!(leaf(&[1u64 << 32]), leaf(&[0u64]));
    }
}

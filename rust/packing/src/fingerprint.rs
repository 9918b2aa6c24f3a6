//! The identity of a plan: a 128-bit hash of everything that determines it.
//!
//! Invariants: equal values give equal fingerprints whatever their dtype, stride, chunking,
//! thread count or platform; array boundaries are hashed too, so that two splits of the same
//! lengths into datasets differ. The hash is XXH3 (Yann Collet), over leaves of fixed size, so that
//! leaves are hashed in any order and on any thread, each while it lies in the cache.

use xxhash_rust::xxh3::{Xxh3, xxh3_128_with_seed};

use crate::inputs::ColumnWord;
use crate::memory;

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

/// The hash of up to `LEAF` values. A leaf whose values all fit 32 bits is hashed as 32-bit words,
/// whatever type it came in.
pub fn leaf<W: HashWord>(values: &[W]) -> u128 {
    W::digest(values)
}

/// Words that leaves are read into.
pub trait HashWord: ColumnWord {
    /// The hash of a leaf.
    fn digest(values: &[Self]) -> u128;
}

const SEED_NARROW: u64 = 32;
const SEED_WIDE: u64 = 64;

/// The hash of values that all fit 32 bits.
fn digest_narrow<W: ColumnWord>(values: &[W]) -> u128 {
    let narrow: Vec<u32> = values.iter().map(|&value| (value.widen() as u32).to_le()).collect();
    xxh3_128_with_seed(memory::as_bytes(&narrow), SEED_NARROW)
}

macro_rules! leaf_of_32_bits {
    ($($word:ty),*) => {$(
        impl HashWord for $word {
            fn digest(values: &[Self]) -> u128 {
                match cfg!(target_endian = "little") {
                    true => xxh3_128_with_seed(memory::as_bytes(values), SEED_NARROW),
                    false => digest_narrow(values),
                }
            }
        }
    )*};
}
leaf_of_32_bits!(i32, u32);

macro_rules! leaf_of_64_bits {
    ($($word:ty),*) => {$(
        impl HashWord for $word {
            fn digest(values: &[Self]) -> u128 {
                if values.iter().fold(0, |seen, value| seen | value.widen()) <= u64::from(u32::MAX) {
                    return digest_narrow(values);
                }
                let little: Vec<u64> = values.iter().map(|value| value.widen().to_le()).collect();
                xxh3_128_with_seed(memory::as_bytes(&little), SEED_WIDE)
            }
        }
    )*};
}
leaf_of_64_bits!(i64, u64);

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

//! The integers that plans are computed in: 32 bits while every bound fits, else 64.

use crate::fingerprint::Leaf;
use crate::memory::Zero;
use crate::processor::widest;
use crate::shuffle::Index;

/// Integers of a plan under computation: `i32` while every bound fits, else `i64`.
pub(crate) trait Cell: Copy + Zero + Into<i64> + Send + Sync + 'static {
    /// The unsigned integer that lengths and indices are computed in.
    type Word: Leaf + Index + Zero;
    /// The largest value.
    const LARGEST: u64;
    fn from_word(word: Self::Word) -> Self;
    fn to_word(self) -> Self::Word;
    fn word_of(value: usize) -> Self::Word;
    /// How far a count is beyond `before`.
    fn difference(count: Self, before: usize) -> usize {
        usize::try_from(count.into()).unwrap_or(0).saturating_sub(before)
    }
    fn add(left: Self::Word, right: Self::Word) -> Self::Word;
    /// The sum of all values, none of them beyond `LARGEST`, or 2⁶⁴ - 1 where it is more.
    fn sum(values: &[Self::Word]) -> u64;
    fn sub(left: Self::Word, right: Self::Word) -> Self::Word;
}

macro_rules! cell {
    ($cell:ty, $word:ty, $sum:expr) => {
        impl Cell for $cell {
            type Word = $word;
            const LARGEST: u64 = <$cell>::MAX as u64;
            #[inline(always)]
            fn from_word(word: $word) -> Self {
                word as $cell
            }
            #[inline(always)]
            fn to_word(self) -> $word {
                self as $word
            }
            #[inline(always)]
            fn word_of(value: usize) -> $word {
                value as $word
            }
            #[inline(always)]
            fn add(left: $word, right: $word) -> $word {
                left.wrapping_add(right)
            }
            #[inline]
            fn sum(values: &[$word]) -> u64 {
                widest(|| $sum(values))
            }
            #[inline(always)]
            fn sub(left: $word, right: $word) -> $word {
                left.wrapping_sub(right)
            }
        }
    };
}
// 2³³ values of 31 bits have to come together before their sum wraps; a leaf has far fewer.
cell!(i32, u32, |values: &[u32]| values.iter().map(|&value| u64::from(value)).sum());
cell!(i64, u64, |values: &[u64]| values.iter().fold(0u64, |sum, &value| sum.saturating_add(value)));

//! The order that `numpy.random.RandomState(seed).shuffle(numpy.arange(n))` gives, bit for bit.
//!
//! Sources: M. Matsumoto and T. Nishimura, "Mersenne Twister: a 623-dimensionally equidistributed
//! uniform pseudo-random number generator" (1998), with the seeding of their 2002 revision; the
//! Fisher-Yates shuffle in R. Durstenfeld's form, with numpy's masked rejection for each bound.
//!
//! The draws are a serial chain, but which cells they will touch is known before any cell moves. So
//! draws run one block ahead of the swaps, and each drawn cell is prefetched in between: the time is
//! that of the memory's bandwidth, not of its latency.

use crate::error::PackError;
use crate::memory::{self, PlainInteger};
use crate::progress::Progress;
use crate::simd::vectorized;

const STATE_WORDS: usize = 624;
const SHIFT_WORDS: usize = 397;
const TWIST: u32 = 0x9908_b0df;
const UPPER_BIT: u32 = 0x8000_0000;
const LOWER_BITS: u32 = 0x7fff_ffff;

/// Swaps between the prefetch of a cell and its use. Long enough that the cell has come, few enough that both blocks
/// and their draws stay in the first-level cache.
const BLOCK: usize = 192;
/// Draws that are compared with one bound.
const GROUP: usize = 8;
/// Swaps between two ticks: about 10 ms.
const SWAPS_A_TICK: usize = 1 << 20;

/// A Mersenne Twister in the state numpy's `RandomState(seed)` starts from.
pub struct RandomState {
    key: [u32; STATE_WORDS],
    tempered: [u32; STATE_WORDS],
    position: usize,
}

impl RandomState {
    /// The generator that `numpy.random.RandomState(seed)` holds.
    #[must_use]
    pub fn new(seed: u32) -> Self {
        let mut key = [0u32; STATE_WORDS];
        let mut word = seed;
        for (index, slot) in key.iter_mut().enumerate() {
            *slot = word;
            word = 1_812_433_253u32.wrapping_mul(word ^ (word >> 30)).wrapping_add(index as u32 + 1);
        }
        Self { key, tempered: [0; STATE_WORDS], position: STATE_WORDS }
    }

    /// The generator that `numpy.random.RandomState(words)` holds, for 1 to 624 words.
    #[must_use]
    pub fn of_words(words: &[u32]) -> Self {
        let mut state = Self::new(19_650_218);
        let key = &mut state.key;
        let mixed = |before: u32, factor: u32| (before ^ (before >> 30)).wrapping_mul(factor);
        let mut index = 1usize;
        let advance = |key: &mut [u32; STATE_WORDS], index: usize| {
            if index + 1 < STATE_WORDS {
                return index + 1;
            }
            key[0] = key[STATE_WORDS - 1];
            1
        };
        // Each word of the seed is added together with its number.
        let numbered = words.iter().zip(0u32..).map(|(word, number)| word.wrapping_add(number));
        for word in numbered.cycle().take(STATE_WORDS) {
            key[index] = (key[index] ^ mixed(key[index - 1], 1_664_525)).wrapping_add(word);
            index = advance(key, index);
        }
        for _ in 1..STATE_WORDS {
            key[index] = (key[index] ^ mixed(key[index - 1], 1_566_083_941)).wrapping_sub(index as u32);
            index = advance(key, index);
        }
        key[0] = 1 << 31;
        state
    }

    /// The next 32 random bits.
    #[inline]
    pub fn next_u32(&mut self) -> u32 {
        if self.position == STATE_WORDS {
            self.refill();
        }
        let word = self.tempered[self.position];
        self.position += 1;
        word
    }

    /// The next 64 random bits: two words, the first one on top.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        let high = u64::from(self.next_u32());
        high << 32 | u64::from(self.next_u32())
    }

    #[inline(always)]
    fn refill(&mut self) {
        refill(&mut self.key, &mut self.tempered);
        self.position = 0;
    }

    /// The numbers 0 … `len` - 1 as numpy's `shuffle` leaves `arange(len)`, going on in this generator's stream.
    ///
    /// # Errors
    /// When memory for the array is refused, or an interrupt.
    pub fn shuffled<I: Index>(&mut self, len: usize, progress: &mut dyn Progress) -> Result<Vec<I>, PackError> {
        let mut order = memory::zeroed::<I>(len)?;
        for (number, part) in order.chunks_mut(SWAPS_A_TICK).enumerate() {
            progress.tick("shuffling", 0, len as u64)?;
            for (offset, slot) in part.iter_mut().enumerate() {
                *slot = I::from_usize(number * SWAPS_A_TICK + offset);
            }
        }
        self.shuffle(&mut order, progress)?;
        Ok(order)
    }

    /// Shuffle values in place as numpy's `shuffle` does, going on in this generator's stream.
    ///
    /// # Errors
    /// An interrupt.
    pub(crate) fn shuffle<I: Index>(&mut self, order: &mut [I], progress: &mut dyn Progress) -> Result<(), PackError> {
        // Positions above 2³² take 64-bit draws.
        let len = order.len();
        let mut unswapped = len;
        let wide = usize::try_from(1u64 << 32).unwrap_or(usize::MAX);
        while unswapped > wide {
            let last = unswapped - 1;
            let mask = u64::MAX >> (last as u64).leading_zeros();
            let drawn = loop {
                let candidate = self.next_u64() & mask;
                if candidate <= last as u64 {
                    break candidate as usize;
                }
            };
            order.swap(drawn, last);
            unswapped = last;
            if unswapped.is_multiple_of(SWAPS_A_TICK) {
                progress.tick("shuffling", (len - unswapped) as u64, len as u64)?;
            }
        }
        vectorized(|| self.shuffle_front(&mut order[..unswapped], len, progress))
    }

    /// Shuffle an array of at most 2³² elements.
    #[inline(always)]
    fn shuffle_front<I: Index>(
        &mut self,
        order: &mut [I],
        len: usize,
        progress: &mut dyn Progress,
    ) -> Result<(), PackError> {
        let mut drawn = [[0u32; BLOCK + 1]; 2];
        let mut undrawn = order.len();
        let mut unswapped = order.len();
        let mut pending = 0usize;
        let mut side = 0usize;
        let mut since_tick = 0usize;
        while unswapped > 1 {
            let ahead = if undrawn > 1 { self.draw(undrawn, &mut drawn[side]) } else { 0 };
            let (first, second) = drawn.split_at(1);
            let (coming, due) = if side == 0 { (&first[0], &second[0]) } else { (&second[0], &first[0]) };
            let (coming, due) = (&coming[..ahead], &due[..pending]);
            undrawn -= ahead;
            // Prefetches and swaps alternate, so that the memory is busy all the time and never overloaded.
            let both = ahead.min(pending);
            for (&next, &cell) in coming[..both].iter().zip(&due[..both]) {
                memory::prefetch(order, next as usize);
                unswapped -= 1;
                order.swap(cell as usize, unswapped);
            }
            for &next in &coming[both..] {
                memory::prefetch(order, next as usize);
            }
            for &cell in &due[both..] {
                unswapped -= 1;
                order.swap(cell as usize, unswapped);
            }
            pending = ahead;
            side = 1 - side;
            since_tick += ahead;
            if since_tick >= SWAPS_A_TICK {
                since_tick = 0;
                progress.tick("shuffling", (len - unswapped) as u64, len as u64)?;
            }
            if undrawn <= 1 && pending == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Draw the partners of positions `undrawn - 1`, `undrawn - 2`, … into `out`, and say how many.
    ///
    /// Stops early at a power of two, where the mask changes.
    #[inline(always)]
    fn draw(&mut self, undrawn: usize, out: &mut [u32; BLOCK + 1]) -> usize {
        let mut bound = (undrawn - 1) as u32;
        let mask = u32::MAX >> bound.leading_zeros();
        // The last bound that this mask serves is the power of two itself.
        let serves = (bound - (mask >> 1)) as usize;
        let wanted = serves.min(BLOCK);
        let mut count = 0usize;
        while count < wanted {
            if self.position == STATE_WORDS {
                self.refill();
            }
            // Never more draws than could overfill `out`: each fills one slot at most.
            let take = (STATE_WORDS - self.position).min(wanted - count);
            let (groups, rest) = self.tempered[self.position..self.position + take].as_chunks::<GROUP>();
            for group in groups {
                let candidates = group.map(|word| word & mask);
                // The bound sinks by a group at most. If no candidate is that near to it, the bound before the group
                // decides for all of them, and no candidate waits for the one before.
                let near = candidates.map(|candidate| bound.wrapping_sub(candidate) < GROUP as u32);
                if near.contains(&true) {
                    keep(&candidates, &mut bound, out, &mut count);
                    continue;
                }
                let before = count;
                for candidate in candidates {
                    out[count] = candidate;
                    count += usize::from(candidate <= bound);
                }
                bound -= (count - before) as u32;
            }
            for word in rest {
                keep(&[word & mask], &mut bound, out, &mut count);
            }
            self.position += take;
        }
        count
    }
}

/// Put the candidates within the bound, which sinks by one with each, into `out` from `count` on.
#[inline(always)]
fn keep(candidates: &[u32], bound: &mut u32, out: &mut [u32; BLOCK + 1], count: &mut usize) {
    for &candidate in candidates {
        // Written always and kept only if within the bound: no branch to mispredict.
        out[*count] = candidate;
        let kept = u32::from(candidate <= *bound);
        *count += kept as usize;
        *bound -= kept;
    }
}

/// Generate the next 624 words and temper them. Loops without branches or calls, so that they are vectorised.
#[inline(always)]
fn refill(key: &mut [u32; STATE_WORDS], tempered: &mut [u32; STATE_WORDS]) {
    const HEAD: usize = STATE_WORDS - SHIFT_WORDS;
    #[inline(always)]
    fn twist(this: u32, next: u32, far: u32) -> u32 {
        let mixed = (this & UPPER_BIT) | (next & LOWER_BITS);
        far ^ (mixed >> 1) ^ ((mixed & 1).wrapping_neg() & TWIST)
    }
    let mut fresh = [0u32; STATE_WORDS];
    for index in 0..HEAD {
        fresh[index] = twist(key[index], key[index + 1], key[index + SHIFT_WORDS]);
    }
    for begin in (HEAD..STATE_WORDS - 1).step_by(HEAD) {
        let end = (begin + HEAD).min(STATE_WORDS - 1);
        let (done, todo) = fresh.split_at_mut(begin);
        let far = &done[begin - HEAD..];
        for offset in 0..end - begin {
            todo[offset] = twist(key[begin + offset], key[begin + offset + 1], far[offset]);
        }
    }
    fresh[STATE_WORDS - 1] = twist(key[STATE_WORDS - 1], fresh[0], fresh[SHIFT_WORDS - 1]);
    *key = fresh;
    for (slot, &word) in tempered.iter_mut().zip(key.iter()) {
        let mut value = word;
        value ^= value >> 11;
        value ^= (value << 7) & 0x9d2c_5680;
        value ^= (value << 15) & 0xefc6_0000;
        value ^= value >> 18;
        *slot = value;
    }
}

/// Integers that can hold sample indices.
#[allow(private_bounds)]
pub trait Index: PlainInteger {
    /// The index, known to fit.
    fn from_usize(value: usize) -> Self;
}

macro_rules! index {
    ($($type:ty),*) => {$(
        impl Index for $type {
            fn from_usize(value: usize) -> Self {
                value as $type
            }
        }
    )*};
}
index!(u32, u64, i32, i64);

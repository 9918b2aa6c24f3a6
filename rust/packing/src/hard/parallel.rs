//! Cutting one stream on several threads.
//!
//! The order is walked in windows of a few chunks a thread. In each window: (1) chunks are loaded
//! and summed apart; (2) from the prefix sums each chunk knows where its first token falls in a
//! pack, and counts its pieces and the pack it leaves open; (3) prefix sums of
//! those counts give each chunk its own slices of the output, and the merges run apart.
//!
//! Counting needs no merge: a sample adds one piece, a pack closed within it adds one more, and a sample
//! that ends on a boundary (an empty one there included) takes one away.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use super::chunk::{Checks, Chunk};
use super::kernel::{self, Cut, Written};
use super::order::Order;
use super::scan::Dataset;
use super::{Packer, Stream, packs_a_chunk};
use crate::cell::Cell;
use crate::error::PackError;
use crate::fingerprint::LEAF;
use crate::integers::Word;
use crate::sink::Room;

/// Below this many samples one thread is as fast.
pub(super) const WORTHWHILE_SAMPLES: usize = 1 << 16;
/// Samples a chunk: enough work that handing it to a thread costs nothing beside it.
const CHUNK: usize = 2 * LEAF;
/// Chunks a thread in one window; more than one, so that a thread that was held up is relieved.
const CHUNKS_A_THREAD: usize = 8;

/// A chunk and what is known of it before it is merged.
struct Slot<C: Cell> {
    chunk: Chunk<C>,
    error: Option<PackError>,
    /// Where the cutting stands before the chunk; completed in order.
    cut: Cut<C::Word>,
    closed: usize,
    pieces: usize,
    /// The open pack at the end, where the chunk closes one.
    open: Cut<C::Word>,
    written: Written,
}

impl<C: Cell> Slot<C> {
    fn new(size: usize) -> Self {
        Self {
            chunk: Chunk::new(size),
            error: None,
            cut: Cut::default(),
            closed: 0,
            pieces: 0,
            open: Cut::default(),
            written: Written::default(),
        }
    }

    /// Count pieces, and find the open pack at the end by walking back to its first token.
    fn count(&mut self, max_length: &Divisor) {
        let filled = self.cut.filled.widen();
        let mut sum = filled;
        let mut on_boundary = 0usize;
        for length in &self.chunk.lengths {
            sum += length.widen();
            on_boundary += usize::from(max_length.divides(sum));
        }
        self.pieces = self.chunk.lengths.len() + self.closed - on_boundary;
        let filled_at_end = sum - self.closed as u64 * max_length.value;
        self.open = Cut { filled: C::Word::truncate(filled_at_end), ..Cut::default() };
        if self.closed == 0 {
            self.open.longest = self.chunk.lengths.iter().copied().max().unwrap_or_default();
            return;
        }
        let mut rest = filled_at_end;
        for &length in self.chunk.lengths.iter().rev() {
            if rest == 0 {
                break;
            }
            if length.widen() > rest {
                self.open.start = C::Word::truncate(length.widen() - rest);
                self.open.longest = self.open.longest.max(C::Word::truncate(rest));
                break;
            }
            self.open.longest = self.open.longest.max(length);
            rest -= length.widen();
        }
    }
}

/// Tells multiples of a number without dividing.
///
/// Source: H. S. Warren, "Hacker's Delight", 2nd edition, section 10-17: for odd d, n is a multiple
/// exactly if n times the inverse of d modulo 2⁶⁴ is at most (2⁶⁴ - 1) / d; a power of two in the divisor is a
/// rotation.
struct Divisor {
    value: u64,
    inverse: u64,
    shift: u32,
    limit: u64,
}

impl Divisor {
    fn new(value: u64) -> Self {
        let shift = value.trailing_zeros();
        let odd = value >> shift;
        // Newton's iteration doubles the correct bits; an odd number is its own inverse to 3 bits.
        let mut inverse = odd;
        for _ in 0..5 {
            inverse = inverse.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(inverse)));
        }
        Self { value, inverse, shift, limit: u64::MAX / value }
    }

    #[inline(always)]
    fn divides(&self, number: u64) -> bool {
        number.wrapping_mul(self.inverse).rotate_right(self.shift) <= self.limit
    }
}

impl<C: Cell> Packer<'_, C> {
    /// Cut a stream on the threads of the crew; false, and stopped early, where the order is not one.
    pub(super) fn cut_in_parallel(
        &mut self,
        dataset: &Dataset<'_>,
        order: Order<'_, C>,
        stream: &mut Stream<C>,
        checks: &Checks,
    ) -> Result<bool, PackError> {
        let len = order.len();
        let divisor = Divisor::new(self.max_length.widen());
        let crew = self.crew;
        let in_all = CHUNKS_A_THREAD * crew.threads();
        // Of few samples, too, each thread has several chunks.
        let size = len.div_ceil(in_all).next_multiple_of(LEAF).min(CHUNK);
        let window = size * in_all;
        let mut slots: Vec<Slot<C>> = (0..in_all).map(|_| Slot::new(size)).collect();
        for begin in (0..len).step_by(window) {
            self.lookout.reach(begin, len);
            self.lookout.look()?;
            let used = (len - begin).min(window).div_ceil(size);
            let slots = &mut slots[..used];
            crew.each(slots, |thread, number, slot| {
                let start = begin + number * size;
                slot.error = slot.chunk.load(thread, dataset, order, checks, start, size.min(len - start)).err();
            });
            if let Some(error) = slots.iter_mut().find_map(|slot| slot.error.take()) {
                return Err(error);
            }
            if let Some(hash) = &mut self.order_hash {
                slots.iter().flat_map(|slot| &slot.chunk.leaves).for_each(|&leaf| hash.push(leaf));
            }
            let tokens = slots.iter().fold(stream.tokens, |sum, slot| sum.saturating_add(slot.chunk.tokens));
            if tokens > stream.limit {
                return Err(PackError::InputChanged);
            }
            self.place(slots, stream.cut.filled.widen(), divisor.value);
            if !slots.iter().all(|slot| slot.chunk.sound) {
                return Ok(false);
            }
            crew.each(slots, |_, _, slot| slot.count(&divisor));
            let closed: usize = slots.iter().map(|slot| slot.closed).sum();
            // Half of what a serial step may close, as there are many chunks in a window.
            if closed as u64 > packs_a_chunk::<C>() / 2 * used as u64 {
                // Packs far shorter than samples: what one merge writes has to be bounded.
                for slot in &*slots {
                    let Chunk { indices, lengths, tokens, .. } = &slot.chunk;
                    self.merge_samples(indices, lengths, *tokens, stream)?;
                }
                continue;
            }
            self.merge_window(slots, closed, stream)?;
        }
        Ok(true)
    }

    /// Where in a pack each chunk begins, and how many packs it closes.
    fn place(&self, slots: &mut [Slot<C>], mut filled: u64, max_length: u64) {
        for slot in slots {
            slot.cut.filled = C::Word::truncate(filled);
            let sum = filled + slot.chunk.tokens;
            slot.closed = (sum / max_length) as usize;
            filled = sum % max_length;
        }
    }

    fn merge_window(&mut self, slots: &mut [Slot<C>], closed: usize, stream: &mut Stream<C>) -> Result<(), PackError> {
        let mut cut = stream.cut;
        for slot in &mut *slots {
            stream.note(&slot.chunk.lengths, slot.chunk.tokens)?;
            slot.cut = cut;
            cut = if slot.closed > 0 {
                slot.open
            } else {
                Cut { filled: slot.open.filled, start: cut.start, longest: cut.longest.max(slot.open.longest) }
            };
        }
        stream.cut = cut;
        let pieces: usize = slots.iter().map(|slot| slot.pieces).sum();
        let mut pieces_before = self.totals.pieces;
        let max_length = self.max_length;
        let mut room = self.sink.room(pieces, closed, &mut self.lookout)?;
        let mut jobs = Vec::with_capacity(slots.len());
        for slot in &mut *slots {
            let own = take_room(&mut room, slot.pieces, slot.closed);
            let pieces_after = pieces_before + slot.pieces;
            jobs.push((slot, pieces_before, own));
            pieces_before = pieces_after;
        }
        self.crew.each(&mut jobs, |_, _, (slot, pieces_before, own)| {
            let Slot { chunk, cut, closed, .. } = &**slot;
            let mut cut = *cut;
            slot.written =
                kernel::merge(&chunk.indices, &chunk.lengths, max_length, &mut cut, *pieces_before, *closed, own);
        });
        drop(jobs);
        let mut total = Written::default();
        for slot in slots.iter() {
            let Written { pieces, packs, .. } = slot.written;
            assert!((pieces, packs) == (slot.pieces, slot.closed), "a chunk fills its slices");
            if slot.written.packs > 0 {
                total.pieces_closed = total.pieces + slot.written.pieces_closed;
            }
            total.pieces += slot.written.pieces;
            total.packs += slot.written.packs;
            total.skipped += slot.written.skipped;
        }
        // SAFETY: the slices of the slots lie one behind the other, and each was written whole.
        unsafe { self.keep(total, stream) }
    }
}

/// Split the first entries off a room.
fn take_room<'a, S>(room: &mut Room<'a, S>, pieces: usize, packs: usize) -> Room<'a, S> {
    type Entries<'a, S> = &'a mut [MaybeUninit<S>];
    fn split<'a, S>(slice: &mut Entries<'a, S>, len: usize) -> Entries<'a, S> {
        let (head, tail) = core::mem::take(slice).split_at_mut(len);
        *slice = tail;
        head
    }
    Room {
        indices: split(&mut room.indices, pieces),
        indices_cu_len: split(&mut room.indices_cu_len, packs),
        start_offset: split(&mut room.start_offset, packs),
        end_offset: split(&mut room.end_offset, packs),
        longest: split(&mut room.longest, packs),
    }
}

#[cfg(test)]
mod tests {
    use super::Divisor;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn divisor_agrees_with_division(value in 1u64.., number in any::<u64>(), factor in any::<u64>()) {
            let divisor = Divisor::new(value);
            prop_assert_eq!(divisor.divides(number), number % value == 0);
            if let Some(multiple) = value.checked_mul(factor % 1000) {
                prop_assert!(divisor.divides(multiple));
            }
        }
    }
}

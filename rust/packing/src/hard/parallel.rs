//! Cutting one stream on several threads.
//!
//! The order is walked in windows of a few chunks a thread. In each window, whose chunks are loaded and summed: (1)
//! from the prefix sums each chunk knows where its first token falls in a pack, and counts its pieces and the pack it
//! leaves open; (2) prefix sums of those counts give each chunk its own slices of the output, and the merges run apart,
//! each beside the loading of a chunk of the next window.
//!
//! Counting needs no merge: a sample adds one piece, a pack closed within it adds one more, and a sample
//! that ends on a boundary (an empty one there included) takes one away.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use super::ahead::{Ahead, Ask};
use super::chunk::{Chunk, Source};
use super::kernel::{self, Cut, Samples, Written};
use super::serial::Stream;
use super::{Packer, packs_a_chunk};
use crate::cell::Cell;
use crate::error::PackError;
use crate::fingerprint::LEAF;
use crate::integers::Word;
use crate::sink::Room;

/// Below this many samples one thread is as fast.
pub(super) const WORTHWHILE_SAMPLES: usize = 1 << 18;
/// Samples a chunk: enough work that handing it to a thread costs nothing beside it.
const CHUNK: usize = LEAF;
/// Chunks a thread in one window; more than one, so that a thread that was held up is relieved.
const CHUNKS_A_THREAD: usize = 8;

/// A chunk and what is known of it before it is merged.
struct Slot<C: Cell> {
    chunk: Chunk<C>,
    /// The one in the next window.
    next: Chunk<C>,
    /// What went wrong as that was loaded.
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
            next: Chunk::new(size),
            error: None,
            cut: Cut::default(),
            closed: 0,
            pieces: 0,
            open: Cut::default(),
            written: Written::default(),
        }
    }

    /// Merge the chunk into its slices, and load `count` samples from `start` on as the next one, run by run.
    fn merge_and_load(
        &mut self,
        thread: usize,
        source: &Source<'_, C, impl Ask>,
        max_length: C::Word,
        (start, count): (usize, usize),
        (pieces_before, room): (usize, &mut Room<'_, C>),
    ) -> Result<(), PackError> {
        let (mut cut, mut written) = (self.cut, Written::default());
        self.next.read(source, start, count);
        let (samples, step) = (self.chunk.indices.len(), source.run());
        for begin in (0..samples.max(count)).step_by(step) {
            let run = |samples: usize| begin.min(samples)..(begin + step).min(samples);
            let chunk = &self.chunk;
            let merged = Samples { indices: &chunk.indices[run(samples)], lengths: &chunk.lengths[run(samples)] };
            let packs_expected = self.closed.saturating_mul(merged.indices.len()) / samples.max(1);
            let ahead = self.next.still_to_ask(thread, source, run(count));
            let before = pieces_before + written.pieces;
            let more = kernel::merge(merged, max_length, &mut cut, before, packs_expected, room, ahead);
            take_room(room, more.pieces, more.packs);
            written = written.then(more);
            self.next.gather(thread, source, run(count), source.is_asking())?;
        }
        self.written = written;
        Ok(())
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
        source: &Source<'_, C, impl Ask>,
        stream: &mut Stream<C>,
    ) -> Result<bool, PackError> {
        let len = source.order.len();
        let divisor = Divisor::new(self.max_length.widen());
        let (crew, max_length) = (self.crew, self.max_length);
        let in_all = CHUNKS_A_THREAD * crew.threads();
        let window = CHUNK * in_all;
        // Position and samples of a chunk; none beyond the end.
        let bounds = |begin: usize, number: usize| {
            let start = (begin + number * CHUNK).min(len);
            (start, CHUNK.min(len - start))
        };
        let load = |slots: &mut [Slot<C>], begin: usize| {
            crew.each(slots, |thread, number, slot| {
                let (start, count) = bounds(begin, number);
                slot.error = slot.next.load(thread, source, start, count).err();
            });
        };
        let mut slots: Vec<Slot<C>> = (0..in_all).map(|_| Slot::new(CHUNK)).collect();
        load(&mut slots, 0);
        for begin in (0..len).step_by(window) {
            self.lookout.reach(begin, len);
            self.lookout.look()?;
            let used = (len - begin).min(window).div_ceil(CHUNK);
            let slots = &mut slots[..used];
            if let Some(error) = slots.iter_mut().find_map(|slot| slot.error.take()) {
                return Err(error);
            }
            slots.iter_mut().for_each(|slot| core::mem::swap(&mut slot.chunk, &mut slot.next));
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
                    self.merge_samples(indices, lengths, *tokens, stream, Ahead::nothing())?;
                }
                load(slots, begin + window);
                continue;
            }
            self.merge_window(slots, closed, stream, |thread, number, slot, own| {
                let next = bounds(begin + window, number);
                slot.error = slot.merge_and_load(thread, source, max_length, next, own).err();
            })?;
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

    /// Give each chunk of a window, which close so many packs, its slices, and have `merge` fill them: called on any
    /// thread with its number, a chunk and its number, the pieces before it, and its slices.
    fn merge_window(
        &mut self,
        slots: &mut [Slot<C>],
        closed: usize,
        stream: &mut Stream<C>,
        merge: impl Fn(usize, usize, &mut Slot<C>, (usize, &mut Room<'_, C>)) + Sync,
    ) -> Result<(), PackError> {
        let mut cut = stream.cut;
        for slot in &mut *slots {
            stream.note(&slot.chunk.lengths, slot.chunk.tokens)?;
            slot.cut = cut;
            // What a window before wrote says nothing of this one.
            slot.written = Written::default();
            cut = if slot.closed > 0 {
                slot.open
            } else {
                Cut { filled: slot.open.filled, start: cut.start, longest: cut.longest.max(slot.open.longest) }
            };
        }
        stream.cut = cut;
        let pieces: usize = slots.iter().map(|slot| slot.pieces).sum();
        let mut pieces_before = self.totals.pieces;
        let mut room = self.sink.room(pieces, closed, &mut self.lookout)?;
        let mut jobs = Vec::with_capacity(slots.len());
        for slot in &mut *slots {
            let own = take_room(&mut room, slot.pieces, slot.closed);
            let pieces_after = pieces_before + slot.pieces;
            jobs.push((slot, pieces_before, own));
            pieces_before = pieces_after;
        }
        self.crew.each(&mut jobs, |thread, number, (slot, before, own)| merge(thread, number, slot, (*before, own)));
        drop(jobs);
        // What was not merged, as an input that changed stopped it, is not kept.
        if let Some(error) = slots.iter_mut().find_map(|slot| slot.error.take()) {
            return Err(error);
        }
        let total = slots.iter().fold(Written::default(), |total, slot| {
            let Written { pieces, packs, .. } = slot.written;
            assert!((pieces, packs) == (slot.pieces, slot.closed), "a chunk fills its slices");
            total.then(slot.written)
        });
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
    use proptest::prelude::*;

    use super::super::Totals;
    use super::*;
    use crate::crew::Crew;
    use crate::sink::MemorySink;
    use crate::watch::{Lookout, Silent};

    #[test]
    #[should_panic(expected = "a chunk fills its slices")]
    fn what_an_earlier_window_wrote_is_not_taken_for_this_ones() {
        let crew = Crew::new(1);
        let mut sink = MemorySink::<i32>::new(0, 1).unwrap();
        let mut watch = Silent;
        let mut packer = Packer::<i32> {
            max_length: 4,
            crew: &crew,
            sink: &mut sink,
            lookout: Lookout::new(&mut watch),
            totals: Totals::default(),
            order_hash: None,
            order_checked: true,
        };
        let mut stream = Stream { cut: Cut::default(), tokens: 0, limit: 3, empty_run: 0, last_length: 0, id: 0 };
        let mut slot = Slot::new(1);
        slot.chunk.lengths.push(3);
        slot.chunk.tokens = 3;
        slot.pieces = 1;
        slot.written.pieces = 1;
        let _ = packer.merge_window(&mut [slot], 0, &mut stream, |_, _, _, _| ());
    }

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

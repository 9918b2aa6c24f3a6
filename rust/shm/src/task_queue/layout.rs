//! The offsets of the words of a queue in its memory.
//!
//! Words that several processes write stand two cache lines apart from others: processors fetch lines in pairs.

use crate::ShmError;

/// How many workers a queue has room for: a pair of cache lines of their bits.
pub(crate) const WORKERS: u16 = 512;

/// The most slots that a task id can name.
pub(crate) const MAX_SLOTS: usize = 1 << 16;

/// The smallest slot.
pub(crate) const MIN_SLOT_BYTES: usize = LINE;

const MAX_SLOT_BYTES: usize = 1 << 30;
const PAIR_OF_LINES: usize = 128;
const LINE: usize = 64;
const PAGE: usize = 4096;

pub(crate) const MAGIC: usize = 0;
pub(crate) const SLOTS: usize = 8;
pub(crate) const SLOT_BYTES: usize = 16;
pub(crate) const STOPPED: usize = 24;
pub(crate) const WORKER_COUNT: usize = 28;
pub(crate) const HEAD: usize = PAIR_OF_LINES;
pub(crate) const TAIL: usize = 2 * PAIR_OF_LINES;
pub(crate) const IDLE_WORKERS: usize = 3 * PAIR_OF_LINES;
pub(crate) const CALLERS: usize = 4 * PAIR_OF_LINES;
pub(crate) const RESULT_WORDS: usize = CALLERS + 8;
pub(crate) const WAKE_WORDS: usize = 5 * PAIR_OF_LINES;
pub(crate) const FINISHED: usize = WAKE_WORDS + WORKERS as usize * 4;

/// Before a payload, in the line of its first bytes: the state, then kind and length.
pub(crate) const SLOT_HEAD: usize = 16;
pub(crate) const KIND: usize = 8;
pub(crate) const LENGTH: usize = 12;

/// The offsets that depend on how many slots there are and how large they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueLayout {
    pub(crate) slots: usize,
    pub(crate) slot_bytes: usize,
    /// A power of two.
    pub(crate) entries: usize,
    pub(crate) queue: usize,
    pub(crate) first_slot: usize,
    pub(crate) stride: usize,
    pub(crate) size: usize,
}

impl QueueLayout {
    /// Lays out a queue with `slots` slots of `slot_bytes` bytes, [`SLOT_HEAD`] of them for the queue itself.
    pub(crate) fn new(slots: usize, slot_bytes: usize) -> Result<Self, ShmError> {
        if !(1..=MAX_SLOTS).contains(&slots) {
            return Err(ShmError::Invalid(format!("a task queue has 1 to {MAX_SLOTS} slots, not {slots}")));
        }
        if !(MIN_SLOT_BYTES..=MAX_SLOT_BYTES).contains(&slot_bytes) {
            return Err(ShmError::Invalid(format!(
                "a slot of a task queue has {MIN_SLOT_BYTES} to {MAX_SLOT_BYTES} bytes, not {slot_bytes}"
            )));
        }
        // Revoked tasks keep their entries until the head has passed them, so there are more of these than slots.
        let entries = (2 * slots).next_power_of_two();
        let queue = (FINISHED + slots.div_ceil(64) * 8).next_multiple_of(PAIR_OF_LINES);
        let first_slot = (queue + entries * 4).next_multiple_of(PAGE);
        // An odd number of lines: with an even one, the first lines of all slots would share a few sets of the caches.
        let stride = (slot_bytes.div_ceil(LINE) | 1) * LINE;
        let size = (first_slot + slots * stride).next_multiple_of(PAGE);
        Ok(Self { slots, slot_bytes, entries, queue, first_slot, stride, size })
    }

    /// The largest payload.
    pub(crate) fn capacity(&self) -> usize {
        self.slot_bytes - SLOT_HEAD
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps() {
        const {
            assert!(
                IDLE_WORKERS + super::super::protocol::idle_workers::words_for(WORKERS) * 8 <= CALLERS
                    && RESULT_WORDS + 8 <= WAKE_WORDS
                    && WORKER_COUNT + 4 <= HEAD
            )
        };
        for slots in [1, 2, 63, 64, 65, 512, 1000, MAX_SLOTS] {
            for slot_bytes in [LINE, 100, 4096, 16384] {
                let layout = QueueLayout::new(slots, slot_bytes).unwrap();
                assert!(layout.entries >= 2 * slots && layout.entries.is_power_of_two());
                assert!(FINISHED + slots.div_ceil(64) * 8 <= layout.queue);
                assert!(layout.queue + layout.entries * 4 <= layout.first_slot);
                assert!(layout.stride >= slot_bytes && layout.stride % (2 * LINE) == LINE);
                assert!(layout.first_slot + slots * layout.stride <= layout.size);
            }
        }
    }

    #[test]
    fn sizes_that_no_queue_can_have_are_refused() {
        for (slots, slot_bytes) in [(0, 4096), (MAX_SLOTS + 1, 4096), (8, 63), (8, (1 << 30) + 1), (usize::MAX, 64)] {
            let error = QueueLayout::new(slots, slot_bytes).unwrap_err().to_string();
            assert!(error.contains("of a task queue") || error.contains("a task queue has"), "{error}");
        }
    }
}

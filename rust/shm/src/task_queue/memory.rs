//! The memory of a queue: the offsets of the protocol's words, and their mapping.
//!
//! Words that several processes write stand two cache lines apart from others: processors fetch lines in pairs.
//!
//! Invariants: the mapping is as long as the layout, which never changes, and the memory is sealed against shrinking.
//! So every offset of the layout can be reached. Words are atomics. Only a slot's owner touches its payload; a process
//! that breaks this spoils bytes, but every length is checked.
#![allow(unsafe_code)]

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use super::protocol::{QueueWords, WaiterRole};
use crate::ShmError;
use crate::memory::{self, Writers};
use crate::memory::{Access, Mapping};
use crate::process;

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

const AT_MAGIC: usize = 0;
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

/// Begins every queue; the last byte is the version of the layout.
const MAGIC: u64 = u64::from_le_bytes(*b"tundish1");

/// A queue in this process's memory.
pub(crate) struct QueueMemory {
    mapping: Mapping,
    layout: QueueLayout,
}

impl QueueMemory {
    /// Creates a queue and its memory, all zero except the words that `open` reads.
    pub(crate) fn create(layout: QueueLayout) -> Result<(Self, OwnedFd), ShmError> {
        let memory = memory::create()?;
        // Pages are allocated at their first use: most slots of most queues are never used.
        rustix::fs::ftruncate(&memory, layout.size as u64)
            .map_err(|errno| ShmError::io("size", format!("a task queue of {} bytes", layout.size), errno))?;
        memory::seal(memory.as_fd(), Writers::All)?;
        let mapped = Self::map(memory.as_fd(), layout)?;
        mapped.wide(SLOTS).store(layout.slots as u64, Ordering::Relaxed);
        mapped.wide(SLOT_BYTES).store(layout.slot_bytes as u64, Ordering::Relaxed);
        mapped.wide(AT_MAGIC).store(MAGIC, Ordering::Release);
        Ok((mapped, memory))
    }

    /// The queue in `memory`, which another process may have made.
    pub(crate) fn open(memory: BorrowedFd<'_>) -> Result<Self, ShmError> {
        let not_a_queue =
            |reason: &str| ShmError::NotASegment { segment: "the task queue".into(), reason: reason.into() };
        let size = memory::status(memory)?.st_size;
        if !memory::keeps_its_length(memory) {
            return Err(not_a_queue("its descriptor is of something else than sealed memory"));
        }
        let smallest = QueueLayout::new(1, MIN_SLOT_BYTES)?;
        if size < smallest.size as i64 {
            return Err(not_a_queue("it is too short"));
        }
        let head = Self::map(memory, smallest)?;
        if head.wide(AT_MAGIC).load(Ordering::Acquire) != MAGIC {
            return Err(not_a_queue("this version of tundish did not make it"));
        }
        let field = |offset| usize::try_from(head.wide(offset).load(Ordering::Relaxed)).unwrap_or(usize::MAX);
        let layout = QueueLayout::new(field(SLOTS), field(SLOT_BYTES))?;
        if layout.size as i64 != size {
            return Err(not_a_queue("its length is not what its first page says"));
        }
        Self::map(memory, layout)
    }

    /// `memory` is at least as long as the layout, and sealed.
    fn map(memory: BorrowedFd<'_>, layout: QueueLayout) -> Result<Self, ShmError> {
        Ok(Self { mapping: Mapping::new(memory, layout.size, Access::Write)?, layout })
    }

    pub(crate) fn layout(&self) -> &QueueLayout {
        &self.layout
    }

    /// The eight bytes at `offset`, which is a multiple of eight and within the layout.
    fn wide(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset + 8 <= self.layout.size);
        // SAFETY: mapped, aligned, and used as an atomic everywhere; the map lives as long as `self`.
        unsafe { AtomicU64::from_ptr(self.mapping.start().add(offset).cast()) }
    }

    /// The four bytes at `offset`, which is a multiple of four and within the layout.
    fn narrow(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset.is_multiple_of(4) && offset + 4 <= self.layout.size);
        // SAFETY: as in `wide`.
        unsafe { AtomicU32::from_ptr(self.mapping.start().add(offset).cast()) }
    }

    fn slot(&self, slot: usize) -> usize {
        debug_assert!(slot < self.layout.slots);
        self.layout.first_slot + slot * self.layout.stride
    }

    fn payload(&self, slot: usize) -> *mut u8 {
        // SAFETY: the slot lies within the map.
        unsafe { self.mapping.start().add(self.slot(slot) + SLOT_HEAD) }
    }
}

impl QueueWords for QueueMemory {
    fn slots(&self) -> usize {
        self.layout.slots
    }

    fn entries(&self) -> u64 {
        self.layout.entries as u64
    }

    fn workers(&self) -> u16 {
        WORKERS
    }

    fn state(&self, slot: usize) -> &AtomicU64 {
        self.wide(self.slot(slot))
    }

    fn entry(&self, position: u64) -> &AtomicU32 {
        self.narrow(self.layout.queue + (position as usize & (self.layout.entries - 1)) * 4)
    }

    fn head(&self) -> &AtomicU64 {
        self.wide(HEAD)
    }

    fn tail(&self) -> &AtomicU64 {
        self.wide(TAIL)
    }

    fn finished(&self, word: usize) -> &AtomicU64 {
        self.wide(FINISHED + word * 8)
    }

    fn idle_workers(&self, number: usize) -> &AtomicU64 {
        self.wide(IDLE_WORKERS + number * 8)
    }

    fn wake_word(&self, worker: u16) -> &AtomicU32 {
        self.narrow(WAKE_WORDS + usize::from(worker) * 4)
    }

    fn worker_count(&self) -> &AtomicU32 {
        self.narrow(WORKER_COUNT)
    }

    fn stopped(&self) -> &AtomicU32 {
        self.narrow(STOPPED)
    }

    fn callers(&self) -> &AtomicU32 {
        self.narrow(CALLERS)
    }

    fn result_word(&self, role: WaiterRole) -> &AtomicU32 {
        self.narrow(RESULT_WORDS + role as usize * 4)
    }

    fn write(&self, slot: usize, kind: u32, payload: &[u8]) {
        let length = payload.len().min(self.layout.capacity());
        self.narrow(self.slot(slot) + KIND).store(kind, Ordering::Relaxed);
        self.narrow(self.slot(slot) + LENGTH).store(length as u32, Ordering::Relaxed);
        // SAFETY: no longer than the slot's room, which is the caller's alone.
        unsafe { core::ptr::copy_nonoverlapping(payload.as_ptr(), self.payload(slot), length) };
    }

    fn read<R>(&self, slot: usize, with: impl FnOnce(u32, &[u8]) -> R) -> R {
        let kind = self.narrow(self.slot(slot) + KIND).load(Ordering::Relaxed);
        let length = self.narrow(self.slot(slot) + LENGTH).load(Ordering::Relaxed) as usize;
        // SAFETY: no longer than the slot's room, which is the caller's alone until it passes the slot on.
        let payload = unsafe { core::slice::from_raw_parts(self.payload(slot), length.min(self.layout.capacity())) };
        with(kind, payload)
    }

    fn sleep(&self, word: &AtomicU32, seen: u32, longest: Option<Duration>) {
        process::sleep(word, seen, longest);
    }

    fn wake_all(&self, word: &AtomicU32) {
        process::wake_all(word);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_overlaps() {
        const {
            assert!(
                IDLE_WORKERS + super::super::protocol::wakeups::words_for(WORKERS) * 8 <= CALLERS
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

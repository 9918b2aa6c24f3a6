//! The memory of a queue, mapped: the words of the protocol at their offsets.
//!
//! Invariants: the mapping is as long as the layout, which never changes, and the memory is sealed against shrinking.
//! So every offset of the layout can be reached. Words are atomics. Only a slot's owner touches its payload; a process
//! that breaks this spoils bytes, but every length is checked.
#![allow(unsafe_code)]

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use super::layout::{self, QueueLayout};
use super::protocol::{QueueWords, WaiterRole};
use crate::ShmError;
use crate::memory::mapping::{Access, Mapping};
use crate::memory::memory_file::{self, Writers};
use crate::process::futex;

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
        let memory = memory_file::create()?;
        // Pages are allocated at their first use: most slots of most queues are never used.
        rustix::fs::ftruncate(&memory, layout.size as u64)
            .map_err(|errno| ShmError::io("size", format!("a task queue of {} bytes", layout.size), errno))?;
        memory_file::seal(memory.as_fd(), Writers::All)?;
        let mapped = Self::map(memory.as_fd(), layout)?;
        mapped.wide(layout::SLOTS).store(layout.slots as u64, Ordering::Relaxed);
        mapped.wide(layout::SLOT_BYTES).store(layout.slot_bytes as u64, Ordering::Relaxed);
        mapped.wide(layout::MAGIC).store(MAGIC, Ordering::Release);
        Ok((mapped, memory))
    }

    /// The queue in `memory`, which another process may have made.
    pub(crate) fn open(memory: BorrowedFd<'_>) -> Result<Self, ShmError> {
        let not_a_queue =
            |reason: &str| ShmError::NotASegment { segment: "the task queue".into(), reason: reason.into() };
        let size = memory_file::status(memory)?.st_size;
        if !memory_file::keeps_its_length(memory) {
            return Err(not_a_queue("its descriptor is of something else than sealed memory"));
        }
        let smallest = QueueLayout::new(1, layout::MIN_SLOT_BYTES)?;
        if size < smallest.size as i64 {
            return Err(not_a_queue("it is too short"));
        }
        let head = Self::map(memory, smallest)?;
        if head.wide(layout::MAGIC).load(Ordering::Acquire) != MAGIC {
            return Err(not_a_queue("this version of tundish did not make it"));
        }
        let field = |offset| usize::try_from(head.wide(offset).load(Ordering::Relaxed)).unwrap_or(usize::MAX);
        let layout = QueueLayout::new(field(layout::SLOTS), field(layout::SLOT_BYTES))?;
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
        unsafe { self.mapping.start().add(self.slot(slot) + layout::SLOT_HEAD) }
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
        layout::WORKERS
    }

    fn state(&self, slot: usize) -> &AtomicU64 {
        self.wide(self.slot(slot))
    }

    fn entry(&self, position: u64) -> &AtomicU32 {
        self.narrow(self.layout.queue + (position as usize & (self.layout.entries - 1)) * 4)
    }

    fn head(&self) -> &AtomicU64 {
        self.wide(layout::HEAD)
    }

    fn tail(&self) -> &AtomicU64 {
        self.wide(layout::TAIL)
    }

    fn finished(&self, word: usize) -> &AtomicU64 {
        self.wide(layout::FINISHED + word * 8)
    }

    fn idle_workers(&self, number: usize) -> &AtomicU64 {
        self.wide(layout::IDLE_WORKERS + number * 8)
    }

    fn wake_word(&self, worker: u16) -> &AtomicU32 {
        self.narrow(layout::WAKE_WORDS + usize::from(worker) * 4)
    }

    fn worker_count(&self) -> &AtomicU32 {
        self.narrow(layout::WORKER_COUNT)
    }

    fn stopped(&self) -> &AtomicU32 {
        self.narrow(layout::STOPPED)
    }

    fn callers(&self) -> &AtomicU32 {
        self.narrow(layout::CALLERS)
    }

    fn result_word(&self, role: WaiterRole) -> &AtomicU32 {
        self.narrow(layout::RESULT_WORDS + role as usize * 4)
    }

    fn write(&self, slot: usize, kind: u32, payload: &[u8]) {
        let length = payload.len().min(self.layout.capacity());
        self.narrow(self.slot(slot) + layout::KIND).store(kind, Ordering::Relaxed);
        self.narrow(self.slot(slot) + layout::LENGTH).store(length as u32, Ordering::Relaxed);
        // SAFETY: no longer than the slot's room, which is the caller's alone.
        unsafe { core::ptr::copy_nonoverlapping(payload.as_ptr(), self.payload(slot), length) };
    }

    fn read<R>(&self, slot: usize, with: impl FnOnce(u32, &[u8]) -> R) -> R {
        let kind = self.narrow(self.slot(slot) + layout::KIND).load(Ordering::Relaxed);
        let length = self.narrow(self.slot(slot) + layout::LENGTH).load(Ordering::Relaxed) as usize;
        // SAFETY: no longer than the slot's room, which is the caller's alone until it passes the slot on.
        let payload = unsafe { core::slice::from_raw_parts(self.payload(slot), length.min(self.layout.capacity())) };
        with(kind, payload)
    }

    fn sleep(&self, word: &AtomicU32, seen: u32, longest: Option<Duration>) {
        futex::sleep(word, seen, longest);
    }

    fn wake_all(&self, word: &AtomicU32) {
        futex::wake_all(word);
    }
}

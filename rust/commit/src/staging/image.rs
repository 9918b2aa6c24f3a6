//! One file in memory.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::arena::{Arena, capacity_of};
use super::memory;

/// What a thread populates at a time: some ten milliseconds.
const POPULATED_AT_ONCE: usize = 64 << 20;

/// More threads are of no use: the kernel's lock of the address space, and memory itself, are the limit.
const MOST_THREADS: usize = 16;

/// `size` bytes of memory that begin at a page, laid out as a file will be on the disk.
///
/// What they hold at first is not defined: zeros, or what an earlier image held. The memory goes back to the arena when
/// the image is dropped; writers keep a reference until its bytes are on the disk. In a child made by `fork` it
/// reads as zeros.
#[derive(Debug)]
pub struct FileImage {
    start: NonNull<u8>,
    size: usize,
    capacity: usize,
    arena: &'static Arena,
}

// SAFETY: an image is a range of memory that nothing else owns; its bytes are reached only through the pointer, whose
// users answer for what they do at once.
unsafe impl Send for FileImage {}
// SAFETY: as above.
unsafe impl Sync for FileImage {}

/// The system has no room for an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot allocate {size} bytes of staging memory; save less at once, lower the staging limit, or give the process \
     more memory"
)]
pub struct OutOfMemory {
    /// The bytes that were asked for.
    pub size: usize,
}

impl FileImage {
    /// An image of `size` bytes, which may be none.
    ///
    /// # Errors
    /// [`OutOfMemory`] where the address space or the limits of the process have no room. A system that promises
    /// more than it has is found out later, by the process that it ends.
    pub fn new(size: usize) -> Result<Self, OutOfMemory> {
        Self::in_arena(Arena::of_process(), size)
    }

    pub(super) fn in_arena(arena: &'static Arena, size: usize) -> Result<Self, OutOfMemory> {
        // A slice is at most that long.
        let capacity = capacity_of(size).filter(|&capacity| isize::try_from(capacity).is_ok());
        let taken = capacity.and_then(|capacity| Some((arena.take(capacity)?, capacity)));
        let (start, capacity) = taken.ok_or(OutOfMemory { size })?;
        Ok(FileImage { start, size, capacity, arena })
    }

    /// How many bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The first byte; a multiple of the page size unless there is none. Valid for reads and writes of
    /// [`size`](FileImage::size) bytes as long as the image lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Has all pages there, on as many threads as there are processors, up to 16; no byte changes. For who would else
    /// find them missing one by one on a single thread, as a device driver does that pins them.
    pub fn populate(&self) {
        let next = AtomicUsize::new(0);
        let work = || {
            loop {
                let start = next.fetch_add(POPULATED_AT_ONCE, Ordering::Relaxed);
                if start >= self.capacity {
                    return;
                }
                // SAFETY: within the image.
                let begin = unsafe { self.start.add(start) };
                memory::populate(begin, POPULATED_AT_ONCE.min(self.capacity - start));
            }
        };
        let available = thread::available_parallelism().map_or(1, usize::from);
        let threads = self.capacity.div_ceil(POPULATED_AT_ONCE).min(available).min(MOST_THREADS);
        thread::scope(|scope| {
            for _ in 1..threads {
                // Where none can be started the others do its part.
                let _ = thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
    }

    /// The bytes from `start` on, `length` of them.
    ///
    /// The memory is shared with whoever fills it. Who changes bytes that are being written gets a file of old and new
    /// ones and a checksum that may fit neither, which reading the file again finds; nothing else can come of it.
    ///
    /// # Panics
    /// When they do not lie within the image.
    pub(crate) fn bytes(&self, start: usize, length: usize) -> &[u8] {
        let end = start.checked_add(length);
        assert!(end.is_some_and(|end| end <= self.size), "bytes {start} + {length} of an image of {}", self.size);
        // SAFETY: the range is mapped, checked just now to lie within the image, and every byte of it has a value
        // since the kernel zeroed it.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(start), length) }
    }
}

impl Drop for FileImage {
    fn drop(&mut self) {
        // SAFETY: taken from this arena, and dropped once.
        unsafe { self.arena.give_back(self.start, self.capacity) };
    }
}

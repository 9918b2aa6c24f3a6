//! [`FileImage`], the memory of one file.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::arena::{Arena, capacity_of};
use super::mapped_memory;

/// Bytes that a thread populates at a time: some ten milliseconds.
const POPULATED_AT_ONCE: usize = 64 << 20;

/// More threads do not help: the kernel's lock of the address space, and memory itself, are the limit.
const MAX_THREADS: usize = 16;

/// `size` bytes of page-aligned memory, laid out as a file on the disk.
///
/// The initial bytes are undefined: zeros, or those of an earlier image. Dropping the image returns its memory to the
/// arena; writers keep a reference until the bytes are on the disk. In a child made by `fork` it reads as zeros.
#[derive(Debug)]
pub struct FileImage {
    start: NonNull<u8>,
    size: usize,
    capacity: usize,
    arena: &'static Arena,
}

// SAFETY: nothing else owns the memory of an image. Its bytes are reached only through the pointer, whose users
// coordinate their accesses.
unsafe impl Send for FileImage {}
// SAFETY: as above.
unsafe impl Sync for FileImage {}

/// The system has no memory for an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot allocate {size} bytes of staging memory; save less at once, lower the staging limit, or give the process \
     more memory"
)]
pub struct OutOfMemory {
    /// The requested bytes.
    pub size: usize,
}

impl FileImage {
    /// An image of `size` bytes, which may be 0.
    ///
    /// # Errors
    /// [`OutOfMemory`] where the address space or the limits of the process have no room.
    pub fn new(size: usize) -> Result<Self, OutOfMemory> {
        Self::in_arena(Arena::of_process(), size)
    }

    pub(super) fn in_arena(arena: &'static Arena, size: usize) -> Result<Self, OutOfMemory> {
        // This is the maximal length of a slice.
        let capacity = capacity_of(size).filter(|&capacity| isize::try_from(capacity).is_ok());
        let taken = capacity.and_then(|capacity| Some((arena.take(capacity)?, capacity)));
        let (start, capacity) = taken.ok_or(OutOfMemory { size })?;
        Ok(FileImage { start, size, capacity, arena })
    }

    /// The size in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The first byte, page-aligned unless the size is 0. Valid for reads and writes of [`size`](FileImage::size) bytes
    /// as long as the image lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Allocates all pages on as many threads as there are processors, up to 16; changes no byte. Call it before a
    /// device driver pins the memory, which would fault the pages one by one on a single thread.
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
                mapped_memory::populate(begin, POPULATED_AT_ONCE.min(self.capacity - start));
            }
        };
        let available = thread::available_parallelism().map_or(1, usize::from);
        let threads = self.capacity.div_ceil(POPULATED_AT_ONCE).min(available).min(MAX_THREADS);
        thread::scope(|scope| {
            for _ in 1..threads {
                // If a thread cannot be started, the others do its part.
                let _ = thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
    }

    /// The bytes from `start` on, `length` of them.
    ///
    /// A caller that changes bytes while they are written gets a file of old and new bytes and a checksum that may fit
    /// neither. Verifying the file finds that; memory safety is not affected.
    ///
    /// # Panics
    /// When the range is not within the image.
    pub(crate) fn bytes(&self, start: usize, length: usize) -> &[u8] {
        let end = start.checked_add(length);
        assert!(end.is_some_and(|end| end <= self.size), "bytes {start} + {length} of an image of {}", self.size);
        // SAFETY: the range is mapped and lies within the image, and the kernel initialized every byte with zero.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().add(start), length) }
    }
}

impl Drop for FileImage {
    fn drop(&mut self) {
        // SAFETY: taken from this arena, and dropped once.
        unsafe { self.arena.give_back(self.start, self.capacity) };
    }
}

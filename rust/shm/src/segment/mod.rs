//! A segment, as its owner has it: the file, and the mapping through which the owner writes.
//!
//! Invariants: every page is reserved. The header is written and the length is sealed before any other process knows
//! the segment. Its generation grows with each use, under the exclusive lock, which no process gets while a lease
//! lives.
#![allow(unsafe_code)]

pub mod attachment;
pub(crate) mod header;

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process;

use rustix::fs::OFlags;
use rustix::io::Errno;

use self::attachment::Lease;
use self::attachment::PrivateMapping;
use self::header::{LAYOUT_ROOM, SegmentHeader};
use crate::error::ShmError;
use crate::memory::{self, CheckCancelled, DATA_START, Writers};
use crate::memory::{Access, Mapping};
use crate::memory_limits;

/// Bytes that are copied between two calls of `check_cancelled`: some milliseconds.
const STRIDE: usize = 32 << 20;

/// The address of a segment, for other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentAddress {
    /// Id of a process that has it open.
    pub process: u32,
    /// Its descriptor there.
    pub descriptor: i32,
    /// Random number of the segment.
    pub identity: u64,
    /// Number of the use of the segment.
    pub generation: u64,
}

/// Shared memory of this process.
#[derive(Debug)]
pub struct Segment {
    map: Mapping,
    file: OwnedFd,
    identity: u64,
    generation: u64,
    writers: Writers,
    /// Bytes of the file, from its first on, that the kernel has cleared already: all that lies on huge pages.
    cleared: usize,
    is_sealed: bool,
    /// False for a named segment: the kernel seals only memory without a name.
    can_be_sealed: bool,
    /// Bytes of the mapping, from its first on, whose page tables are filled.
    populated: usize,
    /// Whether a receiver may still open it.
    is_sent: bool,
    process: u32,
}

impl Segment {
    /// Creates a segment without a name for at least `len` bytes of data, all zeros.
    ///
    /// # Errors
    /// [`ShmError::NoHeadroom`] if too little memory is left, [`ShmError::Io`] if the kernel refuses.
    pub(crate) fn create(len: usize, writers: Writers, check_cancelled: CheckCancelled<'_>) -> Result<Self, ShmError> {
        let size = size_for(len)?.next_multiple_of(rustix::param::page_size());
        memory_limits::check(size as u64)?;
        let file = memory::create()?;
        let cleared = memory::reserve(file.as_fd(), size, writers, check_cancelled)?;
        let mut segment = Self::over(file, size, writers)?;
        segment.cleared = cleared;
        Ok(segment)
    }

    /// Creates a segment in `file`, which is to get a name. All `size` bytes, in whole pages, are reserved; the first
    /// `cleared` bytes are cleared.
    ///
    /// # Errors
    /// [`ShmError::Io`] if it cannot be mapped.
    pub(crate) fn in_file(file: OwnedFd, size: usize, cleared: usize) -> Result<Self, ShmError> {
        let mut segment = Self::over(file, size, Writers::Present)?;
        segment.can_be_sealed = false;
        segment.cleared = cleared;
        Ok(segment)
    }

    /// A new segment in `file`, of `size` bytes in whole pages, all of them reserved.
    ///
    /// # Errors
    /// [`ShmError::Io`] where it cannot be mapped.
    fn over(file: OwnedFd, size: usize, writers: Writers) -> Result<Self, ShmError> {
        let map = Mapping::new(&file, size, Access::Write)?;
        Ok(Segment {
            map,
            file,
            identity: header::random_identity("a segment")?,
            generation: 1,
            writers,
            cleared: 0,
            is_sealed: false,
            can_be_sealed: true,
            populated: 0,
            is_sent: false,
            process: process::id(),
        })
    }

    /// Bytes of memory, the header's included.
    pub fn size(&self) -> usize {
        self.map.len()
    }

    /// The most bytes of data.
    pub fn capacity(&self) -> usize {
        self.map.len() - DATA_START
    }

    /// The first byte of data; valid for reads and writes of [`capacity`](Segment::capacity) bytes as long as the
    /// segment lives.
    pub fn data(&self) -> *mut u8 {
        self.map.start().wrapping_add(DATA_START)
    }

    /// Whether it was published before, so that its pages are not fresh.
    pub fn is_used(&self) -> bool {
        self.is_sealed
    }

    /// The process that made it; a child that inherited it is not.
    pub(crate) fn is_own(&self) -> bool {
        self.process == process::id()
    }

    /// Its file, open for reading and writing.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The address for other processes.
    pub fn address(&self) -> SegmentAddress {
        SegmentAddress {
            process: self.process,
            descriptor: self.file.as_raw_fd(),
            identity: self.identity,
            generation: self.generation,
        }
    }

    /// Copies `len` bytes of data into the segment, from its first on.
    ///
    /// Into fresh small pages they are written as into a file: the kernel then does not clear them first, and no page
    /// is found by a fault.
    ///
    /// # Errors
    /// [`ShmError::Io`] if the kernel cannot read the source, and the error of `check_cancelled`.
    ///
    /// # Safety
    /// `source` can be read for `len` bytes until this returns. If they change meanwhile, the segment gets a mixture.
    ///
    /// # Panics
    /// When the segment has no room for them.
    pub unsafe fn fill(
        &mut self,
        source: *const u8,
        len: usize,
        check_cancelled: CheckCancelled<'_>,
    ) -> Result<(), ShmError> {
        // SAFETY: the caller's promise.
        unsafe { self.fill_at(0, source, len, check_cancelled) }
    }

    /// As [`fill`](Segment::fill), from byte `at` of the data on.
    ///
    /// # Errors
    /// As of `fill`.
    ///
    /// # Safety
    /// As of `fill`.
    ///
    /// # Panics
    /// As of `fill`.
    pub unsafe fn fill_at(
        &mut self,
        at: usize,
        source: *const u8,
        len: usize,
        check_cancelled: CheckCancelled<'_>,
    ) -> Result<(), ShmError> {
        let fits = at.checked_add(len).is_some_and(|end| end <= self.capacity());
        assert!(fits, "{len} bytes from {at} on for a segment of {}", self.capacity());
        // A page that is fresh is cleared when it is first found, unless it is written as a file's.
        let cleared = if self.is_sealed { usize::MAX } else { self.cleared };
        let mut start = 0;
        while start < len {
            let place = DATA_START + at + start;
            let is_fresh = place >= cleared;
            let stride = STRIDE.min(len - start).min(if is_fresh { usize::MAX } else { cleared - place });
            // SAFETY: within the source, by the caller's promise, and within the segment.
            start += unsafe {
                let from = source.add(start);
                if is_fresh { self.write_at(from, stride, at + start)? } else { self.copy_to(from, stride, at + start) }
            };
            check_cancelled()?;
        }
        Ok(())
    }

    /// # Safety
    /// As of [`fill`](Segment::fill), with `len` bytes at `start`.
    unsafe fn write_at(&self, source: *const u8, len: usize, start: usize) -> Result<usize, ShmError> {
        let offset = (DATA_START + start) as libc::off_t;
        // SAFETY: the kernel reads the source, and says so where it cannot.
        let written = unsafe { libc::pwrite(self.file.as_raw_fd(), source.cast(), len, offset) };
        match usize::try_from(written) {
            Ok(written) if written > 0 => Ok(written),
            _ => match Errno::from_io_error(&std::io::Error::last_os_error()) {
                Some(Errno::INTR) => Ok(0),
                errno => Err(ShmError::io("write to", "a segment", errno.unwrap_or(Errno::IO))),
            },
        }
    }

    /// # Safety
    /// As of [`fill`](Segment::fill), with `len` bytes at `start`.
    unsafe fn copy_to(&mut self, source: *const u8, len: usize, start: usize) -> usize {
        self.populate(start + len);
        // SAFETY: both ranges are the caller's promise. They do not overlap: a process that reads a segment has a
        // lease, and then its owner does not fill it.
        unsafe { std::ptr::copy(source, self.data().add(start), len) };
        len
    }

    /// Zeros the first `len` bytes of data, which an earlier use may have left.
    ///
    /// # Errors
    /// The error of `check_cancelled`.
    ///
    /// # Panics
    /// When the segment has no room for them.
    pub fn clear(&mut self, len: usize, check_cancelled: CheckCancelled<'_>) -> Result<(), ShmError> {
        assert!(len <= self.capacity(), "{len} bytes of a segment of {}", self.capacity());
        // An earlier use may have written to it and ended before it was published.
        if self.generation == 1 {
            return Ok(());
        }
        for start in (0..len).step_by(STRIDE) {
            let stride = STRIDE.min(len - start);
            self.populate(start + stride);
            // SAFETY: within the segment, which no other process has.
            unsafe { self.data().add(start).write_bytes(0, stride) };
            check_cancelled()?;
        }
        Ok(())
    }

    /// Writes the header for `len` bytes of data. From here on other processes may attach.
    ///
    /// # Errors
    /// [`ShmError::Invalid`] where the description is too long, [`ShmError::Io`] where the kernel cannot seal.
    pub fn publish(&mut self, len: usize, layout: &[u8]) -> Result<(), ShmError> {
        if layout.len() > LAYOUT_ROOM {
            let long = layout.len();
            return Err(ShmError::Invalid(format!(
                "the description of the array takes {long} bytes, and {LAYOUT_ROOM} are set aside for it; share its \
                 fields one by one"
            )));
        }
        let header = SegmentHeader {
            identity: self.identity,
            generation: self.generation,
            data_len: len,
            maker: process::id(),
            layout: layout.to_vec(),
        };
        header.write(&self.map);
        if !self.is_sealed && self.can_be_sealed {
            self.seal()?;
        }
        if self.writers == Writers::Present && self.cleared > 0 && self.map.drop_pages(0..self.cleared) {
            // With both mappings, this one and a reader's, the data would count twice in this process's memory.
            self.populated = 0;
        }
        Ok(())
    }

    /// Seals the length. From here on the pages count as used, and are written in place.
    ///
    /// # Errors
    /// [`ShmError::Io`] where the kernel cannot seal.
    pub(crate) fn seal(&mut self) -> Result<(), ShmError> {
        memory::seal(self.file.as_fd(), self.writers)?;
        self.is_sealed = true;
        Ok(())
    }

    /// A lease for a view of this process.
    ///
    /// # Errors
    /// [`ShmError::Io`] where the process may open or map no more.
    pub fn lease(&self) -> Result<Lease, ShmError> {
        // Only the owner takes the exclusive lock, and not while the segment is in use.
        Lease::take(self.file.as_fd())?.ok_or_else(|| ShmError::Gone {
            segment: "a segment".to_owned(),
            reason: "another process has taken its lock".to_owned(),
        })
    }

    /// Bytes of data that this process alone may write to, in whole pages, with a lease.
    ///
    /// # Errors
    /// [`ShmError::Io`] where the process may open or map no more.
    pub fn private(&self, bytes: Range<usize>) -> Result<PrivateMapping, ShmError> {
        let own = memory::reopen(self.file.as_fd(), OFlags::RDONLY)?;
        memory::lock_shared(own.as_fd())?;
        PrivateMapping::new(own.as_fd(), self.map.len(), bytes, None)
    }

    /// Marks the segment as sent: a receiver will open it.
    pub(crate) fn mark_sent(&mut self) {
        self.is_sent = true;
    }

    /// Returns whether the buffer of this generation was received.
    pub(crate) fn is_acknowledged(&self) -> bool {
        header::acknowledged(&self.map) >= self.generation
    }

    /// Invalidates all handles of the segment; `false` if a view of it lives in any process.
    pub(crate) fn reclaim(&mut self) -> bool {
        self.invalidate_handles() && memory::unlock(self.file.as_fd()).is_ok()
    }

    /// As [`reclaim`](Self::reclaim), and keeps the exclusive lock.
    fn invalidate_handles(&mut self) -> bool {
        // On any other answer of the kernel, the segment is not used again.
        if !self.is_own() || !matches!(memory::lock_exclusive(self.file.as_fd()), Ok(true)) {
            return false;
        }
        self.generation += 1;
        self.is_sent = false;
        header::set_generation(&self.map, self.generation);
        true
    }

    /// Has every page of the first `len` bytes of data mapped, so that writing finds none by a fault.
    pub fn populate(&mut self, len: usize) {
        let end = (DATA_START + len).next_multiple_of(rustix::param::page_size()).min(self.map.len());
        if end > self.populated {
            self.map.populate(self.populated, end - self.populated);
            self.populated = end;
        }
    }
}

/// Bytes of a segment for `len` bytes of data, not yet in whole pages.
///
/// # Errors
/// [`ShmError::Invalid`] where no memory could hold it.
pub(crate) fn size_for(len: usize) -> Result<usize, ShmError> {
    len.checked_add(DATA_START)
        .filter(|&size| isize::try_from(size).is_ok())
        .ok_or_else(|| ShmError::Invalid(format!("a segment of {len} bytes is larger than any memory")))
}

impl Drop for Segment {
    fn drop(&mut self) {
        if self.is_own() {
            let is_sent = self.is_sent;
            // First, so that a receiver that drops its lease before the lock is taken drops the segment too.
            header::retire(&self.map, if is_sent { self.generation } else { 0 });
            // No process has a lease or can get one any more, so none sees that the segment is emptied.
            if self.writers == Writers::All && !is_sent && self.invalidate_handles() {
                memory::empty(self.file.as_fd(), DATA_START, self.map.len());
            }
        }
    }
}

#[cfg(test)]
mod tests;

//! A segment, as its owner has it: the file, and the mapping through which the owner writes.
//!
//! Invariants: every page is reserved. The header is written and the length is sealed before any other process is told
//! of the segment. Its generation grows each time it is used again, under the exclusive lock, which nobody gets while a
//! lease lives.
#![allow(unsafe_code)]

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process;

use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::error::ShmError;
use crate::header::{self, Facts, LAYOUT_ROOM};
use crate::lease::Lease;
use crate::mapping::{Access, Mapping};
use crate::memory_file::{self, DATA_START, GoOn, HUGE_PAGE, Writers};
use crate::memory_limits;
use crate::owner::Owner;
use crate::per_process::PerProcess;
use crate::private_copy::PrivateCopy;

/// Bytes that are copied between two looks at whether to go on: some milliseconds.
const STRIDE: usize = 32 << 20;

static OWNER: PerProcess<Owner> = PerProcess::new(Owner::current);

/// Where a segment is to be found, as a process can tell another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// A process that has it open.
    pub process: u32,
    /// Its descriptor there.
    pub descriptor: i32,
    /// What tells it from any other.
    pub identity: u64,
    /// Which use of it is meant.
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
    is_huge: bool,
    /// Bytes of the file, from its first on, that the kernel has cleared already: all that lies on huge pages.
    cleared: usize,
    is_sealed: bool,
    /// The kernel seals only what has no name.
    can_be_sealed: bool,
    /// Bytes of the mapping, from its first on, whose pages were found.
    populated: usize,
    /// Whether its reader may still be on the way.
    is_sent: bool,
    process: u32,
}

impl Segment {
    /// Memory for at least `len` bytes of data, zeros, without a name; on huge pages where `huge` and the system has
    /// some.
    ///
    /// # Errors
    /// [`ShmError::NoHeadroom`] where it does not fit in what is left, [`ShmError::Io`] where the kernel refuses.
    pub(crate) fn create(len: usize, writers: Writers, huge: bool, go_on: GoOn<'_>) -> Result<Self, ShmError> {
        let size = size_for(len)?;
        memory_limits::check(size as u64)?;
        let (file, size, cleared) = match if huge { Self::on_huge_pages(size, writers, go_on)? } else { None } {
            Some((file, size)) => (file, size, size),
            None => {
                let size = size.next_multiple_of(rustix::param::page_size());
                let file = memory_file::create(false)?;
                let cleared = memory_file::reserve(file.as_fd(), size, writers, go_on)?;
                (file, size, cleared)
            }
        };
        let mut segment = Self::over(file, size, writers)?;
        segment.is_huge = huge;
        segment.cleared = cleared;
        if huge && cleared < size {
            segment.map.advise_huge();
        }
        Ok(segment)
    }

    /// Memory in `file`, which is to get a name: of `size` bytes in whole pages, all of them reserved, and the first
    /// `cleared` bytes cleared.
    ///
    /// # Errors
    /// [`ShmError::Io`] where it cannot be mapped.
    pub(crate) fn in_file(file: OwnedFd, size: usize, cleared: usize, huge: bool) -> Result<Self, ShmError> {
        let mut segment = Self::over(file, size, Writers::Present)?;
        segment.can_be_sealed = false;
        segment.cleared = cleared;
        if huge {
            segment.map.advise_huge();
        }
        Ok(segment)
    }

    /// `None` where none are set aside.
    fn on_huge_pages(size: usize, writers: Writers, go_on: GoOn<'_>) -> Result<Option<(OwnedFd, usize)>, ShmError> {
        let size = size.next_multiple_of(HUGE_PAGE);
        let Ok(file) = memory_file::create(true) else { return Ok(None) };
        match memory_file::reserve(file.as_fd(), size, writers, go_on) {
            Ok(_) => Ok(Some((file, size))),
            Err(ShmError::Io { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A new segment in `file`, of `size` bytes in whole pages, all of them reserved.
    ///
    /// # Errors
    /// [`ShmError::Io`] where it cannot be mapped.
    pub(crate) fn over(file: OwnedFd, size: usize, writers: Writers) -> Result<Self, ShmError> {
        let map = Mapping::new(&file, size, Access::Write)?;
        Ok(Segment {
            map,
            file,
            identity: header::draw_identity("a segment")?,
            generation: 1,
            writers,
            is_huge: false,
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

    /// Bytes of data that it has room for.
    pub fn capacity(&self) -> usize {
        self.map.len() - DATA_START
    }

    /// The first byte of data; valid for reads and writes of [`capacity`](Segment::capacity) bytes as long as the
    /// segment lives.
    pub fn data(&self) -> *mut u8 {
        self.map.start().wrapping_add(DATA_START)
    }

    /// Whether huge pages were asked for.
    pub(crate) fn is_huge(&self) -> bool {
        self.is_huge
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

    /// Where others find it.
    pub fn address(&self) -> Address {
        Address {
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
    /// [`ShmError::Io`] where the kernel cannot read the source, and what `go_on` says.
    ///
    /// # Safety
    /// `source` can be read for `len` bytes until this returns. Who changes them meanwhile gets some of the old and
    /// some of the new.
    ///
    /// # Panics
    /// When the segment has no room for them.
    pub unsafe fn fill(&mut self, source: *const u8, len: usize, go_on: GoOn<'_>) -> Result<(), ShmError> {
        // SAFETY: the caller's promise.
        unsafe { self.fill_at(0, source, len, go_on) }
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
        go_on: GoOn<'_>,
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
            go_on()?;
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
        // SAFETY: both ranges are the caller's promise, and a segment's memory is nobody's source: anyone who reads it has
        // a lease, and then its owner does not use it again.
        unsafe { std::ptr::copy(source, self.data().add(start), len) };
        len
    }

    /// Zeros the first `len` bytes of data, which an earlier use may have left.
    ///
    /// # Errors
    /// What `go_on` says.
    ///
    /// # Panics
    /// When the segment has no room for them.
    pub fn clear(&mut self, len: usize, go_on: GoOn<'_>) -> Result<(), ShmError> {
        assert!(len <= self.capacity(), "{len} bytes of a segment of {}", self.capacity());
        // An earlier use may have ended before it was published, with something written.
        if self.generation == 1 {
            return Ok(());
        }
        for start in (0..len).step_by(STRIDE) {
            let stride = STRIDE.min(len - start);
            self.populate(start + stride);
            // SAFETY: within the segment, which nobody else has.
            unsafe { self.data().add(start).write_bytes(0, stride) };
            go_on()?;
        }
        Ok(())
    }

    /// Says what lies in the segment, `len` bytes of it. From here on others may be told of it.
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
        let facts = Facts {
            identity: self.identity,
            generation: self.generation,
            data_len: len,
            owner: *OWNER.get(),
            layout: layout.to_vec(),
        };
        facts.write(&self.map);
        if !self.is_sealed && self.can_be_sealed {
            self.seal()?;
        }
        if self.writers == Writers::Present && self.cleared > 0 && self.map.drop_pages(0..self.cleared) {
            // Who looks at what this process has in memory would see the data twice: here, and where it is read.
            self.populated = 0;
        }
        Ok(())
    }

    /// From here on it keeps its length. Its pages count as used: what is written to it is written in place.
    ///
    /// # Errors
    /// [`ShmError::Io`] where the kernel cannot seal.
    pub(crate) fn seal(&mut self) -> Result<(), ShmError> {
        memory_file::seal(self.file.as_fd(), self.writers)?;
        self.is_sealed = true;
        Ok(())
    }

    /// A lease for a view of this process.
    ///
    /// # Errors
    /// [`ShmError::Io`] where the process may open or map no more.
    pub fn lease(&self) -> Result<Lease, ShmError> {
        // The owner alone takes the other lock, and does not while it has the segment.
        Lease::take(self.file.as_fd(), memory_file::page_of(self.file.as_fd()))?.ok_or_else(|| ShmError::Gone {
            segment: "a segment".to_owned(),
            reason: "another process has taken its lock".to_owned(),
        })
    }

    /// Bytes of data that this process alone may write to, in whole pages, with a lease.
    ///
    /// # Errors
    /// [`ShmError::Io`] where the process may open or map no more.
    pub fn private(&self, bytes: Range<usize>) -> Result<PrivateCopy, ShmError> {
        let own = memory_file::reopen(self.file.as_fd(), OFlags::RDONLY)?;
        memory_file::lock_shared(own.as_fd())?;
        PrivateCopy::new(own.as_fd(), self.map.len(), bytes, None)
    }

    /// Somebody was told where it is, and will come for it.
    pub(crate) fn send(&mut self) {
        self.is_sent = true;
    }

    /// Whether the reader of this generation came.
    pub(crate) fn is_acknowledged(&self) -> bool {
        header::acknowledged(&self.map) >= self.generation
    }

    /// Makes the segment one that nobody knows; `false` when a view of it lives in some process.
    pub(crate) fn reclaim(&mut self) -> bool {
        self.take_alone() && memory_file::unlock(self.file.as_fd()).is_ok()
    }

    /// As [`reclaim`](Self::reclaim), and keeps the exclusive lock.
    fn take_alone(&mut self) -> bool {
        // Whatever the kernel says instead, the segment is not used again.
        if !self.is_own() || !matches!(memory_file::lock_exclusive(self.file.as_fd()), Ok(true)) {
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
            // First: who gives his lease up before it is looked for then lets go of what he would keep.
            header::retire(&self.map, if is_sent { self.generation } else { 0 });
            // Where nobody has a lease nobody gets one any more, nor sees that it is emptied.
            if self.writers == Writers::All && !is_sent && self.take_alone() {
                memory_file::empty(self.file.as_fd(), DATA_START, self.map.len());
            }
        }
    }
}

#[cfg(test)]
mod tests;

//! Maps a file's bytes into this process.
//!
//! Invariants: a mapping stays where it is, and readable, as long as it lives, in a child made by `fork` too. The open
//! file description that it was made from lives as long, and with it the lock on that.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use rustix::fd::AsFd;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::error::ShmError;
use crate::memory::memory_file::HUGE_PAGE;

/// Bytes whose page tables are filled at once, whole pages: meanwhile no other thread of the process maps or unmaps
/// anything, some hundred microseconds.
const STRIDE: usize = 4 << 20;

/// The access through a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Shared, to be read.
    Read,
    /// Shared, to be written for all processes.
    Write,
    /// Private: a write copies the page, and no other process sees it.
    Private,
}

/// A range of memory that a file is mapped to.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is a range of memory whose users answer for what they do at once; unmapping takes no thread.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// The first `len` bytes of `file`, at least one, in whole pages of `file`.
    ///
    /// # Errors
    /// [`ShmError::Io`] where the address space or the file's seals do not allow it.
    pub fn new(file: impl AsFd, len: usize, access: Access) -> Result<Self, ShmError> {
        Self::of_part(file, 0, len, access)
    }

    /// `len` bytes of `file`, at least one, in whole pages, from byte `offset` on. Where `len` has room for huge pages,
    /// `offset` is a multiple of them.
    ///
    /// # Errors
    /// As of [`new`](Mapping::new).
    pub fn of_part(file: impl AsFd, offset: u64, len: usize, access: Access) -> Result<Self, ShmError> {
        let (protection, flags) = match access {
            Access::Read => (ProtFlags::READ, MapFlags::SHARED),
            Access::Write => (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED),
            // Without NORESERVE the kernel would count all of it as committed, though little is ever copied.
            Access::Private => (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE),
        };
        let start = match ReservedAddresses::for_huge_pages(len) {
            Some(reserved) => {
                // SAFETY: over a range of addresses that `reserved` has set aside.
                let start = unsafe { mmap(reserved.start(), len, protection, flags | MapFlags::FIXED, &file, offset) };
                if start.is_ok() {
                    reserved.trim_to(len);
                }
                start
            }
            // SAFETY: a new mapping at a place that the kernel chooses.
            None => unsafe { mmap(ptr::null_mut(), len, protection, flags, &file, offset) },
        };
        Self::at(start, len)
    }

    fn at(start: rustix::io::Result<*mut c_void>, len: usize) -> Result<Self, ShmError> {
        let start = start.map_err(|errno| ShmError::io("map", format!("a segment of {len} bytes"), errno))?;
        let start = NonNull::new(start.cast::<u8>());
        start
            .map(|start| Mapping { start, len })
            .ok_or_else(|| ShmError::Invalid("the system mapped a segment at address 0".to_owned()))
    }

    /// The first byte.
    pub fn start(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The word at `offset`.
    ///
    /// # Panics
    /// When it does not lie within, or is not aligned.
    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.len, "word {offset} of {}", self.len);
        // SAFETY: within the range, aligned, and every other access to it, in whichever process, is atomic too.
        unsafe { &*self.start.as_ptr().add(offset).cast::<AtomicU64>() }
    }

    /// Fills the page tables of a part, whole pages, at a fraction of the cost of as many page faults. Kernels before
    /// Linux 5.14 do not: there each page costs a fault.
    pub(crate) fn populate(&self, start: usize, len: usize) {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len), "{start} + {len} of {}", self.len);
        for from in (start..start + len).step_by(STRIDE) {
            let some = STRIDE.min(start + len - from);
            // SAFETY: within the range; no byte changes.
            let _ = unsafe { madvise(self.start.as_ptr().add(from).cast(), some, Advice::LinuxPopulateWrite) };
        }
    }

    /// Puts `bytes`, aligned to huge pages, on huge pages; each already has a page in the file. Returns `false` if the
    /// kernel makes none.
    pub(crate) fn put_on_huge_pages(&self, bytes: Range<usize>) -> bool {
        assert!(bytes.start <= bytes.end && bytes.end <= self.len, "{bytes:?} of {}", self.len);
        // SAFETY: within the range; no byte changes.
        unsafe { libc::madvise(self.start.as_ptr().add(bytes.start).cast(), bytes.len(), libc::MADV_COLLAPSE) == 0 }
    }

    /// Drops this process's pages of `bytes`, whole pages: a private mapping shows the file's bytes again; of a shared
    /// one no byte changes. Returns `false` if the kernel refuses, as with locked memory.
    pub(crate) fn drop_pages(&self, bytes: Range<usize>) -> bool {
        assert!(bytes.start <= bytes.end && bytes.end <= self.len, "{bytes:?} of {}", self.len);
        // SAFETY: within the range, to which the caller, its one user, has no reference.
        unsafe { madvise(self.start.as_ptr().add(bytes.start).cast(), bytes.len(), Advice::LinuxDontNeed) }.is_ok()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and not used any more. It can fail only if splitting a range exceeds the kernel's
        // limit of mappings; the memory then stays mapped and unused.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// A range of addresses set aside for a mapping that starts at a multiple of a huge page.
struct ReservedAddresses {
    all: Mapping,
}

impl ReservedAddresses {
    /// Sets room for `len` bytes aside; `None` if `len` is less than a huge page, or no addresses are left.
    fn for_huge_pages(len: usize) -> Option<Self> {
        if len < HUGE_PAGE {
            return None;
        }
        let all = len.checked_next_multiple_of(rustix::param::page_size())?.checked_add(HUGE_PAGE)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at a place that the kernel chooses.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), all, ProtFlags::empty(), flags) };
        Mapping::at(start, all).ok().map(|all| ReservedAddresses { all })
    }

    fn start(&self) -> *mut c_void {
        let start = self.all.start();
        start.wrapping_add(start.align_offset(HUGE_PAGE)).cast()
    }

    /// Gives back the addresses before and behind the first `len` bytes of the range.
    fn trim_to(self, len: usize) {
        let (first, start) = (self.all.start(), self.start().cast::<u8>());
        let end = start.wrapping_add(len.next_multiple_of(rustix::param::page_size()));
        let behind = first.wrapping_add(self.all.len());
        std::mem::forget(self);
        for (from, to) in [(first, start), (end, behind)] {
            if from < to {
                // SAFETY: of the range, and nothing is mapped there but these bytes.
                let _ = unsafe { munmap(from.cast(), to as usize - from as usize) };
            }
        }
    }
}

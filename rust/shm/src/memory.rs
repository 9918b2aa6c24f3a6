//! The files behind segments: creates, reserves, seals, reopens and locks them, and maps them into this process.
//!
//! Invariants: a mapping stays where it is, and readable, as long as it lives, in a child made by `fork` too. The open
//! file description that it was made from lives as long. A lock is taken on an open file description that was opened
//! for it, and ends with the last reference to that: a descriptor, or a mapping in any process.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{
    FallocateFlags, FlockOperation, MemfdFlags, Mode, OFlags, SealFlags, Stat, fchmod, fcntl_add_seals,
    fcntl_get_seals, memfd_create,
};
use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::error::ShmError;

/// Bytes whose page tables are filled at once, whole pages: meanwhile no other thread of the process maps or unmaps
/// anything, some hundred microseconds.
const POPULATE_STRIDE: usize = 4 << 20;

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
        for from in (start..start + len).step_by(POPULATE_STRIDE) {
            let some = POPULATE_STRIDE.min(start + len - from);
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

/// Offset of a segment's data: behind the page of its header, and thus aligned.
pub const DATA_START: usize = 4096;

/// Bytes that are reserved between two calls of `check_cancelled`: some ten milliseconds.
const STRIDE: usize = 256 << 20;

/// Bytes on huge pages between two calls of `check_cancelled`. More than `STRIDE`: each call interrupts all processors.
const HUGE_STRIDE: usize = 8 * HUGE_PAGE;

/// Microseconds that the small pages in the place of a huge one take, with their tables.
const SMALL_PAGES_MICROS: i64 = 1000;

/// Microseconds to spend on huge pages that take longer than small ones: the kernel may have to move pages first. Time
/// saved on fast huge pages is added.
const MAX_BUDGET_MICROS: i64 = 10_000;

/// The largest budget for memory that is used again and again; the whole process has one.
const MAX_REUSE_BUDGET_MICROS: i64 = 2_000_000;
static REUSE_BUDGET_MICROS: AtomicI64 = AtomicI64::new(MAX_REUSE_BUDGET_MICROS);

/// Bytes of a huge page on x86-64 and arm64, if a small one has 4 KiB.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Called at intervals in long work; an error ends it.
pub type CheckCancelled<'a> = &'a mut dyn FnMut() -> Result<(), ShmError>;

/// The processes that may write to a segment once it is sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writers {
    /// The processes that mapped it for writing before. Such memory is written once, as a rule.
    Present,
    /// All processes that map it for writing. Such memory is used again and again.
    All,
}

/// Creates an empty memory file without a name (a memfd).
///
/// # Errors
/// [`ShmError::Io`] if the process may open no more files.
pub(crate) fn create() -> Result<OwnedFd, ShmError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Kernels before 6.3 do not know the flag, and later ones may insist on it.
    let made = match memfd_create("tundish", flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => memfd_create("tundish", flags),
        made => made,
    };
    let file = made.map_err(|errno| ShmError::io("create", "an anonymous segment", errno))?;
    fchmod(&file, Mode::RUSR | Mode::WUSR)
        .map_err(|errno| ShmError::io("set the mode of", "an anonymous segment", errno))?;
    Ok(file)
}

/// Makes `file` `len` bytes long and reserves every page. Returns the number of bytes, from the first on, that lie on
/// huge pages: these take a quarter of the time, and one page fault for 2 MiB.
///
/// # Errors
/// [`ShmError::Io`] if there is no room, and the error of `check_cancelled`.
pub(crate) fn reserve(
    file: BorrowedFd<'_>,
    len: usize,
    writers: Writers,
    check_cancelled: CheckCancelled<'_>,
) -> Result<usize, ShmError> {
    let on_huge_pages = match writers {
        Writers::Present => {
            reserve_huge(file, len, (&AtomicI64::new(MAX_BUDGET_MICROS), MAX_BUDGET_MICROS), check_cancelled)
        }
        Writers::All => reserve_huge(file, len, (&REUSE_BUDGET_MICROS, MAX_REUSE_BUDGET_MICROS), check_cancelled),
    }?;
    reserve_in_strides(on_huge_pages..len, |start, stride| reserve_part(file, start, stride, len), check_cancelled)?;
    Ok(on_huge_pages)
}

/// Reserves `range` by calls of `reserve_part`. Many kernels undo a call that a signal interrupts, and a frequent timer
/// would interrupt every long call, so the next one is shorter.
fn reserve_in_strides(
    range: Range<usize>,
    mut reserve_part: impl FnMut(usize, usize) -> Result<bool, ShmError>,
    check_cancelled: CheckCancelled<'_>,
) -> Result<(), ShmError> {
    let (mut start, mut most) = (range.start, STRIDE);
    while start < range.end {
        let stride = most.min(range.end - start);
        if reserve_part(start, stride)? {
            start += stride;
        } else {
            most = (stride / 2).next_multiple_of(rustix::param::page_size());
        }
        check_cancelled()?;
    }
    Ok(())
}

/// Returns `false` if a signal interrupted the call, which reserved nothing.
fn reserve_part(file: BorrowedFd<'_>, start: usize, len: usize, whole: usize) -> Result<bool, ShmError> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), start as u64, len as u64) {
        Ok(()) => Ok(true),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(ShmError::io("reserve", format!("a segment of {whole} bytes"), errno)),
    }
}

/// Reserves as much, from the first byte on, as the kernel puts on huge pages (since Linux 6.1). The kernel collapses a
/// range in which one page is there already. `budget` is the time that is left for slow huge pages, and its maximum, in
/// microseconds.
fn reserve_huge(
    file: BorrowedFd<'_>,
    len: usize,
    budget: (&AtomicI64, i64),
    check_cancelled: CheckCancelled<'_>,
) -> Result<usize, ShmError> {
    // A kernel with larger huge pages makes none of a part, and may report success all the same.
    if len < HUGE_PAGE || huge_page_of(rustix::param::page_size()) != HUGE_PAGE {
        return Ok(0);
    }
    rustix::fs::ftruncate(file, len as u64)
        .map_err(|errno| ShmError::io("reserve", format!("a segment of {len} bytes"), errno))?;
    let map = Mapping::new(file, len, Access::Write)?;
    let whole = len / HUGE_PAGE * HUGE_PAGE;
    let mut end = 0;
    while end < whole {
        check_cancelled()?;
        let begun = Instant::now();
        // A single huge page first, to measure the time.
        let stride = if end == 0 { HUGE_PAGE } else { HUGE_STRIDE.min(whole - end) };
        for start in (end..end + stride).step_by(HUGE_PAGE) {
            while !reserve_part(file, start, rustix::param::page_size(), len)? {
                check_cancelled()?;
            }
        }
        if !map.put_on_huge_pages(end..end + stride) {
            break;
        }
        end += stride;
        if !has_budget_after(begun.elapsed(), stride / HUGE_PAGE, budget) {
            break;
        }
    }
    Ok(end)
}

/// Bytes of the huge page that the kernel makes of small ones: one page of page-table entries.
fn huge_page_of(page: usize) -> usize {
    page / size_of::<u64>() * page
}

/// Returns whether to make more huge pages after `pages` that took so long.
fn has_budget_after(took: Duration, pages: usize, (budget, maximum): (&AtomicI64, i64)) -> bool {
    let usual = SMALL_PAGES_MICROS.saturating_mul(i64::try_from(pages).unwrap_or(i64::MAX));
    let earned = usual.saturating_sub(i64::try_from(took.as_micros()).unwrap_or(i64::MAX));
    let count = |left: i64| Some(left.saturating_add(earned).clamp(0, maximum));
    let before = budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count);
    before.is_ok_and(|before| before.saturating_add(earned) > 0)
}

/// Gives the memory of `file` from byte `start` to `end` back to the system, unless a seal forbids it.
pub(crate) fn empty(file: BorrowedFd<'_>, start: usize, end: usize) {
    let _ = retry_on_intr(|| {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(file, flags, start as u64, (end - start) as u64)
    });
}

/// Seals the length of the file for all processes.
///
/// # Errors
/// [`ShmError::Io`] if the kernel does not know such seals (before Linux 5.1).
pub(crate) fn seal(file: BorrowedFd<'_>, writers: Writers) -> Result<(), ShmError> {
    let mut seals = SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    seals.set(SealFlags::FUTURE_WRITE, writers == Writers::Present);
    fcntl_add_seals(file, seals).map_err(|errno| ShmError::io("seal", "an anonymous segment", errno))
}

/// Returns whether the file is sealed against shrinking.
pub(crate) fn keeps_its_length(file: BorrowedFd<'_>) -> bool {
    fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK | SealFlags::SEAL))
}

/// Opens the file of `file` again, with an open file description of its own.
///
/// # Errors
/// [`ShmError::Io`] if the process may open no more files, or has no `/proc`.
pub(crate) fn reopen(file: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd, ShmError> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    open(&path, flags).map_err(|errno| ShmError::io("open", path, errno))
}

fn open(path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    retry_on_intr(|| rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()))
}

/// Opens the file behind a descriptor of a process, with an open file description of its own.
///
/// # Errors
/// [`ShmError::Io`] if that process is gone, has no such descriptor, or hides it.
/// [`ShmError::NotASegment`] if it is not a plain file: to open a pipe could wait for ever.
pub(crate) fn open_of(process: u32, descriptor: i32, flags: OFlags) -> Result<OwnedFd, ShmError> {
    let path = format!("/proc/{process}/fd/{descriptor}");
    let found = open(&path, OFlags::PATH).map_err(|errno| ShmError::io("open", path.as_str(), errno))?;
    if rustix::fs::FileType::from_raw_mode(status(found.as_fd())?.st_mode) != rustix::fs::FileType::RegularFile {
        return Err(ShmError::NotASegment { segment: path, reason: "it is not a plain file".to_owned() });
    }
    reopen(found.as_fd(), flags)
}

/// Takes the shared lock; `false` if the exclusive one is taken.
///
/// # Errors
/// [`ShmError::Io`] if the file system has no locks.
pub(crate) fn lock_shared(file: BorrowedFd<'_>) -> Result<bool, ShmError> {
    lock(file, FlockOperation::NonBlockingLockShared)
}

/// Takes the exclusive lock; `false` if any lock is taken.
///
/// # Errors
/// [`ShmError::Io`] if the file system has no locks.
pub(crate) fn lock_exclusive(file: BorrowedFd<'_>) -> Result<bool, ShmError> {
    lock(file, FlockOperation::NonBlockingLockExclusive)
}

/// Releases the lock of this description, in all processes that share it.
///
/// # Errors
/// [`ShmError::Io`], never seen.
pub(crate) fn unlock(file: BorrowedFd<'_>) -> Result<(), ShmError> {
    lock(file, FlockOperation::Unlock).map(|_| ())
}

fn lock(file: BorrowedFd<'_>, operation: FlockOperation) -> Result<bool, ShmError> {
    match retry_on_intr(|| rustix::fs::flock(file, operation)) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(errno) => Err(ShmError::io("lock", "a segment", errno)),
    }
}

/// Returns the status of `file`.
///
/// # Errors
/// [`ShmError::Io`], never seen.
pub(crate) fn status(file: BorrowedFd<'_>) -> Result<Stat, ShmError> {
    rustix::fs::fstat(file).map_err(|errno| ShmError::io("stat", "a segment", errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_as_large_as_their_tables_are_long() {
        // `hpage_pmd_size` on arm64 with its three sizes of pages, and on x86-64 with the first.
        assert_eq!([4 << 10, 16 << 10, 64 << 10].map(huge_page_of), [2 << 20, 32 << 20, 512 << 20]);
    }

    /// Before Linux 6.10 a signal stops the reservation of huge pages; here one comes for every 2 MiB.
    #[test]
    fn signals_that_come_faster_than_a_stride_do_not_hold_up_a_reservation() {
        let (first, end) = (3 << 20, (3 << 20) + STRIDE + 5 * 4096);
        let (mut calls, mut next) = (0, first);
        let reserve_part = |start: usize, len: usize| {
            calls += 1;
            assert!(calls < 1000 && start == next && len > 0);
            let is_done = len < HUGE_PAGE;
            next += if is_done { len } else { 0 };
            Ok(is_done)
        };
        reserve_in_strides(first..end, reserve_part, &mut || Ok(())).unwrap();
        assert_eq!(next, end);
    }
}

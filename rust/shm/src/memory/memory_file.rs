//! The files behind segments: creates, reserves, seals, reopens and locks them.
//!
//! Invariants: a lock is taken on an open file description that was opened for it. It ends with the last reference to
//! that description: a descriptor, or a mapping in any process.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{
    FallocateFlags, FlockOperation, MemfdFlags, Mode, OFlags, SealFlags, Stat, fchmod, fcntl_add_seals,
    fcntl_get_seals, memfd_create,
};
use rustix::io::{Errno, retry_on_intr};

use crate::error::ShmError;
use crate::memory::mapping::{Access, Mapping};

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

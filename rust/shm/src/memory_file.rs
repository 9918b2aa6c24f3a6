//! The files behind segments: creates, reserves, seals, reopens and locks them.
//!
//! Invariants: a lock is taken on an open file description that was opened for it. It ends with the last reference to
//! that description: a descriptor, or a mapping in any process.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags, Stat};
use rustix::io::{Errno, retry_on_intr};

use crate::error::ShmError;
use crate::mapping::{Access, Mapping};

/// Where a segment's data begin: behind the page of its header. Thereby aligned to 64 bytes and more.
pub const DATA_START: usize = 4096;

/// Bytes that are reserved between two looks at whether to go on: some ten milliseconds.
const STRIDE: usize = 256 << 20;

/// As many on huge pages, which may take longer. For each such call the kernel has all processors put down what they
/// have in hand.
const HUGE_STRIDE: usize = 8 * HUGE_PAGE;

/// Microseconds that small pages in the place of a huge one take, with their tables.
const USUAL: i64 = 1000;

/// Microseconds that are spent on huge pages which take longer: where memory is in pieces the kernel puts some together
/// first, and a virtual machine may have to ask its host for it. What is saved on others is earned.
const MOST_PATIENCE: i64 = 10_000;

/// The same for memory that is used again and again, which is worth it: once a process, unless it finds some that is
/// faster.
const MOST_PATIENCE_FOR_REUSE: i64 = 2_000_000;
static PATIENCE_FOR_REUSE: AtomicI64 = AtomicI64::new(MOST_PATIENCE_FOR_REUSE);

/// Huge pages of a size that x86-64 and arm64 have both, where a small one has 4 KiB.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Called now and then in long work; an error ends it.
pub type GoOn<'a> = &'a mut dyn FnMut() -> Result<(), ShmError>;

/// Who may write to a segment once it is sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writers {
    /// Who has mapped it for writing before: it is written once, as a rule.
    Present,
    /// Anyone who maps it for writing: it is used again and again.
    All,
}

/// Memory without a name, for at least `len` bytes, none of them reserved yet; and the unit of its pages.
///
/// # Errors
/// [`ShmError::Io`] where the process may open no more files, [`ShmError::Unsupported`] where there is no such memory.
#[cfg(target_os = "linux")]
pub(crate) fn create(huge: bool) -> Result<OwnedFd, ShmError> {
    use rustix::fs::{MemfdFlags, fchmod, memfd_create};

    let kind = if huge { MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB } else { MemfdFlags::empty() };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | kind;
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

/// Elsewhere a segment needs a name.
#[cfg(not(target_os = "linux"))]
pub(crate) fn create(_huge: bool) -> Result<OwnedFd, ShmError> {
    Err(ShmError::Unsupported { what: "an anonymous segment" })
}

/// Makes `file` `len` bytes long, with every page there, for these writers. Returns how many bytes, from the first on,
/// lie on huge pages: to make those takes a quarter of the time, their tables next to none, and nobody finds more than
/// one in 2 MiB by a fault.
///
/// # Errors
/// [`ShmError::Io`] where there is no room, and what `go_on` says.
pub(crate) fn reserve(file: BorrowedFd<'_>, len: usize, writers: Writers, go_on: GoOn<'_>) -> Result<usize, ShmError> {
    let on_huge_pages = match writers {
        Writers::Present => reserve_huge(file, len, (&AtomicI64::new(MOST_PATIENCE), MOST_PATIENCE), go_on),
        Writers::All => reserve_huge(file, len, (&PATIENCE_FOR_REUSE, MOST_PATIENCE_FOR_REUSE), go_on),
    }?;
    reserve_in_strides(on_huge_pages..len, |start, stride| reserve_part(file, start, stride, len), go_on)?;
    Ok(on_huge_pages)
}

/// Reserves what lies in the range by calls of `reserve_part`. Many kernels undo a call during which a signal comes: a
/// timer that rings more often than a whole stride takes would let none end, so that the next one is shorter.
fn reserve_in_strides(
    range: Range<usize>,
    mut reserve_part: impl FnMut(usize, usize) -> Result<bool, ShmError>,
    go_on: GoOn<'_>,
) -> Result<(), ShmError> {
    let (mut start, mut most) = (range.start, STRIDE);
    while start < range.end {
        let stride = most.min(range.end - start);
        if reserve_part(start, stride)? {
            start += stride;
        } else {
            most = (stride / 2).next_multiple_of(rustix::param::page_size());
        }
        go_on()?;
    }
    Ok(())
}

/// `false` where a signal ended the call with nothing of it done.
fn reserve_part(file: BorrowedFd<'_>, start: usize, len: usize, whole: usize) -> Result<bool, ShmError> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), start as u64, len as u64) {
        Ok(()) => Ok(true),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(ShmError::io("reserve", format!("a segment of {whole} bytes"), errno)),
    }
}

/// Reserves as much from the first byte on as the kernel puts on huge pages (since Linux 6.1), whatever the system's
/// settings ask of who does not ask for them. It does so where a page is there already. `wait`: what is left of it,
/// and the most that it ever is.
fn reserve_huge(file: BorrowedFd<'_>, len: usize, wait: (&AtomicI64, i64), go_on: GoOn<'_>) -> Result<usize, ShmError> {
    // Where the kernel's own are larger it makes none of a part, and may say that nothing was left to be done.
    if len < HUGE_PAGE || page_of(file) >= HUGE_PAGE || made_of(rustix::param::page_size()) != HUGE_PAGE {
        return Ok(0);
    }
    rustix::fs::ftruncate(file, len as u64)
        .map_err(|errno| ShmError::io("reserve", format!("a segment of {len} bytes"), errno))?;
    let map = Mapping::new(file, len, Access::Write)?;
    let whole = len / HUGE_PAGE * HUGE_PAGE;
    let mut end = 0;
    while end < whole {
        go_on()?;
        let begun = Instant::now();
        // One first, to see how long they take.
        let stride = if end == 0 { HUGE_PAGE } else { HUGE_STRIDE.min(whole - end) };
        for start in (end..end + stride).step_by(HUGE_PAGE) {
            while !reserve_part(file, start, rustix::param::page_size(), len)? {
                go_on()?;
            }
        }
        if !map.put_on_huge_pages(end..end + stride) {
            break;
        }
        end += stride;
        if !is_patient_after(begun.elapsed(), stride / HUGE_PAGE, wait) {
            break;
        }
    }
    Ok(end)
}

/// Bytes of the huge page that the kernel makes of small ones: as many as one of them has room for entries.
fn made_of(page: usize) -> usize {
    page / size_of::<u64>() * page
}

/// Whether to make more huge pages after some that took so long.
fn is_patient_after(took: Duration, pages: usize, (wait, most): (&AtomicI64, i64)) -> bool {
    let usual = USUAL.saturating_mul(i64::try_from(pages).unwrap_or(i64::MAX));
    let earned = usual.saturating_sub(i64::try_from(took.as_micros()).unwrap_or(i64::MAX));
    let count = |left: i64| Some(left.saturating_add(earned).clamp(0, most));
    let before = wait.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count);
    before.is_ok_and(|before| before.saturating_add(earned) > 0)
}

/// Gives the memory of `file` from byte `start` to `end` back to the system, anyone who has it mapped; left out where a
/// seal or the system does not allow it.
pub(crate) fn empty(file: BorrowedFd<'_>, start: usize, end: usize) {
    #[cfg(target_os = "linux")]
    let _ = retry_on_intr(|| {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(file, flags, start as u64, (end - start) as u64)
    });
}

/// From here on the file keeps its length, for all who have it.
///
/// # Errors
/// [`ShmError::Io`] where the kernel does not know such seals (before Linux 5.1).
#[cfg(target_os = "linux")]
pub(crate) fn seal(file: BorrowedFd<'_>, writers: Writers) -> Result<(), ShmError> {
    use rustix::fs::{SealFlags, fcntl_add_seals};

    let mut seals = SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    seals.set(SealFlags::FUTURE_WRITE, writers == Writers::Present);
    fcntl_add_seals(file, seals).map_err(|errno| ShmError::io("seal", "an anonymous segment", errno))
}

/// Elsewhere there is nothing to be sealed.
#[cfg(not(target_os = "linux"))]
pub(crate) fn seal(_file: BorrowedFd<'_>, _writers: Writers) -> Result<(), ShmError> {
    Err(ShmError::Unsupported { what: "an anonymous segment" })
}

/// Whether nobody can make the file shorter.
#[cfg(target_os = "linux")]
pub(crate) fn keeps_its_length(file: BorrowedFd<'_>) -> bool {
    use rustix::fs::{SealFlags, fcntl_get_seals};

    fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK | SealFlags::SEAL))
}

/// Elsewhere nothing is sealed.
#[cfg(not(target_os = "linux"))]
pub(crate) fn keeps_its_length(_file: BorrowedFd<'_>) -> bool {
    false
}

/// An open file description of its own for what `file` is open on.
///
/// # Errors
/// [`ShmError::Io`] where the process may open no more files, or has no `/proc`.
pub(crate) fn reopen(file: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd, ShmError> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    open(&path, flags).map_err(|errno| ShmError::io("open", path, errno))
}

fn open(path: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    retry_on_intr(|| rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()))
}

/// An open file description of its own for the descriptor of another process, or of this one.
///
/// # Errors
/// [`ShmError::Io`] where that process is gone, has no such descriptor, or may not be looked at.
/// [`ShmError::NotASegment`] where it is not a plain file: to open a pipe could wait for ever.
pub(crate) fn open_of(process: u32, descriptor: i32, flags: OFlags) -> Result<OwnedFd, ShmError> {
    let path = format!("/proc/{process}/fd/{descriptor}");
    let found = open(&path, OFlags::PATH).map_err(|errno| ShmError::io("open", path.as_str(), errno))?;
    if rustix::fs::FileType::from_raw_mode(status(found.as_fd())?.st_mode) != rustix::fs::FileType::RegularFile {
        return Err(ShmError::NotASegment { segment: path, reason: "it is not a plain file".to_owned() });
    }
    reopen(found.as_fd(), flags)
}

/// Takes the shared lock; `false` when somebody has the exclusive one.
///
/// # Errors
/// [`ShmError::Io`] where the file system has no locks.
pub(crate) fn lock_shared(file: BorrowedFd<'_>) -> Result<bool, ShmError> {
    lock(file, FlockOperation::NonBlockingLockShared)
}

/// Takes the exclusive lock; `false` when somebody has any.
///
/// # Errors
/// [`ShmError::Io`] where the file system has no locks.
pub(crate) fn lock_exclusive(file: BorrowedFd<'_>) -> Result<bool, ShmError> {
    lock(file, FlockOperation::NonBlockingLockExclusive)
}

/// Lets go of the lock that was taken through this description, by whichever process has it.
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

/// What the kernel knows of `file`.
///
/// # Errors
/// [`ShmError::Io`], never seen.
pub(crate) fn status(file: BorrowedFd<'_>) -> Result<Stat, ShmError> {
    rustix::fs::fstat(file).map_err(|errno| ShmError::io("look at", "a segment", errno))
}

/// The bytes of a page of `file`: of a huge one where it is made of those.
#[cfg(target_os = "linux")]
pub(crate) fn page_of(file: BorrowedFd<'_>) -> usize {
    const HUGETLBFS: u32 = 0x9584_58f6;

    match rustix::fs::fstatfs(file) {
        Ok(system) if system.f_type as u32 == HUGETLBFS => system.f_bsize as usize,
        _ => rustix::param::page_size(),
    }
}

/// Elsewhere there are no others.
#[cfg(not(target_os = "linux"))]
pub(crate) fn page_of(_file: BorrowedFd<'_>) -> usize {
    rustix::param::page_size()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_as_large_as_their_tables_are_long() {
        // `hpage_pmd_size` on arm64 with its three sizes of pages, and on x86-64 with the first.
        assert_eq!([4 << 10, 16 << 10, 64 << 10].map(made_of), [2 << 20, 32 << 20, 512 << 20]);
    }

    /// As kernels do before Linux 6.10, here with a signal for every 2 MiB.
    #[test]
    fn signals_that_come_faster_than_a_stride_do_not_hold_up_what_is_reserved() {
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

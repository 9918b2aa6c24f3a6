//! Tells whether any process holds a named segment.
//!
//! Its file has two locks. Both belong to an open file description, so the kernel drops them with its last
//! descriptor and mapping, however a process ends:
//!
//! - `flock(LOCK_SH)` is the *hold*. A process has it from before the segment got its name, or from the attaching on.
//! - `F_OFD_SETLK` (fcntl(2)) is the *probe lock*. A process takes it before it asks whether there is a hold: to
//!   attach, to create under the name, to sweep, or to drop its hold.
//!
//! Invariants: `flock(LOCK_EX)` is asked for under the probe lock only, so where it is refused there is a real hold. A
//! name is removed only under the probe lock of the file that it leads to.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::segment_folder::{FileIdentity, SegmentFolder, SegmentName};
use crate::error::ShmError;
use crate::memory::memory_file::{self, CheckCancelled};
use crate::segment::header::SegmentHeader;

/// Longest wait for the lock, which is held for microseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
const RETRY_INTERVAL: Duration = Duration::from_micros(200);

/// A segment's file under its probe lock: no other process attaches to it or removes its name.
#[derive(Debug)]
pub(crate) struct ProbedFile<'a> {
    folder: &'a SegmentFolder,
    name: &'a SegmentName,
    file: OwnedFd,
    identity: FileIdentity,
    /// Bytes of the file.
    pub(crate) bytes: usize,
    /// The process that made it.
    pub(crate) maker: u32,
}

impl<'a> ProbedFile<'a> {
    /// Waits for the probe lock of the segment that has this name. `None` where that is no segment of this user:
    /// nothing is locked then. A file is a segment from the moment it gets its name.
    ///
    /// # Errors
    /// If another process keeps the lock for longer than [`LOCK_TIMEOUT`], and the error of `check_cancelled`.
    pub(crate) fn take(
        folder: &'a SegmentFolder,
        name: &'a SegmentName,
        check_cancelled: CheckCancelled<'_>,
    ) -> Result<Option<Self>, ShmError> {
        let deadline = Instant::now() + LOCK_TIMEOUT;
        let failed = |operation, errno| ShmError::io(operation, folder.path_of(name).display().to_string(), errno);
        loop {
            // A description that can write: only that may have the lock.
            let Some((file, stat)) = folder.open(name, OFlags::RDWR)? else { return Ok(None) };
            let bytes = usize::try_from(stat.st_size).unwrap_or_default();
            let maker = match SegmentHeader::read(file.as_fd(), bytes, name.as_str()) {
                Ok(header) => header.maker,
                Err(ShmError::NotASegment { .. }) => return Ok(None),
                Err(error) => return Err(error),
            };
            match lock(&file, libc::F_WRLCK) {
                Ok(()) => {
                    let probe = Self { folder, name, file, identity: FileIdentity::of(&stat), bytes, maker };
                    // It may have been removed since it was opened, and the name given to another.
                    if folder.leads_to(name, probe.identity)? {
                        return Ok(Some(probe));
                    }
                }
                Err(Errno::AGAIN | Errno::ACCESS) => std::thread::sleep(RETRY_INTERVAL),
                Err(errno) => return Err(failed("lock", errno)),
            }
            check_cancelled()?;
            if Instant::now() > deadline {
                return Err(failed("lock", Errno::AGAIN));
            }
        }
    }

    pub(crate) fn identity(&self) -> FileIdentity {
        self.identity
    }

    #[cfg(test)]
    pub(crate) fn descriptor(&self) -> std::os::fd::BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Whether a process holds the segment: it has a map or a descriptor of it, or inherited one by `fork`.
    pub(crate) fn is_held(&self) -> Result<bool, ShmError> {
        let is_free = memory_file::lock_exclusive(self.file.as_fd())?;
        if is_free {
            // The next process that attaches has to get its shared lock.
            memory_file::unlock(self.file.as_fd())?;
        }
        Ok(!is_free)
    }

    /// Takes the name away.
    pub(crate) fn remove(&self) -> Result<(), ShmError> {
        self.folder.remove(self.name)
    }
}

impl Drop for ProbedFile<'_> {
    fn drop(&mut self) {
        // A child that was forked meanwhile has the description too, so to close it would not be enough.
        let _ = lock(&self.file, libc::F_UNLCK);
    }
}

fn lock(file: &OwnedFd, kind: i32) -> Result<(), Errno> {
    let all = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        // Has to be zero for locks of a description.
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and the kernel reads what the pointer leads to during the call only.
    let outcome = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const all) };
    if outcome == 0 { Ok(()) } else { Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)) }
}

//! Early writeback: what was written starts on its way to the disk long before the fsync.
//!
//! Without it the kernel holds gigabytes of dirty pages until the fsync, which then stalls everything else on the
//! disk. Invariant: at most two windows of a file (plus the one being written) are dirty or under way.
//! `sync_file_range` makes nothing durable by itself; the fsync at the end still does that. Where the system call is
//! missing (other platforms, some file systems) writing goes on without it.

use std::ops::Range;
use std::path::Path;

use rustix::io::Errno;

use crate::disk::Disk;
use crate::error::CommitError;

/// Bytes between two starts of writeback, and the largest single write.
pub(crate) const WINDOW: u64 = 8 << 20;

/// What of one file was written since writeback was last started.
#[derive(Debug)]
pub(crate) struct Writeback {
    dirty: Option<Range<u64>>,
    dirty_bytes: u64,
    under_way: Option<Range<u64>>,
    supported: bool,
}

impl Writeback {
    pub(crate) fn new() -> Self {
        Writeback { dirty: None, dirty_bytes: 0, under_way: None, supported: true }
    }

    /// Notes that `range` was written; starts writeback when a window is full and waits for the one before it.
    pub(crate) fn wrote<D: Disk>(
        &mut self,
        disk: &D,
        file: &D::File,
        range: Range<u64>,
        path: &Path,
    ) -> Result<(), CommitError> {
        self.dirty_bytes += range.end - range.start;
        let dirty = match self.dirty.take() {
            Some(dirty) => dirty.start.min(range.start)..dirty.end.max(range.end),
            None => range,
        };
        if self.dirty_bytes < WINDOW || !self.supported {
            self.dirty = Some(dirty);
            return Ok(());
        }
        self.dirty_bytes = 0;
        self.advance(disk, file, dirty, path)
    }

    fn advance<D: Disk>(&mut self, disk: &D, file: &D::File, full: Range<u64>, path: &Path) -> Result<(), CommitError> {
        match disk.start_writeback(file, &full, path) {
            // Only the first start can find out: later, and from a wait, the same numbers are those of lost bytes.
            Err(error) if self.under_way.is_none() && is_missing(&error) => {
                self.supported = false;
                return Ok(());
            }
            outcome => outcome?,
        }
        if let Some(before) = self.under_way.replace(full) {
            disk.wait_for_writeback(file, &before, path)?;
        }
        Ok(())
    }
}

fn is_missing(error: &CommitError) -> bool {
    [Errno::NOSYS, Errno::INVAL, Errno::OPNOTSUPP, Errno::SPIPE].into_iter().any(|errno| error.is(errno))
}

#[cfg(target_os = "linux")]
pub(crate) use linux::{start, wait};

#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
mod linux {
    use std::fs::File;
    use std::ops::Range;
    use std::os::fd::AsRawFd;

    use rustix::io::Errno;

    pub(crate) fn start(file: &File, range: &Range<u64>) -> rustix::io::Result<()> {
        sync_file_range(file, range, libc::SYNC_FILE_RANGE_WRITE)
    }

    pub(crate) fn wait(file: &File, range: &Range<u64>) -> rustix::io::Result<()> {
        let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        sync_file_range(file, range, flags)
    }

    fn sync_file_range(file: &File, range: &Range<u64>, flags: libc::c_uint) -> rustix::io::Result<()> {
        let offset = libc::off64_t::try_from(range.start).map_err(|_| Errno::OVERFLOW)?;
        let length = libc::off64_t::try_from(range.end - range.start).map_err(|_| Errno::OVERFLOW)?;
        // SAFETY: the descriptor is open for the whole call, and no memory is passed.
        let status = unsafe { libc::sync_file_range(file.as_raw_fd(), offset, length, flags) };
        if status == 0 {
            return Ok(());
        }
        let error = std::io::Error::last_os_error();
        Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn start(_file: &std::fs::File, _range: &Range<u64>) -> rustix::io::Result<()> {
    Err(Errno::NOSYS)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn wait(_file: &std::fs::File, _range: &Range<u64>) -> rustix::io::Result<()> {
    Err(Errno::NOSYS)
}

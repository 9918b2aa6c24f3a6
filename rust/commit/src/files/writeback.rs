//! Early writeback: the kernel starts to write dirty pages long before the fsync.
//!
//! Without it the kernel collects gigabytes of dirty pages, and the fsync stalls everything else on the disk.
//! Invariant: at most two windows of a file, and the one being written, are dirty or under writeback.
//! `sync_file_range` makes nothing durable; the fsync at the end does. Where the call is missing, writing goes on
//! without it.

use std::ops::Range;
use std::path::Path;

use rustix::io::Errno;

use crate::disk::Disk;
use crate::error::CommitError;

/// Bytes between two starts of writeback, and the size of the largest single write.
pub(crate) const WINDOW: u64 = 8 << 20;

/// The dirty range of one file since the last start of writeback.
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

    /// Records that `range` was written. Starts writeback of a full window and waits for the window before it.
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
            // Only the first start tells that the call is missing. Later the same error numbers mean lost bytes.
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

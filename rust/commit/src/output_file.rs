//! One open file of a shard writer.
//!
//! It has two descriptors: one that uses the page cache and, where the file system has direct I/O, one that bypasses
//! it. Invariants: the two never write to the same page. Only whole pages bypass the cache; the bytes at either end of
//! a chunk go through it. No write is repeated that may have lost bytes.
//!
//! Written pages go to the disk early: [`Writeback`].

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;

use crate::disk::{self, Disk, LARGEST_WRITE};
use crate::error::CommitError;
use crate::folder_tree::{FolderTree, TreeFile};

/// Whether the file system has direct I/O; shared by all files of a writer.
#[derive(Debug, Default)]
pub(crate) struct DirectIo(AtomicU8);

const UNTRIED: u8 = 0;
const TAKEN: u8 = 1;
const REFUSED: u8 = 2;

impl DirectIo {
    fn is_refused(&self) -> bool {
        self.0.load(Ordering::Relaxed) == REFUSED
    }

    fn taken(&self) {
        self.0.store(TAKEN, Ordering::Relaxed);
    }

    /// Whether an error of a direct write means that there is no direct I/O here. After a successful direct write it
    /// means something else.
    fn is_refusal(&self, error: &CommitError) -> bool {
        let refused = error.is(Errno::INVAL) || error.is(Errno::OPNOTSUPP);
        refused
            && match self.0.compare_exchange(UNTRIED, REFUSED, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => true,
                Err(before) => before == REFUSED,
            }
    }
}

/// Bytes written through the page cache after which they are dropped from it.
const EVICTION: u64 = 4 * WINDOW;

/// An open file.
pub(crate) struct OutputFile<D: Disk> {
    cached: D::File,
    direct: Option<D::File>,
    in_cache: Mutex<InCache>,
}

/// The bytes of a file in the page cache.
struct InCache {
    writeback: Writeback,
    /// Written since they were last dropped.
    bytes: u64,
}

impl<D: Disk> OutputFile<D> {
    pub(crate) fn open(tree: &FolderTree<D>, tree_file: &TreeFile, direct_io: &DirectIo) -> Result<Self, CommitError> {
        let direct = match direct_io.is_refused() {
            true => None,
            false => tree.open_for_direct_writing(tree_file)?,
        };
        let cached = tree.open_for_writing(tree_file)?;
        let in_cache = Mutex::new(InCache { writeback: Writeback::new(), bytes: 0 });
        Ok(OutputFile { cached, direct, in_cache })
    }

    /// Writes all of `bytes` at `offset`.
    pub(crate) fn write(
        &self,
        disk: &D,
        offset: u64,
        bytes: &[u8],
        path: &Path,
        direct_io: &DirectIo,
    ) -> Result<(), CommitError> {
        let (Some(file), Some(pages)) = (&self.direct, whole_pages(offset, bytes)) else {
            return self.write_cached(disk, offset, bytes, path);
        };
        let written = if direct_io.is_refused() {
            0
        } else {
            match write_direct(disk, file, offset + pages.start as u64, &bytes[pages.clone()], path, direct_io) {
                Err(error) if direct_io.is_refusal(&error) => 0,
                outcome => outcome?,
            }
        };
        let rest = pages.start + written;
        self.write_cached(disk, offset, &bytes[..pages.start], path)?;
        self.write_cached(disk, offset + rest as u64, &bytes[rest..], path)
    }

    /// Writes through the page cache, in which only a few windows stay.
    fn write_cached(&self, disk: &D, offset: u64, bytes: &[u8], path: &Path) -> Result<(), CommitError> {
        disk::write_all(disk, &self.cached, offset, bytes, path, |written| {
            let mut in_cache = self.in_cache.lock().unwrap_or_else(PoisonError::into_inner);
            in_cache.bytes += written.end - written.start;
            in_cache.writeback.wrote(disk, &self.cached, written, path)?;
            if in_cache.bytes >= EVICTION {
                in_cache.bytes = 0;
                disk.evict(&self.cached);
            }
            Ok(())
        })
    }

    /// Makes the file durable after all of it is written.
    pub(crate) fn finish(&self, disk: &D, path: &Path) -> Result<(), CommitError> {
        disk.fsync(&self.cached, path)?;
        disk.evict(&self.cached);
        Ok(())
    }
}

/// The part of `bytes` that is whole pages both in memory and in the file; `None` where there is none.
fn whole_pages(offset: u64, bytes: &[u8]) -> Option<Range<usize>> {
    let page = rustix::param::page_size();
    let start = (offset % page as u64) as usize;
    if bytes.as_ptr().addr() % page != start {
        return None;
    }
    let before = (page - start) % page;
    let length = bytes.len().checked_sub(before)? / page * page;
    (length > 0).then_some(before..before + length)
}

/// Writes whole pages and returns the number of bytes. It is smaller where the system stopped within a page: the rest
/// can then no longer bypass the cache.
fn write_direct<D: Disk>(
    disk: &D,
    file: &D::File,
    offset: u64,
    bytes: &[u8],
    path: &Path,
    direct_io: &DirectIo,
) -> Result<usize, CommitError> {
    let page = rustix::param::page_size();
    let mut done = 0;
    while done < bytes.len() && done % page == 0 {
        let written = disk.write_at(file, offset + done as u64, &bytes[done..], path)?;
        if written == 0 {
            // As in `write_all`: a retry might never write a byte.
            return Err(CommitError::io("write", path, Errno::IO));
        }
        direct_io.taken();
        done += written;
    }
    Ok(done)
}

// Early writeback: the kernel starts to write dirty pages long before the fsync.
//
// Without it the kernel collects gigabytes of dirty pages, and the fsync stalls everything else on the disk.
// Invariant: at most two windows of a file, and the one being written, are dirty or under writeback.
// `sync_file_range` makes nothing durable; the fsync at the end does. Where the call is missing, writing goes on
// without it.

/// Bytes between two starts of writeback, and the size of the largest single write.
pub(crate) const WINDOW: u64 = LARGEST_WRITE as u64;

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

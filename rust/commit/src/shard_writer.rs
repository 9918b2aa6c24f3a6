//! The shard writer: writes the files of one rank from staged memory, fast and without disturbing training.
//!
//! A [`ShardWriter`] creates all files of a rank at their full length, accepts bytes of file images in any order, and
//! finishes when every byte of every file is durable.
//!
//! Invariants:
//!
//! 1. A full disk is found before the first byte is written: all files are preallocated.
//! 2. Every byte of a file is written exactly once. Overlapping ranges are refused, and so is finishing a file with a
//!    gap.
//! 3. The first failure is final: a write, an fsync, a panic of a thread. [`finish`](ShardWriter::finish) reports it
//!    with the file's path.
//! 4. After `finish` has answered, and after the writer is dropped, none of its threads runs and it holds no image.
//! 5. A writer belongs to the process that made it. In a child made by `fork` every call is refused, and dropping it
//!    does nothing.
//!
//! Bytes bypass the page cache where the file system has direct I/O and the image is laid out like the file. Otherwise
//! few pages are dirty at a time, and written pages are dropped from the cache. Each thread computes the checksum of a
//! chunk after it has written it: a disk reads faster from memory than from a processor's caches.

use std::ops::ControlFlow;
use std::path::Path;
use std::process;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::RealDisk;
use crate::disk::Disk;
use crate::error::CommitError;
use crate::folder_tree::{FolderTree, TreeFile};
use crate::manifest::FileMetadata;
use crate::output_file::WINDOW;
use crate::staging::Memory;
use crate::work_queue::SubmittedBytes;
use crate::writer_threads::SharedWriterState;

/// The most threads that write. One alone saturates the disks measured; the others keep the disk busy while one sums,
/// or waits for a processor that training uses.
const THREADS: usize = 4;

/// Writes the files of one rank, from images or from where tensors lie.
///
/// Its methods may be called from several threads. Dropping it before [`finish`](ShardWriter::finish) has answered
/// aborts it. The files then stay as they are; the owner of their folder removes them.
pub struct ShardWriter<D: Disk = RealDisk> {
    shared: Arc<SharedWriterState<D>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    process: u32,
}

impl ShardWriter {
    /// A writer to the disk of this machine; see [`on_disk`](ShardWriter::on_disk).
    ///
    /// # Errors
    /// The errors of [`on_disk`](ShardWriter::on_disk).
    pub fn create(
        folder: impl AsRef<Path>,
        files: &[(&str, u64)],
        checksum: bool,
        check_cancelled: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Self, CommitError> {
        Self::on_disk(RealDisk, folder.as_ref(), files, checksum, check_cancelled)
    }
}

impl<D: Disk> ShardWriter<D> {
    /// Creates `files` at their full length and starts the threads. Names are relative to `folder`, sizes in bytes.
    /// `checksum`: whether to compute a checksum of each file.
    ///
    /// `folder` must exist; inner folders are created. Modes are those that the umask leaves. Calls `check_cancelled`
    /// after each file.
    ///
    /// # Errors
    /// Before anything is created: [`CommitError::InvalidWrite`] for invalid names and sizes, and
    /// [`CommitError::ParentMissing`]. Then [`CommitError::FileExists`], [`CommitError::Interrupted`] and
    /// [`CommitError::Io`]; `ENOSPC`, `EDQUOT` and `EFBIG` mean that the files do not fit. Created files stay.
    pub fn on_disk(
        disk: D,
        folder: &Path,
        files: &[(&str, u64)],
        checksum: bool,
        check_cancelled: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Self, CommitError> {
        let total = files.iter().try_fold(0u64, |total, (_, size)| total.checked_add(*size));
        if total.is_none_or(|total| total > i64::MAX as u64) {
            let reason = "its files are larger together than a file can be".to_owned();
            return Err(CommitError::InvalidWrite { path: folder.to_path_buf(), reason });
        }
        let (tree, tree_files) = FolderTree::open(&disk, folder, files.iter().map(|(name, _)| *name))?;
        preallocate(&tree, &tree_files, files, check_cancelled)?;
        let sizes = files.iter().map(|(_, size)| *size);
        let shared = Arc::new(SharedWriterState::new(disk, tree, tree_files.into_iter().zip(sizes), checksum));
        let writer = ShardWriter { shared, threads: Mutex::default(), process: process::id() };
        // No more threads than chunks.
        let writes: u64 = files.iter().map(|(_, size)| size.div_ceil(WINDOW).max(1)).sum();
        writer.start_threads(usize::try_from(writes).map_or(THREADS, |writes| writes.clamp(1, THREADS)))?;
        Ok(writer)
    }

    fn start_threads(&self, count: usize) -> Result<(), CommitError> {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        for number in 0..count {
            let shared = Arc::clone(&self.shared);
            let thread = thread::Builder::new().name(format!("tundish-write-{number}"));
            self.shared.count_thread(1);
            let started = thread.spawn(move || shared.run()).map_err(|source| {
                self.shared.count_thread(-1);
                let path = self.shared.path().to_path_buf();
                CommitError::Io { operation: "start a thread that writes to", path, source }
            });
            threads.push(started?);
        }
        Ok(())
    }

    /// Submits `length` bytes of `memory` from `start` on, to be written at `offset` of the file `name`. Returns at
    /// once.
    ///
    /// The writer keeps the memory until the bytes are on the disk. Do not change them before.
    ///
    /// # Errors
    /// [`CommitError::InvalidWrite`] for an unknown file, a range outside the memory or the file, bytes that were
    /// submitted before, and after `finish` or `abort`; the writer stays usable. [`CommitError::Poisoned`] or
    /// [`CommitError::Panicked`] after a failure.
    pub fn write(
        &self,
        name: &str,
        offset: u64,
        memory: &Arc<impl Memory + 'static>,
        start: usize,
        length: usize,
    ) -> Result<(), CommitError> {
        self.check_process()?;
        let size = memory.bytes().len();
        if start.checked_add(length).is_none_or(|end| end > size) {
            let reason = format!("bytes {start} + {length} are not in memory of {size}");
            return Err(CommitError::InvalidWrite { path: self.shared.path().join(name), reason });
        }
        let memory: Arc<dyn Memory> = Arc::clone(memory) as _;
        self.shared.submit(name, SubmittedBytes { file: 0, offset, memory, start, length })
    }

    /// Bytes that are written (and summed, if wanted), whose memory may be reused; and bytes of all files.
    pub fn progress(&self) -> (u64, u64) {
        self.shared.progress()
    }

    /// Waits up to `timeout` until every file and its folders are durable; `None` when they are not by then. Returns
    /// the metadata of the files in the order in which they were named.
    ///
    /// # Errors
    /// [`CommitError::InvalidWrite`] when bytes of a file were not submitted; submit them and call `finish` again. The
    /// first failure of a thread; later calls return [`CommitError::Poisoned`] for it. After such an error no thread
    /// writes.
    pub fn finish(&self, timeout: Duration) -> Result<Option<Vec<FileMetadata>>, CommitError> {
        self.check_process()?;
        let deadline = Instant::now() + timeout;
        let outcome = self.shared.finish(deadline);
        if !matches!(outcome, Ok(None) | Err(CommitError::InvalidWrite { .. })) {
            self.join();
        }
        outcome
    }

    /// Stops: drops what is not written yet. When this returns, no thread runs and no image is held.
    ///
    /// It waits for the chunks that are being written, at most 8 MiB a thread.
    pub fn abort(&self) {
        if self.process == process::id() {
            self.shared.stop();
            self.join();
        }
    }

    fn join(&self) {
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // The thread caught its own panic.
            let _ = thread.join();
        }
    }

    fn check_process(&self) -> Result<(), CommitError> {
        if self.process == process::id() {
            return Ok(());
        }
        let reason = "its writer belongs to the process that this one was forked from; make one here".to_owned();
        Err(CommitError::InvalidWrite { path: self.shared.path().to_path_buf(), reason })
    }
}

impl<D: Disk> Drop for ShardWriter<D> {
    fn drop(&mut self) {
        if self.process == process::id() {
            self.abort();
        } else {
            // The child has none of these threads to join.
            std::mem::forget(std::mem::take(self.threads.get_mut().unwrap_or_else(PoisonError::into_inner)));
        }
    }
}

/// Creates all files and reserves room for their bytes.
fn preallocate<D: Disk>(
    tree: &FolderTree<D>,
    tree_files: &[TreeFile],
    files: &[(&str, u64)],
    check_cancelled: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<(), CommitError> {
    let sizes = files.iter().map(|(_, size)| *size);
    let mut left: u64 = sizes.clone().sum();
    let mut can_allocate = true;
    for (tree_file, size) in tree_files.iter().zip(sizes) {
        let file = tree.create(tree_file)?;
        if size > 0 && can_allocate {
            match tree.top().disk.allocate(&file, size, &tree_file.path) {
                Err(error) if error.is(Errno::OPNOTSUPP) || error.is(Errno::NOSYS) => {
                    can_allocate = false;
                    check_free_space(tree, left)?;
                }
                outcome => outcome?,
            }
        }
        if size > 0 && !can_allocate {
            // This reserves no room, but finds a limit on file sizes.
            tree.top().disk.truncate(&file, size, &tree_file.path)?;
        }
        left -= size;
        if check_cancelled().is_break() {
            return Err(CommitError::Interrupted { path: tree_file.path.clone() });
        }
    }
    Ok(())
}

/// Where no room can be reserved, it must at least be free now.
fn check_free_space<D: Disk>(tree: &FolderTree<D>, needed: u64) -> Result<(), CommitError> {
    let folder = tree.top();
    if folder.disk.free_room(&folder.folder, &folder.path)?.bytes < needed {
        return Err(CommitError::io("find room for all files of", tree.path(), Errno::NOSPC));
    }
    Ok(())
}

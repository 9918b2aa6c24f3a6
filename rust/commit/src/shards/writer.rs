//! A shard writer as its users see it.

use std::ops::ControlFlow;
use std::path::Path;
use std::process;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::state::THREADS;
use super::worker::Shared;
use super::write::Write;
use crate::disk::{Disk, RealDisk};
use crate::error::CommitError;
use crate::file_metadata::FileMetadata;
use crate::staging::FileImage;
use crate::tree::{Place, Tree};
use crate::writeback::WINDOW;

/// How a [`ShardWriter`] writes.
#[derive(Clone, Copy, Debug)]
pub struct WriterOptions {
    /// Whether to compute a checksum of each file.
    pub checksum: bool,
    /// How many writers to folders of the same root (the folder that theirs lies in) write at once on this node;
    /// at least one.
    pub writers_per_node: usize,
}

/// Writes the files of one rank; see the [module](self) for what always holds.
///
/// Its methods may be called from several threads. Dropped before [`finish`](ShardWriter::finish) has answered, it
/// stops as [`abort`](ShardWriter::abort) does; the files stay as they are, for whoever owns their folder to remove.
pub struct ShardWriter<D: Disk + 'static = RealDisk> {
    shared: Arc<Shared<D>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    process: u32,
}

impl ShardWriter {
    /// A writer to the disk of this machine; see [`on_disk`](ShardWriter::on_disk).
    ///
    /// # Errors
    /// As there.
    pub fn create(
        folder: impl AsRef<Path>,
        files: &[(&str, u64)],
        options: WriterOptions,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Self, CommitError> {
        Self::on_disk(RealDisk, folder.as_ref(), files, options, go_on)
    }
}

impl<D: Disk> ShardWriter<D> {
    /// Makes `files`, names relative to `folder` and sizes in bytes, at their full length, and starts the threads.
    ///
    /// `folder` must exist; folders in it that names contain are made. Modes are those that the umask leaves. `go_on`
    /// is asked after each file.
    ///
    /// # Errors
    /// Before anything is made: [`CommitError::InvalidWrite`] for options, names and sizes that cannot be,
    /// [`CommitError::ParentMissing`]. Then [`CommitError::FileExists`], [`CommitError::Interrupted`] and
    /// [`CommitError::Io`], among them `ENOSPC`, `EDQUOT` and `EFBIG` for a disk or a quota that the files do not fit
    /// into. What was made until then stays.
    pub fn on_disk(
        disk: D,
        folder: &Path,
        files: &[(&str, u64)],
        options: WriterOptions,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Self, CommitError> {
        let refuse = |path: &Path, reason: &str| {
            Err(CommitError::InvalidWrite { path: path.to_path_buf(), reason: reason.to_owned() })
        };
        if options.writers_per_node == 0 {
            return refuse(folder, "at least one writer a node has to be allowed");
        }
        let total = files.iter().try_fold(0u64, |total, (_, size)| total.checked_add(*size));
        if total.is_none_or(|total| total > i64::MAX as u64) {
            return refuse(folder, "its files are larger together than a file can be");
        }
        let (tree, places) = Tree::make(&disk, folder, files.iter().map(|(name, _)| *name))?;
        preallocate(&disk, &tree, &places, files, go_on)?;
        let root = *tree.parent();
        let sizes = files.iter().map(|(_, size)| *size);
        let shared = Arc::new(Shared::new(disk, tree, places.into_iter().zip(sizes), options, &root));
        let writer = ShardWriter { shared, threads: Mutex::default(), process: process::id() };
        // No more than there are single writes.
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

    /// Hands in `length` bytes of `image` from `start` on, to be written at `offset` of the file `name`; returns at
    /// once.
    ///
    /// The writer keeps the image until they are on the disk; until then nobody may change them.
    ///
    /// # Errors
    /// [`CommitError::InvalidWrite`] for a file that the writer does not have, a range outside the image or the file,
    /// bytes that were handed in before, and after `finish` or `abort`; none of them harms the writer. When writing has
    /// failed already, [`CommitError::Poisoned`] or [`CommitError::Panicked`].
    pub fn write(
        &self,
        name: &str,
        offset: u64,
        image: &Arc<FileImage>,
        start: usize,
        length: usize,
    ) -> Result<(), CommitError> {
        self.check_process()?;
        let in_image = start.checked_add(length).is_some_and(|end| end <= image.size());
        if !in_image {
            let reason = format!("bytes {start} + {length} are not in an image of {}", image.size());
            return Err(CommitError::InvalidWrite { path: self.shared.path().join(name), reason });
        }
        self.shared.hand_in(name, Write { file: 0, offset, image: Arc::clone(image), start, length })
    }

    /// Bytes that are through (written, and summed if they are to be, so that their memory may be used again), and bytes
    /// of all files.
    pub fn progress(&self) -> (u64, u64) {
        self.shared.progress()
    }

    /// Waits until every file, and every folder that they lie in, is durable, but no longer than `patience`; `None`
    /// when it is not done by then. What is known of the files comes in the order in which they were named.
    ///
    /// # Errors
    /// [`CommitError::InvalidWrite`] when bytes of a file were not handed in; those may still be, and `finish` be
    /// called again. The first failure of a thread, whatever it was; then [`CommitError::Poisoned`] for it at every
    /// later call. When an error is returned no thread writes any more.
    pub fn finish(&self, patience: Duration) -> Result<Option<Vec<FileMetadata>>, CommitError> {
        self.check_process()?;
        let until = Instant::now() + patience;
        let outcome = self.shared.finish(until);
        if !matches!(outcome, Ok(None) | Err(CommitError::InvalidWrite { .. })) {
            self.join();
        }
        outcome
    }

    /// Stops: what was not written is given up, no thread runs any more when this returns, and no image is held.
    ///
    /// It waits for the pieces that are on their way to the disk, at most 8 MiB a thread.
    pub fn abort(&self) {
        if self.process == process::id() {
            self.shared.stop();
            self.join();
        }
    }

    fn join(&self) {
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // Whatever a thread panics over is caught and kept in what they share.
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
            // There is nobody to join, and what the C library knows of those threads is gone.
            std::mem::forget(std::mem::take(self.threads.get_mut().unwrap_or_else(PoisonError::into_inner)));
        }
    }
}

/// Makes all files, and has the disk keep room for their bytes.
fn preallocate<D: Disk>(
    disk: &D,
    tree: &Tree<D>,
    places: &[Place],
    files: &[(&str, u64)],
    go_on: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<(), CommitError> {
    let sizes = files.iter().map(|(_, size)| *size);
    let mut left: u64 = sizes.clone().sum();
    let mut can_allocate = true;
    for (place, size) in places.iter().zip(sizes) {
        let file = tree.create(disk, place)?;
        if size > 0 && can_allocate {
            match disk.allocate(&file, size, &place.path) {
                Err(error) if error.is(Errno::OPNOTSUPP) || error.is(Errno::NOSYS) => {
                    can_allocate = false;
                    check_free_space(disk, tree, left)?;
                }
                outcome => outcome?,
            }
        }
        if size > 0 && !can_allocate {
            // Keeps no room, but shows a limit on the size of files.
            disk.truncate(&file, size, &place.path)?;
        }
        left -= size;
        if go_on().is_break() {
            return Err(CommitError::Interrupted { path: place.path.clone() });
        }
    }
    Ok(())
}

/// Where no room can be kept, it must at least be there now.
fn check_free_space<D: Disk>(disk: &D, tree: &Tree<D>, needed: u64) -> Result<(), CommitError> {
    match disk.free_space(tree.top(), tree.path())? {
        Some(free) if free < needed => Err(CommitError::io("find room for all files of", tree.path(), Errno::NOSPC)),
        _ => Ok(()),
    }
}

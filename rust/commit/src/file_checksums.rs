//! Reads files completely to compute their checksums.
//!
//! Several threads read through the page cache, because a verified checkpoint is mostly loaded next.

use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::mpsc::{RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;

use crate::RealDisk;
use crate::checksum::{Checksum, FileProgress};
use crate::disk::{Disk, EntryKind};
use crate::error::CommitError;
use crate::hidden_names;
use crate::manifest::FileMetadata;

/// Bytes of a file that one thread reads at a time.
const CHUNK: u64 = 8 << 20;

/// Bytes of one read: few enough to be summed in the processor's cache.
const BUFFER: usize = 1 << 20;

/// More threads were not faster on any disk measured.
const MAX_THREADS: usize = 8;

/// Between two calls of `on_progress`.
const INTERVAL: Duration = Duration::from_millis(20);

/// A file to read, of `size` bytes: the name `base_name` in an open folder.
pub(crate) struct FileToSum<'a, D: Disk> {
    pub(crate) folder: &'a D::Folder,
    pub(crate) base_name: &'a OsStr,
    pub(crate) path: &'a Path,
    pub(crate) size: u64,
}

/// Why a file has no checksum.
#[derive(Debug)]
pub(crate) enum ChecksumFailure {
    /// It is shorter than its size says.
    Short,
    Failed(CommitError),
}

struct FileChunk {
    source: usize,
    offset: u64,
    length: u64,
    outcome: Result<Checksum, ChecksumFailure>,
}

/// The checksum of each source. Calls `on_progress` now and then with the bytes read and the bytes in total.
pub(crate) fn checksums<D: Disk>(
    disk: &D,
    sources: &[FileToSum<'_, D>],
    path: &Path,
    on_progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<Result<Checksum, ChecksumFailure>>, CommitError> {
    let chunks: Vec<(usize, u64)> = sources
        .iter()
        .enumerate()
        .flat_map(|(source, FileToSum { size, .. })| {
            (0..size.div_ceil(CHUNK)).map(move |chunk| (source, chunk * CHUNK))
        })
        .collect();
    let work = Work { disk, sources, chunks, next: AtomicUsize::new(0), stopped: AtomicBool::new(false) };
    thread::scope(|scope| {
        let (send, receive) = mpsc::channel();
        let available = thread::available_parallelism().map_or(1, usize::from);
        for number in 0..available.min(MAX_THREADS).min(work.chunks.len()) {
            let (work, send) = (&work, send.clone());
            let thread = thread::Builder::new().name(format!("tundish-read-{number}"));
            if let Err(source) = thread.spawn_scoped(scope, move || work.run(&send))
                && number == 0
            {
                let operation = "start a thread that reads in";
                return Err(CommitError::Io { operation, path: path.to_path_buf(), source });
            }
        }
        drop(send);
        work.gather(&receive, path, on_progress)
    })
}

struct Work<'a, D: Disk> {
    disk: &'a D,
    sources: &'a [FileToSum<'a, D>],
    /// Source and offset of each.
    chunks: Vec<(usize, u64)>,
    next: AtomicUsize,
    stopped: AtomicBool,
}

impl<D: Disk> Work<'_, D> {
    /// Runs one thread.
    fn run(&self, send: &Sender<FileChunk>) {
        let mut buffer = vec![0; BUFFER];
        while !self.stopped.load(Ordering::Relaxed)
            && let Some(&(source, offset)) = self.chunks.get(self.next.fetch_add(1, Ordering::Relaxed))
        {
            let length = CHUNK.min(self.sources[source].size - offset);
            let outcome = self.read(source, offset, length, &mut buffer);
            if send.send(FileChunk { source, offset, length, outcome }).is_err() {
                return;
            }
        }
    }

    fn read(&self, source: usize, offset: u64, length: u64, buffer: &mut [u8]) -> Result<Checksum, ChecksumFailure> {
        let FileToSum { folder, base_name, path, .. } = &self.sources[source];
        // Opened for each chunk: there may be more files than descriptors.
        let file = self.disk.open_file(folder, base_name, path).map_err(ChecksumFailure::Failed)?;
        let mut checksum = Checksum::EMPTY;
        let mut done = 0;
        while done < length && !self.stopped.load(Ordering::Relaxed) {
            let wanted = buffer.len().min(usize::try_from(length - done).unwrap_or(usize::MAX));
            let read = self
                .disk
                .read_at(&file, offset + done, &mut buffer[..wanted], path)
                .map_err(ChecksumFailure::Failed)?;
            if read == 0 {
                return Err(ChecksumFailure::Short);
            }
            checksum = checksum.then(Checksum::of(&buffer[..read]), read as u64);
            done += read as u64;
        }
        Ok(checksum)
    }

    fn gather(
        &self,
        receive: &mpsc::Receiver<FileChunk>,
        path: &Path,
        on_progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Vec<Result<Checksum, ChecksumFailure>>, CommitError> {
        let mut files: Vec<Result<FileProgress, ChecksumFailure>> =
            self.sources.iter().map(|source| Ok(FileProgress::new(source.size))).collect();
        let total = self.sources.iter().map(|source| source.size).sum();
        let mut read = 0;
        loop {
            match receive.recv_timeout(INTERVAL) {
                Ok(FileChunk { source, offset, length, outcome }) => {
                    read += length;
                    match (&mut files[source], outcome) {
                        (Ok(progress), Ok(checksum)) => progress.sum(offset, length, checksum),
                        (file @ Ok(_), Err(failure)) => *file = Err(failure),
                        (Err(_), _) => {}
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if on_progress(read, total).is_break() {
                self.stopped.store(true, Ordering::Relaxed);
                return Err(CommitError::Interrupted { path: path.to_path_buf() });
            }
        }
        Ok(files.into_iter().map(|file| file.map(|progress| progress.checksum())).collect())
    }
}

/// Makes a file that another program wrote durable, with its name, and computes its checksum. The name in the metadata
/// is the last part of `path`. `on_progress` is called now and then with the bytes read and the bytes in total.
///
/// # Errors
/// [`CommitError::InvalidName`]; [`CommitError::Io`], also for anything but a regular file (`EINVAL`) and for one that
/// becomes shorter meanwhile (`ESTALE`); [`CommitError::Interrupted`].
pub fn checksum_file(
    path: impl AsRef<Path>,
    on_progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<FileMetadata, CommitError> {
    let disk = RealDisk;
    let path = path.as_ref();
    let (parent_path, base_name) = hidden_names::split(path)?;
    let Some(name) = base_name.to_str() else {
        let reason = "its name is not UTF-8";
        return Err(CommitError::InvalidName { path: path.to_path_buf(), reason });
    };
    let parent = disk.open_path(&parent_path)?;
    let file = disk.open_file(&parent, &base_name, path)?;
    let stat = disk.file_stat(&file, path)?;
    if stat.kind != EntryKind::File {
        return Err(CommitError::io("read as a file of a checkpoint", path, Errno::INVAL));
    }
    disk.fsync(&file, path)?;
    disk.fsync_folder(&parent, &parent_path)?;
    let sources = [FileToSum { folder: &parent, base_name: &base_name, path, size: stat.size }];
    let mut checksum = Checksum::EMPTY;
    for outcome in checksums(&disk, &sources, path, on_progress)? {
        checksum = outcome.map_err(|failure| match failure {
            ChecksumFailure::Short => CommitError::io("read to its end", path, Errno::STALE),
            ChecksumFailure::Failed(error) => error,
        })?;
    }
    Ok(FileMetadata { name: name.to_owned(), size: stat.size, checksum: Some(checksum) })
}

//! The files of a checkpoint: opened, written back, and read again for their checksums.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::ops::{ControlFlow, Range};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::sync::mpsc::{RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;

use crate::checksum::Checksum;
use crate::disk::{Disk, EntryKind, FileStat, LockMode, LockOutcome, RealDisk};
use crate::error::CommitError;
use crate::manifest::FileMetadata;
use crate::{disk, hidden_names, manifest};

// Reads files completely to compute their checksums.
//
// Several threads read through the page cache, because a verified checkpoint is mostly loaded next.

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

// The progress of one file: submitted ranges, written bytes, and the checksum of summed ranges.

/// The progress of one file.
#[derive(Debug)]
pub(crate) struct FileProgress {
    size: u64,
    /// Start and end of each submitted range; adjacent ranges are merged.
    submitted: BTreeMap<u64, u64>,
    bytes_written: u64,
    /// Start of each summed range, with its length and checksum; adjacent ranges are merged.
    summed: BTreeMap<u64, (u64, Checksum)>,
}

impl FileProgress {
    pub(crate) fn new(size: u64) -> Self {
        FileProgress { size, submitted: BTreeMap::new(), bytes_written: 0, summed: BTreeMap::new() }
    }

    /// Records a submitted range, which is not empty and lies within the file. Returns `false`, and records nothing, if
    /// a part of it was submitted before.
    pub(crate) fn submit(&mut self, range: Range<u64>) -> bool {
        let before = self.submitted.range(..range.end).next_back().map(|(&start, &end)| (start, end));
        let touches = before.filter(|&(_, end)| end == range.start);
        if before.is_some_and(|(_, end)| end > range.start) {
            return false;
        }
        let end = self.submitted.remove(&range.end).unwrap_or(range.end);
        self.submitted.insert(touches.map_or(range.start, |(start, _)| start), end);
        true
    }

    /// The first byte that was not submitted; `None` when all were.
    pub(crate) fn first_gap(&self) -> Option<u64> {
        let gap = match self.submitted.first_key_value() {
            Some((0, &end)) => end,
            _ => 0,
        };
        (gap < self.size).then_some(gap)
    }

    /// Records that `length` submitted bytes were written; whether they were the last of the file.
    pub(crate) fn wrote(&mut self, length: u64) -> bool {
        self.bytes_written += length;
        self.bytes_written == self.size
    }

    /// Records the checksum of `length` bytes at `offset`.
    pub(crate) fn sum(&mut self, offset: u64, length: u64, checksum: Checksum) {
        let (mut start, mut run) = (offset, (length, checksum));
        if let Some((length, sum)) = self.summed.remove(&(offset + length)) {
            run = (run.0 + length, run.1.then(sum, length));
        }
        if let Some((&before, &(length, sum))) = self.summed.range(..offset).next_back()
            && before + length == offset
        {
            start = before;
            run = (length + run.0, sum.then(run.1, run.0));
        }
        self.summed.insert(start, run);
    }

    /// The checksum of the whole file, after all of it was summed.
    pub(crate) fn checksum(&self) -> Checksum {
        self.summed.first_key_value().map_or(Checksum::EMPTY, |(_, &(_, checksum))| checksum)
    }
}

// A checkpoint's folder and the inner folders of its files, all open.
//
// Invariants: names are checked before anything is created. Every folder is opened relative to its parent and never
// through a symbolic link, so nothing outside the first folder can be reached.

/// Open folders, each after its parent.
pub(crate) struct FolderTree<D: Disk> {
    /// The parent of the first folder.
    parent: FileStat,
    folders: Vec<TreeFolder<D>>,
}

struct TreeFolder<D: Disk> {
    /// Relative to the first folder; empty for that itself.
    name: String,
    path: PathBuf,
    folder: D::Folder,
}

/// A file in a tree.
#[derive(Debug)]
pub(crate) struct TreeFile {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    folder: usize,
    base_name: OsString,
}

impl<D: Disk> FolderTree<D> {
    /// Opens `folder` and creates the missing inner folders of the files `names`.
    pub(crate) fn open<'a>(
        disk: &D,
        folder: &Path,
        names: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<(Self, Vec<TreeFile>), CommitError> {
        manifest::check_names(names.clone())
            .map_err(|reason| CommitError::InvalidWrite { path: folder.to_path_buf(), reason })?;
        let (parent_path, base_name) = hidden_names::split(folder)?;
        let parent = disk.open_path(&parent_path)?;
        let opened = disk.open_folder(&parent, &base_name, folder).map_err(|error| match error {
            error if error.is(Errno::NOENT) => CommitError::ParentMissing { path: folder.to_path_buf() },
            // It may be a symbolic link that somebody put in the place of the folder.
            error if error.is(Errno::NOTDIR) || error.is(Errno::LOOP) => {
                CommitError::NotADirectory { path: folder.to_path_buf() }
            }
            error => error,
        })?;
        let parent = disk.folder_stat(&parent, &parent_path)?;
        let first = TreeFolder { name: String::new(), path: folder.to_path_buf(), folder: opened };
        // The lock shows the next owner of the root that somebody writes here. A process that already holds an
        // exclusive lock is about to remove the folder.
        if disk.lock_folder(&first.folder, LockMode::Shared, folder)? == LockOutcome::HeldByAnother {
            return Err(CommitError::ParentMissing { path: folder.to_path_buf() });
        }
        let mut tree = FolderTree { parent, folders: vec![first] };
        let tree_files = names.map(|name| tree.add_file(disk, name)).collect::<Result<_, _>>()?;
        Ok((tree, tree_files))
    }

    fn add_file(&mut self, disk: &D, name: &str) -> Result<TreeFile, CommitError> {
        let mut folder = 0;
        for (end, _) in name.match_indices('/') {
            folder = match self.folders.iter().position(|open| open.name == name[..end]) {
                Some(found) => found,
                None => self.make_folder(disk, folder, &name[..end])?,
            };
        }
        let base_name = OsString::from(name.rsplit('/').next().unwrap_or(name));
        Ok(TreeFile { name: name.to_owned(), path: self.folders[0].path.join(name), folder, base_name })
    }

    fn make_folder(&mut self, disk: &D, parent: usize, name: &str) -> Result<usize, CommitError> {
        let path = self.folders[0].path.join(name);
        let base_name = OsStr::new(name.rsplit('/').next().unwrap_or(name));
        let parent = &self.folders[parent].folder;
        match disk.create_folder(parent, base_name, &path) {
            Err(error) if !error.is(Errno::EXIST) => return Err(error),
            _ => {}
        }
        let folder = disk.open_folder(parent, base_name, &path)?;
        self.folders.push(TreeFolder { name: name.to_owned(), path, folder });
        Ok(self.folders.len() - 1)
    }

    /// The first folder.
    pub(crate) fn top(&self) -> &D::Folder {
        &self.folders[0].folder
    }

    /// The status of the first folder's parent.
    pub(crate) fn parent(&self) -> &FileStat {
        &self.parent
    }

    /// The path of the first folder.
    pub(crate) fn path(&self) -> &Path {
        &self.folders[0].path
    }

    /// Creates the file, which must not exist.
    pub(crate) fn create(&self, disk: &D, tree_file: &TreeFile) -> Result<D::File, CommitError> {
        match disk.create_file(self.folder_of(tree_file), &tree_file.base_name, &tree_file.path) {
            Err(error) if error.is(Errno::EXIST) => Err(CommitError::FileExists { path: tree_file.path.clone() }),
            outcome => outcome,
        }
    }

    pub(crate) fn open_for_writing(&self, disk: &D, tree_file: &TreeFile) -> Result<D::File, CommitError> {
        disk.open_file_for_writing(self.folder_of(tree_file), &tree_file.base_name, &tree_file.path)
    }

    pub(crate) fn open_for_direct_writing(
        &self,
        disk: &D,
        tree_file: &TreeFile,
    ) -> Result<Option<D::File>, CommitError> {
        disk.open_file_for_direct_writing(self.folder_of(tree_file), &tree_file.base_name, &tree_file.path)
    }

    /// Makes the names of all files and folders durable, the innermost first.
    pub(crate) fn fsync(&self, disk: &D) -> Result<(), CommitError> {
        self.folders.iter().rev().try_for_each(|open| disk.fsync_folder(&open.folder, &open.path))
    }

    fn folder_of(&self, tree_file: &TreeFile) -> &D::Folder {
        &self.folders[tree_file.folder].folder
    }
}

// Checkpoint files that no shard writer writes: small ones, and files that another program wrote.

/// Writes `bytes` as the new file `name`, relative to `folder`, and makes it and the folders it lies in durable.
///
/// Missing inner folders are created. Modes are those that the umask leaves.
///
/// # Errors
/// [`CommitError::InvalidWrite`] for an invalid file name, [`CommitError::FileExists`],
/// [`CommitError::ParentMissing`] and [`CommitError::Io`].
pub fn write_small_file(folder: impl AsRef<Path>, name: &str, bytes: &[u8]) -> Result<FileMetadata, CommitError> {
    let disk = RealDisk;
    let (tree, tree_files) = FolderTree::open(&disk, folder.as_ref(), std::iter::once(name))?;
    for tree_file in &tree_files {
        let file = tree.create(&disk, tree_file)?;
        disk::write_all(&disk, &file, 0, bytes, &tree_file.path, WINDOW as usize, |_| Ok(()))?;
        disk.fsync(&file, &tree_file.path)?;
    }
    tree.fsync(&disk)?;
    Ok(FileMetadata { name: name.to_owned(), size: bytes.len() as u64, checksum: Some(Checksum::of(bytes)) })
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

// Early writeback: the kernel starts to write dirty pages long before the fsync.
//
// Without it the kernel collects gigabytes of dirty pages, and the fsync stalls everything else on the disk.
// Invariant: at most two windows of a file, and the one being written, are dirty or under writeback.
// `sync_file_range` makes nothing durable; the fsync at the end does. Where the call is missing, writing goes on
// without it.

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

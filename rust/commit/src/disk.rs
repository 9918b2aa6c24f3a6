//! All system calls on the disk: each one is a method of [`Disk`].
//!
//! [`RealDisk`](crate::RealDisk) makes the calls. Roots, hidden folders and the shard writer are generic over the disk,
//! so that tests can run them on a model that loses power.
//!
//! Invariants: names are relative to open folders, and symbolic links are not followed; `path` is for errors only. A
//! call that a signal interrupts is repeated, except fsync: a failed fsync is final, whatever its reason.

use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::path::Path;

use rustix::io::Errno;

use crate::error::CommitError;

/// The status of a name, or of an open folder or file. Symbolic links are not followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileStat {
    /// Its kind.
    pub kind: EntryKind,
    /// The number of its file system.
    pub device: u64,
    /// Its inode number; together with `device` it identifies a file among all that exist.
    pub inode: u64,
    /// Bytes, for a file.
    pub size: u64,
    /// Bytes that it takes on the disk.
    pub taken: u64,
    /// The id of the user that owns it.
    pub user: u32,
    /// Whether it has the mark of an unfinished folder.
    pub is_marked: bool,
}

impl FileStat {
    /// Whether both belong to the same file or folder.
    pub fn is_same(&self, other: &FileStat) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }
}

/// Room on a disk. What a file system does not tell is [`u64::MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Bytes.
    pub bytes: u64,
    /// Files and folders: some file systems have a fixed number of inodes.
    pub files: u64,
}

/// The kind of a directory entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Folder,
    /// A symbolic link.
    Link,
    /// A device, a pipe or a socket.
    Other,
}

/// The result of a lock request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockOutcome {
    /// The caller holds it until it closes the descriptor or ends.
    Taken,
    /// Another holder excludes it.
    HeldByAnother,
    /// The file system has no such locks.
    Unknown,
}

/// Which other locks a lock excludes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockMode {
    /// Only exclusive ones.
    Shared,
    /// All others.
    Exclusive,
}

/// A disk, or a model of one. Errors are [`CommitError::Io`] with `path` where no other variant says more.
pub trait Disk: Clone + Send + Sync + 'static {
    /// An open folder.
    type Folder: Send + Sync;
    /// An open file.
    type File: Send + Sync;

    // ---- Reading ----

    /// Opens the folder at `path`. This call alone follows symbolic links.
    fn open_path(&self, path: &Path) -> Result<Self::Folder, CommitError>;
    /// Opens the folder `name` in `parent`.
    fn open_folder(&self, parent: &Self::Folder, name: &OsStr, path: &Path) -> Result<Self::Folder, CommitError>;
    /// Opens the file `name` for reading. It never blocks, also not on a pipe.
    fn open_file(&self, folder: &Self::Folder, name: &OsStr, path: &Path) -> Result<Self::File, CommitError>;
    /// Opens the existing file `name` for writing.
    fn open_file_for_writing(
        &self,
        folder: &Self::Folder,
        name: &OsStr,
        path: &Path,
    ) -> Result<Self::File, CommitError>;
    /// Opens the existing file `name` for direct I/O: memory, offset and length of every write must be multiples of the
    /// page size. `None` where the file system has no direct I/O.
    fn open_file_for_direct_writing(
        &self,
        folder: &Self::Folder,
        name: &OsStr,
        path: &Path,
    ) -> Result<Option<Self::File>, CommitError>;
    /// Opens the file `name` for reading and writing. Creates it if it is missing, without access for users outside its
    /// group.
    fn open_or_create_file(&self, folder: &Self::Folder, name: &OsStr, path: &Path) -> Result<Self::File, CommitError>;
    /// The names in a folder, without `.` and `..`.
    fn list(&self, folder: &Self::Folder, path: &Path) -> Result<Vec<OsString>, CommitError>;
    /// The status of `name`; `None` where it does not exist.
    fn look_at(&self, folder: &Self::Folder, name: &OsStr, path: &Path) -> Result<Option<FileStat>, CommitError>;
    /// The status of an open folder.
    fn folder_stat(&self, folder: &Self::Folder, path: &Path) -> Result<FileStat, CommitError>;
    /// The status of an open file.
    fn file_stat(&self, file: &Self::File, path: &Path) -> Result<FileStat, CommitError>;
    /// All bytes of a file.
    fn read(&self, file: &Self::File, path: &Path) -> Result<Vec<u8>, CommitError>;
    /// Reads from `offset` on into `buffer`. Returns the number of bytes, possibly fewer than available; 0 only at the
    /// end.
    fn read_at(&self, file: &Self::File, offset: u64, buffer: &mut [u8], path: &Path) -> Result<usize, CommitError>;
    /// The room that this user may still fill on the file system of a folder.
    fn free_room(&self, folder: &Self::Folder, path: &Path) -> Result<Room, CommitError>;
    /// The target of the symbolic link `name`.
    fn read_link(&self, folder: &Self::Folder, name: &OsStr, path: &Path) -> Result<OsString, CommitError>;
    /// Whether only processes under this kernel can use the file system of `folder`.
    fn is_local(&self, folder: &Self::Folder) -> bool;

    // ---- Locks: the kernel drops them with their holder. None of these calls waits. ----

    /// Locks an open folder as long as the descriptor is open, here or in a child made by `fork`.
    fn lock_folder(&self, folder: &Self::Folder, sharing: LockMode, path: &Path) -> Result<LockOutcome, CommitError>;
    /// Locks an open file in the same way.
    fn lock_file(&self, file: &Self::File, sharing: LockMode, path: &Path) -> Result<LockOutcome, CommitError>;
    /// Releases the lock of [`lock_file`](Disk::lock_file), also in children made by `fork`.
    fn unlock_file(&self, file: &Self::File);
    /// Locks a file that is open for writing, for this process alone: children do not inherit the lock. It is lost when
    /// this process closes any descriptor of that file. Locking again while it is held changes nothing.
    fn lock_file_for_process(&self, file: &Self::File, path: &Path) -> Result<LockOutcome, CommitError>;

    // ---- Changing ----

    /// Makes the folder `name`, with the mode that the umask leaves.
    fn create_folder(&self, parent: &Self::Folder, name: &OsStr, path: &Path) -> Result<(), CommitError>;
    /// Makes the folder `name` for this user alone, with the mark of an unfinished one. Other users cannot open it, and
    /// so cannot lock it.
    fn create_hidden_folder(&self, parent: &Self::Folder, name: &OsStr, path: &Path) -> Result<(), CommitError>;
    /// Gives a hidden folder the mode that the umask leaves; it keeps its mark.
    fn open_to_readers(&self, folder: &Self::Folder, path: &Path) -> Result<(), CommitError>;
    /// Removes the mark of an unfinished folder. Best effort: it changes nothing for those who read the folder.
    fn unmark(&self, folder: &Self::Folder);
    /// Makes the file `name`, with the mode that the umask leaves; fails where the name exists.
    fn create_file(&self, folder: &Self::Folder, name: &OsStr, path: &Path) -> Result<Self::File, CommitError>;
    /// Makes `name` a symbolic link to `target`.
    fn create_link(&self, folder: &Self::Folder, name: &OsStr, target: &OsStr, path: &Path) -> Result<(), CommitError>;
    /// Allocates `length` bytes for a file and sets its length; unwritten bytes read as zeros.
    fn allocate(&self, file: &Self::File, length: u64, path: &Path) -> Result<(), CommitError>;
    /// Writes a prefix of `bytes` at `offset`; returns its length.
    fn write_at(&self, file: &Self::File, offset: u64, bytes: &[u8], path: &Path) -> Result<usize, CommitError>;
    /// Cuts a file to `length`, or extends it with zeros.
    fn truncate(&self, file: &Self::File, length: u64, path: &Path) -> Result<(), CommitError>;
    /// Starts writing `range` of the file to the disk without waiting for it.
    fn start_writeback(&self, file: &Self::File, range: &Range<u64>, path: &Path) -> Result<(), CommitError>;
    /// Waits until `range` of the file was written. An error is reported only here; a later fsync of the same
    /// descriptor does not repeat it.
    fn wait_for_writeback(&self, file: &Self::File, range: &Range<u64>, path: &Path) -> Result<(), CommitError>;
    /// Asks the kernel to drop written pages of a file from the page cache.
    fn evict(&self, file: &Self::File);
    /// Makes the bytes and the length of a file durable, not its name.
    fn fsync(&self, file: &Self::File, path: &Path) -> Result<(), CommitError>;
    /// Makes the names in a folder durable, not what they lead to.
    fn fsync_folder(&self, folder: &Self::Folder, path: &Path) -> Result<(), CommitError>;
    /// Renames. A folder may replace an empty folder; a file or link may replace a file or link.
    fn rename(
        &self,
        from: (&Self::Folder, &OsStr),
        to: (&Self::Folder, &OsStr),
        path: &Path,
    ) -> Result<(), CommitError>;
    /// Renames; fails with `EEXIST` where `to` exists, and with `EINVAL` where the file system cannot do that
    /// atomically.
    fn rename_new(
        &self,
        from: (&Self::Folder, &OsStr),
        to: (&Self::Folder, &OsStr),
        path: &Path,
    ) -> Result<(), CommitError>;
    /// Exchanges two names atomically; fails with `EINVAL` where the file system cannot.
    fn exchange(
        &self,
        one: (&Self::Folder, &OsStr),
        other: (&Self::Folder, &OsStr),
        path: &Path,
    ) -> Result<(), CommitError>;
    /// Removes a file or link.
    fn remove_file(&self, folder: &Self::Folder, name: &OsStr, path: &Path) -> Result<(), CommitError>;
    /// Removes an empty folder.
    fn remove_folder(&self, parent: &Self::Folder, name: &OsStr, path: &Path) -> Result<(), CommitError>;
}

/// The largest single write.
pub(crate) const LARGEST_WRITE: usize = 8 << 20;

/// Writes all of `bytes` at `offset`; calls `wrote` with each range.
pub(crate) fn write_all<D: Disk>(
    disk: &D,
    file: &D::File,
    offset: u64,
    bytes: &[u8],
    path: &Path,
    mut wrote: impl FnMut(Range<u64>) -> Result<(), CommitError>,
) -> Result<(), CommitError> {
    let fits = offset.checked_add(bytes.len() as u64).is_some_and(|end| end <= i64::MAX as u64);
    if !fits {
        return Err(CommitError::io("write", path, Errno::FBIG));
    }
    let (mut offset, mut bytes) = (offset, bytes);
    while !bytes.is_empty() {
        let written = disk.write_at(file, offset, &bytes[..bytes.len().min(LARGEST_WRITE)], path)?;
        if written == 0 {
            // A retry might never write a byte.
            return Err(CommitError::io("write", path, Errno::IO));
        }
        let end = offset + written as u64;
        wrote(offset..end)?;
        offset = end;
        bytes = &bytes[written..];
    }
    Ok(())
}

/// Treats the removal of a missing name as done.
pub(crate) fn absent_is_fine(outcome: Result<(), CommitError>) -> Result<(), CommitError> {
    match outcome {
        Err(error) if error.is(Errno::NOENT) => Ok(()),
        outcome => outcome,
    }
}

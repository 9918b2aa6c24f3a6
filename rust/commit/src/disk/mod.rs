//! The only door to the disk: every system call of this crate that changes it or asks it is a method of [`Disk`].
//!
//! [`RealDisk`] makes the calls. What decides between old and new state (`root/`) takes any disk, so that the tests
//! can put a model of one behind it that loses power. What always holds:
//!
//! 1. Names are taken relative to open folders, and a symbolic link is never followed; `path` is for errors only.
//! 2. Calls that a signal interrupts are made again, with one exception: a failed fsync is final, whatever its
//!    reason, and is never called again on the same descriptor.

#[cfg(target_os = "linux")]
mod mounts;
mod real;

use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::path::Path;

use rustix::io::Errno;

use crate::error::CommitError;

pub use real::RealDisk;

/// What is known of a name, or of an open folder or file, without opening it or following it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// What it is.
    pub kind: EntryKind,
    /// The file system it lies on.
    pub device: u64,
    /// Its number there; with `device` it tells one file from all others that exist at the same time.
    pub number: u64,
    /// Bytes, for a file.
    pub size: u64,
    /// The user it belongs to.
    pub user: u32,
}

impl Status {
    /// Whether both are of the same file or folder.
    pub fn is_same(&self, other: &Status) -> bool {
        (self.device, self.number) == (other.device, other.number)
    }
}

/// What a name leads to.
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

/// A name in a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// The name.
    pub name: OsString,
    /// The [`number`](Status::number) of the folder that has it, on the [`device`](Status::device) of the one it lies in;
    /// `None` for what is no folder, and where that one does not tell for certain.
    pub number: Option<u64>,
}

/// The answer to asking for a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lock {
    /// The caller has it, until it closes what it locked or ends.
    Taken,
    /// Somebody else has one that excludes it.
    HeldByAnother,
    /// The file system has no such locks.
    Unknown,
}

/// Whom a lock excludes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Only those who ask for an exclusive one.
    Shared,
    /// Everybody else.
    Exclusive,
}

/// A disk, or a model of one. Errors are [`CommitError::Io`] with `path` where no other variant says more.
pub trait Disk: Send + Sync {
    /// An open folder.
    type Folder: Send + Sync;
    /// An open file.
    type File: Send + Sync;

    // ---- Looking ----

    /// Opens the folder at `path`, the only call that follows symbolic links.
    fn open_path(&self, path: &Path) -> Result<Self::Folder, CommitError>;
    /// Opens the folder `name` in `parent`.
    fn open_folder(&self, parent: &Self::Folder, name: &OsStr, path: &Path) -> Result<Self::Folder, CommitError>;
    /// Opens the file `name` for reading; never waits, whatever lies there.
    fn open_file(&self, folder: &Self::Folder, name: &OsStr, path: &Path) -> Result<Self::File, CommitError>;
    /// Opens the file `name`, which is there, for writing.
    fn open_file_for_writing(
        &self,
        folder: &Self::Folder,
        name: &OsStr,
        path: &Path,
    ) -> Result<Self::File, CommitError>;
    /// Opens the file `name`, which is there, for writing past the page cache: memory, offset and length of every write
    /// are multiples of the page size. `None` where the file system has no such thing.
    fn open_file_for_direct_writing(
        &self,
        folder: &Self::Folder,
        name: &OsStr,
        path: &Path,
    ) -> Result<Option<Self::File>, CommitError>;
    /// Opens the file `name` for reading and writing, and makes it, with the mode the umask leaves, where it is not
    /// there.
    fn open_or_create_file(&self, folder: &Self::Folder, name: &OsStr, path: &Path) -> Result<Self::File, CommitError>;
    /// The names in a folder, without `.` and `..`.
    fn list(&self, folder: &Self::Folder, path: &Path) -> Result<Vec<OsString>, CommitError>;
    /// The same names, and which folders have them, as far as the folder that they lie in knows.
    fn list_with_numbers(&self, folder: &Self::Folder, path: &Path) -> Result<Vec<Listed>, CommitError>;
    /// What `name` is; `None` where nothing is.
    fn look_at(&self, folder: &Self::Folder, name: &OsStr, path: &Path) -> Result<Option<Status>, CommitError>;
    /// What an open folder is.
    fn folder_status(&self, folder: &Self::Folder, path: &Path) -> Result<Status, CommitError>;
    /// What an open file is.
    fn file_status(&self, file: &Self::File, path: &Path) -> Result<Status, CommitError>;
    /// All bytes of a file.
    fn read(&self, file: &Self::File, path: &Path) -> Result<Vec<u8>, CommitError>;
    /// Reads bytes from `offset` on into `buffer`; returns how many, possibly fewer than there are, 0 at the end only.
    fn read_at(&self, file: &Self::File, offset: u64, buffer: &mut [u8], path: &Path) -> Result<usize, CommitError>;
    /// Bytes that this user may still write to the file system of a folder; `None` where it does not say.
    fn free_space(&self, folder: &Self::Folder, path: &Path) -> Result<Option<u64>, CommitError>;
    /// What the symbolic link `name` says.
    fn read_link(&self, folder: &Self::Folder, name: &OsStr, path: &Path) -> Result<OsString, CommitError>;
    /// Whether every process that uses the file system of `folder` is known to be under this kernel.
    fn is_local(&self, folder: &Self::Folder) -> bool;

    // ---- Locks: dropped by the kernel with who holds them. None of these calls waits. ----

    /// Locks an open folder, as long as the descriptor is open, here or in a child made by `fork`.
    fn lock_folder(&self, folder: &Self::Folder, sharing: Sharing, path: &Path) -> Result<Lock, CommitError>;
    /// Locks an open file in the same way.
    fn lock_file(&self, file: &Self::File, sharing: Sharing, path: &Path) -> Result<Lock, CommitError>;
    /// Gives up what [`lock_file`](Disk::lock_file) took, for children made by `fork` too.
    fn unlock_file(&self, file: &Self::File);
    /// Locks a file that is open for writing for this process alone: children do not inherit it. It is lost when this
    /// process closes any descriptor of that file; asking again when it is held changes nothing.
    fn lock_file_for_process(&self, file: &Self::File, path: &Path) -> Result<Lock, CommitError>;

    // ---- Changing ----

    /// Makes the folder `name`, with the mode the umask leaves.
    fn create_folder(&self, parent: &Self::Folder, name: &OsStr, path: &Path) -> Result<(), CommitError>;
    /// Makes the file `name`, with the mode the umask leaves; fails where anything of that name exists.
    fn create_file(&self, folder: &Self::Folder, name: &OsStr, path: &Path) -> Result<Self::File, CommitError>;
    /// Makes `name` a symbolic link that says `target`.
    fn create_link(&self, folder: &Self::Folder, name: &OsStr, target: &OsStr, path: &Path) -> Result<(), CommitError>;
    /// Gives a file room for `length` bytes on the disk, all zeros where nothing was written, and that length.
    fn allocate(&self, file: &Self::File, length: u64, path: &Path) -> Result<(), CommitError>;
    /// Writes a prefix of `bytes` at `offset`; returns how many bytes, possibly fewer than asked.
    fn write_at(&self, file: &Self::File, offset: u64, bytes: &[u8], path: &Path) -> Result<usize, CommitError>;
    /// Gives a file that length: cuts it off, or fills it up with zeros.
    fn truncate(&self, file: &Self::File, length: u64, path: &Path) -> Result<(), CommitError>;
    /// Starts writing `range` of the file to the disk without waiting for it.
    fn start_writeback(&self, file: &Self::File, range: &Range<u64>, path: &Path) -> Result<(), CommitError>;
    /// Waits until `range` of the file was written. An error here is the only report of it: a later fsync of the same
    /// descriptor does not repeat it.
    fn wait_for_writeback(&self, file: &Self::File, range: &Range<u64>, path: &Path) -> Result<(), CommitError>;
    /// Drops from memory what of a file is on the disk already. A wish: nothing tells whether it was heard.
    fn evict(&self, file: &Self::File);
    /// Makes the bytes and the length of a file durable; not its name.
    fn fsync(&self, file: &Self::File, path: &Path) -> Result<(), CommitError>;
    /// Makes the names in a folder durable; not what they lead to.
    fn fsync_folder(&self, folder: &Self::Folder, path: &Path) -> Result<(), CommitError>;
    /// Renames. A folder takes the place of an empty folder, anything else that of anything but a folder.
    fn rename(
        &self,
        from: (&Self::Folder, &OsStr),
        to: (&Self::Folder, &OsStr),
        path: &Path,
    ) -> Result<(), CommitError>;
    /// Renames; fails with `EEXIST` where `to` exists, and with `EINVAL` where the file system cannot tell in one step.
    fn rename_new(
        &self,
        from: (&Self::Folder, &OsStr),
        to: (&Self::Folder, &OsStr),
        path: &Path,
    ) -> Result<(), CommitError>;
    /// Exchanges two names in one step; fails with `EINVAL` where the file system cannot.
    fn exchange(
        &self,
        one: (&Self::Folder, &OsStr),
        other: (&Self::Folder, &OsStr),
        path: &Path,
    ) -> Result<(), CommitError>;
    /// Removes the name of what is not a folder.
    fn remove_file(&self, folder: &Self::Folder, name: &OsStr, path: &Path) -> Result<(), CommitError>;
    /// Removes an empty folder.
    fn remove_folder(&self, parent: &Self::Folder, name: &OsStr, path: &Path) -> Result<(), CommitError>;
}

/// Whether `name` in `parent` is the folder that is open as `folder`.
pub(crate) fn leads_to<D: Disk>(
    disk: &D,
    parent: &D::Folder,
    name: &OsStr,
    folder: &D::Folder,
    path: &Path,
) -> Result<bool, CommitError> {
    let Some(named) = disk.look_at(parent, name, path)? else {
        return Ok(false);
    };
    Ok(named.is_same(&disk.folder_status(folder, path)?))
}

/// Writes all of `bytes` at `offset`, in pieces of at most `piece` bytes; `wrote` is told of each range.
pub(crate) fn write_all<D: Disk>(
    disk: &D,
    file: &D::File,
    offset: u64,
    bytes: &[u8],
    path: &Path,
    piece: usize,
    mut wrote: impl FnMut(Range<u64>) -> Result<(), CommitError>,
) -> Result<(), CommitError> {
    let fits = offset.checked_add(bytes.len() as u64).is_some_and(|end| end <= i64::MAX as u64);
    if !fits {
        return Err(CommitError::io("write", path, Errno::FBIG));
    }
    let (mut offset, mut bytes) = (offset, bytes);
    while !bytes.is_empty() {
        let written = disk.write_at(file, offset, &bytes[..bytes.len().min(piece)], path)?;
        if written == 0 {
            // Not an end of file: nothing says that trying again would ever write a byte.
            return Err(CommitError::io("write", path, Errno::IO));
        }
        let end = offset + written as u64;
        wrote(offset..end)?;
        offset = end;
        bytes = &bytes[written..];
    }
    Ok(())
}

/// A removal where there was nothing is one that is done.
pub(crate) fn absent_is_fine(outcome: Result<(), CommitError>) -> Result<(), CommitError> {
    match outcome {
        Err(error) if error.is(Errno::NOENT) => Ok(()),
        outcome => outcome,
    }
}

//! The files of a checkpoint that no shard writer writes: small ones, and those that others wrote.

use std::ops::ControlFlow;
use std::path::Path;

use rustix::io::Errno;

use crate::disk::{self, Disk, EntryKind, RealDisk};
use crate::error::CommitError;
use crate::file_metadata::FileMetadata;
use crate::reading::{self, Source, Unread};
use crate::tree::Tree;
use crate::writeback::WINDOW;
use crate::{Checksum, name};

/// Writes `bytes` as the new file `name`, relative to `folder`, and makes it and the folders it lies in durable.
///
/// Folders that the name contains are made. Modes are those that the umask leaves.
///
/// # Errors
/// [`CommitError::InvalidWrite`] for a name that cannot be a checkpoint's file, [`CommitError::FileExists`],
/// [`CommitError::ParentMissing`] and [`CommitError::Io`].
pub fn write_small_file(folder: impl AsRef<Path>, name: &str, bytes: &[u8]) -> Result<FileMetadata, CommitError> {
    let disk = RealDisk;
    let (tree, places) = Tree::make(&disk, folder.as_ref(), std::iter::once(name))?;
    for place in &places {
        let file = tree.create(&disk, place)?;
        disk::write_all(&disk, &file, 0, bytes, &place.path, WINDOW as usize, |_| Ok(()))?;
        disk.fsync(&file, &place.path)?;
    }
    tree.fsync(&disk)?;
    Ok(FileMetadata { name: name.to_owned(), size: bytes.len() as u64, checksum: Some(Checksum::of(bytes)) })
}

/// Makes a file that another wrote durable, and its name; then reads it for its checksum. The name in the facts is the
/// last part of `path`. `go_on` is asked now and then, with how many bytes were read and how many there are.
///
/// # Errors
/// [`CommitError::InvalidName`] and [`CommitError::Io`], also for what is no regular file (`EINVAL`) and for one that
/// becomes shorter meanwhile (`ESTALE`); [`CommitError::Interrupted`].
pub fn checksum_file(
    path: impl AsRef<Path>,
    go_on: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<FileMetadata, CommitError> {
    let disk = RealDisk;
    let path = path.as_ref();
    let (parent_path, leaf) = name::split(path)?;
    let Some(name) = leaf.to_str() else {
        let reason = "its name is not UTF-8";
        return Err(CommitError::InvalidName { path: path.to_path_buf(), reason });
    };
    let parent = disk.open_path(&parent_path)?;
    let file = disk.open_file(&parent, &leaf, path)?;
    let status = disk.file_status(&file, path)?;
    if status.kind != EntryKind::File {
        return Err(CommitError::io("read as a file of a checkpoint", path, Errno::INVAL));
    }
    disk.fsync(&file, path)?;
    disk.fsync_folder(&parent, &parent_path)?;
    let sources = [Source { folder: &parent, leaf: &leaf, path, start: 0, size: status.size }];
    let mut checksum = Checksum::EMPTY;
    for outcome in reading::checksums(&disk, &sources, path, go_on)? {
        checksum = outcome.map_err(|unread| match unread {
            Unread::Short => CommitError::io("read to its end", path, Errno::STALE),
            Unread::Failed(error) => error,
        })?;
    }
    Ok(FileMetadata { name: name.to_owned(), size: status.size, checksum: Some(checksum) })
}

//! Checkpoint files that no shard writer writes: small ones, and files that another program wrote.

use std::ops::ControlFlow;
use std::path::Path;

use rustix::io::Errno;

use crate::checksum::Checksum;
use crate::disk::{self, Disk, EntryKind, RealDisk};
use crate::error::CommitError;
use crate::files::file_checksums::{self, ChecksumFailure, FileToSum};
use crate::files::folder_tree::FolderTree;
use crate::files::writeback::WINDOW;
use crate::hidden_names;
use crate::manifest::FileMetadata;

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
    for outcome in file_checksums::checksums(&disk, &sources, path, on_progress)? {
        checksum = outcome.map_err(|failure| match failure {
            ChecksumFailure::Short => CommitError::io("read to its end", path, Errno::STALE),
            ChecksumFailure::Failed(error) => error,
        })?;
    }
    Ok(FileMetadata { name: name.to_owned(), size: stat.size, checksum: Some(checksum) })
}

//! Removes the contents of a folder.
//!
//! Invariant: everything is removed relative to open folders and never through a symbolic link or a mount point, so
//! nothing outside the folder can be lost.

use std::ffi::OsStr;
use std::path::Path;

use rustix::io::Errno;

use crate::disk::{Disk, absent_is_fine};
use crate::error::CommitError;

/// Removes everything in an open folder.
pub(crate) fn remove_contents<D: Disk>(disk: &D, folder: &D::Folder, path: &Path) -> Result<(), CommitError> {
    for name in disk.list(folder, path)? {
        let inner = path.join(&name);
        match disk.remove_file(folder, &name, &inner) {
            // Linux answers the first, POSIX the second.
            Err(error) if error.is(Errno::ISDIR) || error.is(Errno::PERM) => {
                remove_inner_folder(disk, folder, &name, &inner, error)?;
            }
            outcome => absent_is_fine(outcome)?,
        }
    }
    Ok(())
}

fn remove_inner_folder<D: Disk>(
    disk: &D,
    folder: &D::Folder,
    name: &OsStr,
    path: &Path,
    not_removed: CommitError,
) -> Result<(), CommitError> {
    let inner = match disk.open_folder(folder, name, path) {
        Err(error) if error.is(Errno::NOENT) => return Ok(()),
        // It is a file after all, which may not be removed.
        Err(error) if error.is(Errno::NOTDIR) || error.is(Errno::LOOP) => return Err(not_removed),
        outcome => outcome?,
    };
    if disk.folder_stat(&inner, path)?.device != disk.folder_stat(folder, path)?.device {
        return Err(CommitError::io("remove the mounted file system at", path, Errno::BUSY));
    }
    remove_contents(disk, &inner, path)?;
    absent_is_fine(disk.remove_folder(folder, name, path))
}

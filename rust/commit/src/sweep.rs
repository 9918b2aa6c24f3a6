//! Removing what dead writers left behind.
//!
//! Invariants: only hidden folders of this user are candidates; each is removed only under the rules of `claim.rs`;
//! everything is removed relative to open directories and never through a symbolic link or a mount point, so that
//! nothing outside the hidden folder can be lost.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Dir, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::geteuid;

use crate::claim::{self, Lock};
use crate::disk;
use crate::error::CommitError;
use crate::name;

/// What a sweep found.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct SweepReport {
    /// Unfinished folders of dead writers, removed.
    pub removed: Vec<PathBuf>,
    /// Unfinished folders left alone: their writers live, or it cannot be told whether they do.
    pub live: Vec<PathBuf>,
    /// What could not be looked at or removed. The next sweep tries again.
    pub failed: Vec<CommitError>,
}

/// Removes the unfinished folders that dead writers left in `parent`, and nothing else.
///
/// [`Folder::create`](crate::Folder::create) does this by itself; call it to free the space when no new folder is
/// to be written. Any number of processes may sweep at once.
///
/// # Errors
/// When `parent` cannot be opened or listed. A single folder that cannot be removed is no error; it is
/// in the report.
pub fn sweep(parent: impl AsRef<Path>) -> Result<SweepReport, CommitError> {
    let parent = parent.as_ref();
    let directory = open_parent(parent)?;
    let mut report = SweepReport::default();
    sweep_into(&directory, parent, &mut report)?;
    Ok(report)
}

/// Opens the folder that holds targets.
pub(crate) fn open_parent(path: &Path) -> Result<OwnedFd, CommitError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    retry_on_intr(|| rustix::fs::openat(CWD, path, flags, Mode::empty())).map_err(|errno| match errno {
        Errno::NOENT => CommitError::ParentMissing { path: path.to_path_buf() },
        Errno::NOTDIR => CommitError::NotADirectory { path: path.to_path_buf() },
        _ => CommitError::io("open folder", path, errno),
    })
}

/// The names in an open directory, without `.` and `..`.
pub(crate) fn list(directory: impl AsFd, path: &Path) -> Result<Vec<OsString>, CommitError> {
    let failed = |errno| CommitError::io("list folder", path, errno);
    let mut names = Vec::new();
    for entry in Dir::read_from(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name != "." && name != ".." {
            names.push(name.to_os_string());
        }
    }
    Ok(names)
}

/// Sweeps an open parent; fails only when it cannot be listed.
pub(crate) fn sweep_into(parent: &OwnedFd, path: &Path, report: &mut SweepReport) -> Result<(), CommitError> {
    for name in list(parent, path)? {
        let Some(tag) = name::tag_of(&name) else {
            continue;
        };
        let folder = path.join(&name);
        match sweep_one(parent, &name, tag, &folder) {
            Ok(Fate::Removed) => report.removed.push(folder),
            Ok(Fate::Live) => report.live.push(folder),
            Ok(Fate::NotOurs) => {}
            Err(error) => report.failed.push(error),
        }
    }
    Ok(())
}

enum Fate {
    Removed,
    Live,
    /// Not an unfinished folder of this user, or gone meanwhile.
    NotOurs,
}

fn sweep_one(parent: &OwnedFd, name: &OsStr, tag: u32, path: &Path) -> Result<Fate, CommitError> {
    let directory = match claim::open_folder(parent, name, path) {
        // Gone, a file, or a symbolic link (which Linux answers with either of the last two).
        Err(error) if error.is(Errno::NOENT) || error.is(Errno::NOTDIR) || error.is(Errno::LOOP) => {
            return Ok(Fate::NotOurs);
        }
        // Another user's folder may be closed to this one; this user's own should not be.
        Err(error) if error.is(Errno::ACCESS) && !is_own(parent, name) => return Ok(Fate::NotOurs),
        outcome => outcome?,
    };
    let status = claim::stat(&directory, path)?;
    let is_mount_point = status.st_dev != claim::stat(parent, path)?.st_dev;
    if status.st_uid != geteuid().as_raw() || is_mount_point {
        return Ok(Fate::NotOurs);
    }
    // Before the lock is taken: not even for an instant may it be kept from a writer whose state it does not tell.
    if !claim::is_local(&directory) && Some(tag) != claim::local_tag(parent, path)? {
        return Ok(Fate::Live);
    }
    match claim::try_lock(&directory, path) {
        Ok(Lock::Taken) => {}
        Ok(Lock::HeldByAnother | Lock::Unknown) | Err(_) => return Ok(Fate::Live),
    }
    if remove_locked(parent, name, &directory, path)? { Ok(Fate::Removed) } else { Ok(Fate::NotOurs) }
}

fn is_own(parent: &OwnedFd, name: &OsStr) -> bool {
    rustix::fs::statat(parent, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|status| status.st_uid == geteuid().as_raw())
}

/// Removes a hidden folder whose lock the caller holds; `false`, and nothing removed, when its hidden name leads
/// to it no more.
pub(crate) fn remove_locked(
    parent: impl AsFd,
    name: &OsStr,
    directory: &OwnedFd,
    path: &Path,
) -> Result<bool, CommitError> {
    if !claim::leads_to(&parent, name, directory, path)? {
        return Ok(false);
    }
    remove_contents(directory, path)?;
    absent_is_fine(disk::remove_folder(&parent, name, path))?;
    Ok(true)
}

fn remove_contents(directory: &OwnedFd, path: &Path) -> Result<(), CommitError> {
    for name in list(directory, path)? {
        let inner = path.join(&name);
        match disk::remove_file(directory, &name, &inner) {
            // Linux says the one, POSIX the other.
            Err(error) if error.is(Errno::ISDIR) || error.is(Errno::PERM) => {
                remove_inner_folder(directory, &name, &inner, error)?;
            }
            outcome => absent_is_fine(outcome)?,
        }
    }
    Ok(())
}

fn remove_inner_folder(
    directory: &OwnedFd,
    name: &OsStr,
    path: &Path,
    not_removed: CommitError,
) -> Result<(), CommitError> {
    let inner = match claim::open_folder(directory, name, path) {
        Err(error) if error.is(Errno::NOENT) => return Ok(()),
        // A file after all, which may not be removed.
        Err(error) if error.is(Errno::NOTDIR) || error.is(Errno::LOOP) => return Err(not_removed),
        outcome => outcome?,
    };
    if claim::stat(&inner, path)?.st_dev != claim::stat(directory, path)?.st_dev {
        return Err(CommitError::io("remove the mounted file system at", path, Errno::BUSY));
    }
    remove_contents(&inner, path)?;
    absent_is_fine(disk::remove_folder(directory, name, path))
}

fn absent_is_fine(outcome: Result<(), CommitError>) -> Result<(), CommitError> {
    match outcome {
        Err(error) if error.is(Errno::NOENT) => Ok(()),
        outcome => outcome,
    }
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the test plays the writer")]
mod tests {
    use super::*;

    #[test]
    fn a_folder_published_while_it_was_being_swept_is_left_alone() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join(".plan.0000000000000001.incomplete");
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("file"), b"keep").unwrap();
        let name = path.file_name().unwrap();
        let parent_directory = open_parent(parent.path()).unwrap();
        let directory = claim::open_folder(&parent_directory, name, &path).unwrap();
        // Its writer publishes it and ends, between the sweeper's open and its lock.
        let target = parent.path().join("plan");
        std::fs::rename(&path, &target).unwrap();
        assert!(matches!(claim::try_lock(&directory, &path), Ok(Lock::Taken)));
        assert!(!remove_locked(&parent_directory, name, &directory, &path).unwrap());
        // Another folder under the old name is not the one that is locked either.
        std::fs::create_dir(&path).unwrap();
        assert!(!remove_locked(&parent_directory, name, &directory, &path).unwrap());
        assert!(path.exists());
        assert_eq!(std::fs::read(target.join("file")).unwrap(), b"keep");
    }
}

//! Removes the hidden folders that dead writers left.
//!
//! Invariants: only hidden folders of this user are candidates; each is removed only under the rules of
//! `unfinished_folder.rs`; nothing outside them can be lost (see `remove_contents.rs`).

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::geteuid;

use crate::disk::remove_contents::remove_contents;
use crate::disk::{Disk, LockMode, LockOutcome, RealDisk, absent_is_fine, leads_to};
use crate::error::CommitError;
use crate::folders::unfinished_folder;
use crate::hidden_names;

/// The result of a sweep.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct SweepReport {
    /// Unfinished folders of dead writers, removed.
    pub removed: Vec<PathBuf>,
    /// Unfinished folders that stay: their writers live, or that is unknown.
    pub live: Vec<PathBuf>,
    /// Folders that could not be examined or removed. The next sweep tries again.
    pub failed: Vec<CommitError>,
}

/// Removes the unfinished folders that dead writers left in `parent`, and nothing else.
///
/// [`AtomicFolder::create`](crate::AtomicFolder::create) does this too; call it to free space without writing a folder.
/// Any number of processes may sweep at once.
///
/// # Errors
/// When `parent` cannot be opened or listed. A folder that cannot be removed is listed in the report.
pub fn sweep(parent: impl AsRef<Path>) -> Result<SweepReport, CommitError> {
    let parent = parent.as_ref();
    let folder = RealDisk.open_path(parent)?;
    let mut report = SweepReport::default();
    sweep_into(&folder, parent, &mut report)?;
    Ok(report)
}

/// Sweeps an open parent; fails only when it cannot be listed.
pub(crate) fn sweep_into(parent: &OwnedFd, path: &Path, report: &mut SweepReport) -> Result<(), CommitError> {
    for name in RealDisk.list(parent, path)? {
        let Some(tag) = hidden_names::tag_of(&name) else {
            continue;
        };
        let inner = path.join(&name);
        match sweep_one(parent, &name, tag, &inner) {
            Ok(SweepOutcome::Removed) => report.removed.push(inner),
            Ok(SweepOutcome::Live) => report.live.push(inner),
            Ok(SweepOutcome::NotOurs) => {}
            Err(error) => report.failed.push(error),
        }
    }
    Ok(())
}

enum SweepOutcome {
    Removed,
    Live,
    /// The folder is no unfinished folder of this user, or is gone meanwhile.
    NotOurs,
}

fn sweep_one(parent: &OwnedFd, name: &OsStr, tag: u32, path: &Path) -> Result<SweepOutcome, CommitError> {
    let folder = match RealDisk.open_folder(parent, name, path) {
        // Gone, a file, or a symbolic link (which Linux answers with either of the last two).
        Err(error) if error.is(Errno::NOENT) || error.is(Errno::NOTDIR) || error.is(Errno::LOOP) => {
            return Ok(SweepOutcome::NotOurs);
        }
        // Another user's folder may be closed to this one; this user's own should not be.
        Err(error) if error.is(Errno::ACCESS) && !is_own(parent, name) => return Ok(SweepOutcome::NotOurs),
        outcome => outcome?,
    };
    let stat = RealDisk.folder_stat(&folder, path)?;
    let is_mount_point = stat.device != RealDisk.folder_stat(parent, path)?.device;
    if stat.user != geteuid().as_raw() || is_mount_point || !RealDisk.is_unfinished(&folder, path)? {
        return Ok(SweepOutcome::NotOurs);
    }
    // Before the lock is taken: it must not be withheld from a writer of another machine even for an instant.
    if !RealDisk.is_local(&folder) && Some(tag) != unfinished_folder::local_tag(parent, path)? {
        return Ok(SweepOutcome::Live);
    }
    match RealDisk.lock_folder(&folder, LockMode::Exclusive, path) {
        Ok(LockOutcome::Taken) => {}
        Ok(LockOutcome::HeldByAnother | LockOutcome::Unknown) | Err(_) => return Ok(SweepOutcome::Live),
    }
    if remove_locked(parent, name, &folder, path)? { Ok(SweepOutcome::Removed) } else { Ok(SweepOutcome::NotOurs) }
}

fn is_own(parent: &OwnedFd, name: &OsStr) -> bool {
    let stat = RealDisk.look_at(parent, name, Path::new(name));
    matches!(stat, Ok(Some(stat)) if stat.user == geteuid().as_raw())
}

/// Removes a hidden folder whose lock the caller holds. Returns `false`, and removes nothing, when the hidden name no
/// longer leads to it.
pub(crate) fn remove_locked(
    parent: &OwnedFd,
    name: &OsStr,
    folder: &OwnedFd,
    path: &Path,
) -> Result<bool, CommitError> {
    if !leads_to(&RealDisk, parent, name, folder, path)? {
        return Ok(false);
    }
    remove_contents(&RealDisk, folder, path)?;
    absent_is_fine(RealDisk.remove_folder(parent, name, path))?;
    Ok(true)
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
        let parent_folder = RealDisk.open_path(parent.path()).unwrap();
        let folder = RealDisk.open_folder(&parent_folder, name, &path).unwrap();
        // Its writer publishes it and ends, between the sweeper's open and its lock.
        let target = parent.path().join("plan");
        std::fs::rename(&path, &target).unwrap();
        assert_eq!(RealDisk.lock_folder(&folder, LockMode::Exclusive, &path).unwrap(), LockOutcome::Taken);
        assert!(!remove_locked(&parent_folder, name, &folder, &path).unwrap());
        // Another folder under the old name is not the one that is locked either.
        std::fs::create_dir(&path).unwrap();
        assert!(!remove_locked(&parent_folder, name, &folder, &path).unwrap());
        assert!(path.exists());
        assert_eq!(std::fs::read(target.join("file")).unwrap(), b"keep");
    }
}

//! The hidden folder of a writer, and the lock that shows whether the writer lives.
//!
//! A writer holds `flock(LOCK_SH)` on its hidden folder from before the first file until the folder is published or
//! removed. Other processes that write into it hold one too; a sweep takes `LOCK_EX`. The kernel drops the lock with the last descriptor, however the writer ends.
//!
//! Invariants:
//!
//! 1. A folder is removed only under its lock, after a check that its hidden name still leads to it. A folder that was
//!    published meanwhile is therefore never removed.
//! 2. Between `mkdir` and `flock` a new folder looks dead, and a sweep may take it. The writer therefore makes the
//!    check of invariant 1 too, and otherwise starts again under another name.
//! 3. When in doubt a folder counts as live: where the file system has no such locks, and where the writer may run on
//!    another machine. One kernel knows a lock on a directory only within one mounted file system, so the hidden name
//!    carries a tag of both. On file systems that may be shared, a folder with another tag is left alone.
//!
//! 4. From its creation until it is published, the folder has the sticky bit, which has no other effect on it. A sweep
//!    removes no folder without. Otherwise another user who may write to the parent could rename a folder of this user
//!    to a hidden name, and a sweep would remove it. Where a file system has no such bit, leftovers stay.
//!
//! A process made by `fork` shares the lock: the folder counts as live until the child ends or calls `exec`.

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::io::{Errno, retry_on_intr};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::disk::{Disk, LockMode, LockOutcome, RealDisk, leads_to};
use crate::error::CommitError;
use crate::hidden_names;

/// Names tried for one hidden folder. An attempt fails only if a sweep comes between two system calls.
const TRIES: usize = 256;

/// A hidden folder and the lock on it.
#[derive(Debug)]
pub(crate) struct UnfinishedFolder {
    pub(crate) folder: OwnedFd,
    pub(crate) name: OsString,
    pub(crate) path: PathBuf,
}

impl UnfinishedFolder {
    /// Makes a new hidden folder for `target_name` in `parent`, and locks it.
    pub(crate) fn create(parent: &OwnedFd, parent_path: &Path, target_name: &OsStr) -> Result<Self, CommitError> {
        // The tag 0 belongs to no machine.
        let tag = local_tag(parent, parent_path)?.unwrap_or(0);
        for _ in 0..TRIES {
            let name = hidden_names::hidden(target_name, tag, random(parent_path)?);
            let path = parent_path.join(&name);
            match RealDisk.create_unfinished_folder(parent, &name, &path) {
                Err(error) if error.is(Errno::EXIST) => continue,
                Err(error) => {
                    abandon(parent, &name, &path);
                    // The message names the parent: the caller does not know the hidden name.
                    return Err(error.about("create a folder in", parent_path));
                }
                Ok(()) => {}
            }
            match Self::lock_new(parent, &name, &path) {
                Ok(Some(folder)) => {
                    return Ok(UnfinishedFolder { folder, name, path });
                }
                Ok(None) => continue,
                Err(error) => {
                    abandon(parent, &name, &path);
                    return Err(error);
                }
            }
        }
        Err(CommitError::io("keep an unfinished folder in", parent_path, Errno::AGAIN))
    }

    /// `None` when a sweep took the folder first.
    fn lock_new(parent: &OwnedFd, name: &OsStr, path: &Path) -> Result<Option<OwnedFd>, CommitError> {
        let folder = match RealDisk.open_folder(parent, name, path) {
            Err(error) if error.is(Errno::NOENT) => return Ok(None),
            outcome => outcome?,
        };
        Ok(is_kept(parent, name, &folder, path)?.then_some(folder))
    }
}

/// Locks a new folder; `false` when a sweep was faster.
fn is_kept(parent: &OwnedFd, name: &OsStr, folder: &OwnedFd, path: &Path) -> Result<bool, CommitError> {
    match RealDisk.lock_folder(folder, LockMode::Shared, path)? {
        LockOutcome::HeldByAnother => Ok(false),
        LockOutcome::Taken | LockOutcome::Unknown => leads_to(&RealDisk, parent, name, folder, path),
    }
}

/// Removes a new, empty folder after a failure. The caller reports the error that led here.
fn abandon(parent: &OwnedFd, name: &OsStr, path: &Path) {
    let _ = RealDisk.remove_folder(parent, name, path);
}

fn random(path: &Path) -> Result<u32, CommitError> {
    let mut bytes = [0u8; 4];
    // Four bytes arrive completely or not at all.
    retry_on_intr(|| getrandom(&mut bytes, GetRandomFlags::empty()))
        .map_err(|errno| CommitError::io("draw a random name in", path, errno))?;
    Ok(u32::from_ne_bytes(bytes))
}

/// The tag of folders that this kernel, since its boot, made on the file system of `directory`; `None` where the kernel
/// has no boot id.
///
/// It combines the random boot id with the device number: two mounts of one network export do not share locks even on
/// one machine.
pub(crate) fn local_tag(folder: &OwnedFd, path: &Path) -> Result<Option<u32>, CommitError> {
    let device = RealDisk.folder_stat(folder, path)?.device as u32;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let boot = boot.get(..8).and_then(|digits| u32::from_str_radix(digits, 16).ok());
    // An odd factor near 2^32 over the golden ratio spreads small device numbers over all bits.
    Ok(boot.map(|boot| boot ^ device.wrapping_mul(0x9e37_79b1)))
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests play the writer and the sweeper")]
mod tests {
    use super::*;

    fn lock(folder: &OwnedFd, path: &Path) -> LockOutcome {
        RealDisk.lock_folder(folder, LockMode::Exclusive, path).unwrap()
    }

    /// A new folder between `mkdir` and `flock`.
    fn new_folder() -> (tempfile::TempDir, OwnedFd, PathBuf, OwnedFd) {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join(".plan.0000000000000001.incomplete");
        std::fs::create_dir(&path).unwrap();
        let parent_folder = RealDisk.open_path(parent.path()).unwrap();
        let folder = RealDisk.open_folder(&parent_folder, path.file_name().unwrap(), &path).unwrap();
        (parent, parent_folder, path, folder)
    }

    #[test]
    fn a_new_folder_is_kept_without_a_sweep() {
        let (_parent, parent_folder, path, folder) = new_folder();
        let name = path.file_name().unwrap();
        assert!(is_kept(&parent_folder, name, &folder, &path).unwrap());
        let again = RealDisk.open_folder(&parent_folder, name, &path).unwrap();
        assert_eq!(lock(&again, &path), LockOutcome::HeldByAnother);
    }

    #[test]
    fn a_new_folder_that_a_sweep_is_removing_is_given_up() {
        let (_parent, parent_folder, path, folder) = new_folder();
        let name = path.file_name().unwrap();
        let sweeper = RealDisk.open_folder(&parent_folder, name, &path).unwrap();
        assert_eq!(lock(&sweeper, &path), LockOutcome::Taken);
        assert!(!is_kept(&parent_folder, name, &folder, &path).unwrap());
    }

    #[test]
    fn a_new_folder_that_a_sweep_removed_is_given_up() {
        let (_parent, parent_folder, path, folder) = new_folder();
        let name = path.file_name().unwrap();
        std::fs::remove_dir(&path).unwrap();
        assert!(!is_kept(&parent_folder, name, &folder, &path).unwrap());
        // Another folder of that name is not mistaken for it.
        std::fs::create_dir(&path).unwrap();
        assert!(!is_kept(&parent_folder, name, &folder, &path).unwrap());
    }
}

//! The one way in which a folder appears under its name: it is written under a hidden name, and renamed.
//!
//! The order is: fsync of every file, fsync of the folder, rename, fsync of the parent. Each writer of a file syncs it.
//! [`AtomicFolder`](crate::AtomicFolder) and checkpoints of a [`Root`](crate::root::Root) are hidden folders until they
//! are published.
//!
//! A writer holds `flock(LOCK_SH)` on its hidden folder from before the first file until the folder is published or
//! removed. Other processes that write into it hold one too; a sweep takes `LOCK_EX`. The kernel drops the lock with the
//! last descriptor, however the writer ends.
//!
//! Invariants:
//!
//! 1. A sweep removes a folder only under its lock, after a check that its hidden name still leads to it. A folder that
//!    was published meanwhile is therefore never removed.
//! 2. Between `mkdir` and `flock` a new folder looks dead, and a sweep may take it. The writer therefore makes the
//!    check of invariant 1 too, and otherwise starts again under another name.
//! 3. When in doubt a folder counts as live: where the file system has no such locks, and where the writer may run on
//!    another machine. One kernel knows a lock on a directory only within one mounted file system, so the hidden name
//!    carries a tag of both. On file systems that may be shared, a folder with another tag is left alone.
//! 4. From its creation until it is published, the folder has a mark: the sticky bit, which has no other effect on it. A
//!    sweep removes no folder without. Otherwise another user who may write to the parent could rename a folder of this
//!    user to a hidden name, and a sweep would remove it. Where a file system has no such bit, leftovers stay.
//! 5. A sweep looks only at hidden folders of this user.
//!
//! A process made by `fork` shares the lock: the folder counts as live until the child ends or calls `exec`.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use rustix::io::{Errno, retry_on_intr};
use rustix::process::geteuid;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::RealDisk;
use crate::disk::{Disk, LockMode, LockOutcome, absent_is_fine};
use crate::error::CommitError;
use crate::hidden_names;
use crate::open_folder::{OpenFolder, Replacing};

/// Names tried for one hidden folder. An attempt fails only if a sweep comes between two system calls.
const TRIES: usize = 256;

/// A folder that is being written, and the lock on it.
pub(crate) struct HiddenFolder<D: Disk> {
    pub(crate) folder: OpenFolder<D>,
    pub(crate) name: OsString,
}

impl<D: Disk> HiddenFolder<D> {
    /// Makes and locks the folder `name` in `parent`.
    pub(crate) fn create(parent: &OpenFolder<D>, name: &OsStr) -> Result<Self, CommitError> {
        Self::try_create(parent, name)?
            .ok_or_else(|| CommitError::io("keep an unfinished folder in", &parent.path, Errno::AGAIN))
    }

    /// `None` when a sweep took the folder first.
    fn try_create(parent: &OpenFolder<D>, name: &OsStr) -> Result<Option<Self>, CommitError> {
        let path = parent.path.join(name);
        let locked = match parent.disk.create_hidden_folder(&parent.folder, name, &path) {
            Err(error) if error.is(Errno::EXIST) => return Err(error),
            created => created.and_then(|()| lock_new(parent, name)).inspect_err(|_| {
                // It is empty, if it is there. The caller reports the error that led here.
                let _ = parent.disk.remove_folder(&parent.folder, name, &path);
            }),
        };
        Ok(locked?.map(|folder| Self { folder, name: name.to_owned() }))
    }

    /// Whether the hidden name still leads to it.
    pub(crate) fn is_in(&self, parent: &OpenFolder<D>) -> Result<bool, CommitError> {
        parent.has(&self.name, &self.folder)
    }

    /// Makes the names in it and in its inner folders durable, and lets others read it.
    pub(crate) fn complete(&self) -> Result<(), CommitError> {
        self.folder.disk.open_to_readers(&self.folder.folder, &self.folder.path)?;
        self.folder.sync_all()
    }

    /// Gives it its final name, which is durable only after [`OpenFolder::sync_name`].
    pub(crate) fn rename(
        &self,
        parent: &OpenFolder<D>,
        target: &OsStr,
        replacing: Replacing,
    ) -> Result<(), CommitError> {
        parent.rename(&self.name, target, replacing)?;
        self.folder.disk.unmark(&self.folder.folder);
        Ok(())
    }
}

impl HiddenFolder<RealDisk> {
    /// Makes and locks a folder for `target` in `parent`, under a hidden name that nothing else has.
    pub(crate) fn create_for(parent: &OpenFolder<RealDisk>, target: &OsStr) -> Result<Self, CommitError> {
        // The tag 0 belongs to no machine.
        let tag = local_tag(parent)?.unwrap_or(0);
        for _ in 0..TRIES {
            match Self::try_create(parent, &hidden_names::hidden(target, tag, random(&parent.path)?)) {
                Ok(Some(folder)) => return Ok(folder),
                Ok(None) => {}
                Err(error) if error.is(Errno::EXIST) => {}
                // The message names the parent: the caller does not know the hidden name.
                Err(error) => return Err(error.about("create a folder in", &parent.path)),
            }
        }
        Err(CommitError::io("keep an unfinished folder in", &parent.path, Errno::AGAIN))
    }

    /// Removes it; does nothing when its hidden name no longer leads to it.
    pub(crate) fn remove(&self, parent: &OpenFolder<RealDisk>) -> Result<(), CommitError> {
        remove_locked(parent, &self.name, &self.folder).map(drop)
    }
}

/// Opens and locks a new folder; `None` when a sweep was faster.
fn lock_new<D: Disk>(parent: &OpenFolder<D>, name: &OsStr) -> Result<Option<OpenFolder<D>>, CommitError> {
    let folder = match parent.open_folder(name) {
        Err(error) if error.is(Errno::NOENT) => return Ok(None),
        outcome => outcome?,
    };
    let is_kept = match folder.disk.lock_folder(&folder.folder, LockMode::Shared, &folder.path)? {
        LockOutcome::HeldByAnother => false,
        LockOutcome::Taken | LockOutcome::Unknown => parent.has(name, &folder)?,
    };
    Ok(is_kept.then_some(folder))
}

fn random(path: &Path) -> Result<u32, CommitError> {
    let mut bytes = [0u8; 4];
    // Four bytes arrive completely or not at all.
    retry_on_intr(|| getrandom(&mut bytes, GetRandomFlags::empty()))
        .map_err(|errno| CommitError::io("draw a random name in", path, errno))?;
    Ok(u32::from_ne_bytes(bytes))
}

/// The tag of folders that this kernel, since its boot, made on the file system of `folder`; `None` where the kernel has
/// no boot id.
///
/// It combines the random boot id with the device number: two mounts of one network export do not share locks even on
/// one machine.
fn local_tag(folder: &OpenFolder<RealDisk>) -> Result<Option<u32>, CommitError> {
    let device = folder.stat()?.device as u32;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let boot = boot.get(..8).and_then(|digits| u32::from_str_radix(digits, 16).ok());
    // An odd factor near 2^32 over the golden ratio spreads small device numbers over all bits.
    Ok(boot.map(|boot| boot ^ device.wrapping_mul(0x9e37_79b1)))
}

// ---- Hidden folders that dead writers left ----

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
    let mut report = SweepReport::default();
    sweep_into(&OpenFolder::open(&RealDisk, parent.as_ref())?, &mut report)?;
    Ok(report)
}

/// Sweeps an open parent; fails only when it cannot be listed.
pub(crate) fn sweep_into(parent: &OpenFolder<RealDisk>, report: &mut SweepReport) -> Result<(), CommitError> {
    for name in parent.list()? {
        let Some(tag) = hidden_names::tag_of(&name) else {
            continue;
        };
        let path = parent.path.join(&name);
        match sweep_one(parent, &name, tag) {
            Ok(SweepOutcome::Removed) => report.removed.push(path),
            Ok(SweepOutcome::Live) => report.live.push(path),
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

fn sweep_one(parent: &OpenFolder<RealDisk>, name: &OsStr, tag: u32) -> Result<SweepOutcome, CommitError> {
    let user = geteuid().as_raw();
    let folder = match parent.open_folder(name) {
        // Gone, a file, or a symbolic link (which Linux answers with either of the last two).
        Err(error) if error.is(Errno::NOENT) || error.is(Errno::NOTDIR) || error.is(Errno::LOOP) => {
            return Ok(SweepOutcome::NotOurs);
        }
        // Another user's folder may be closed to this one; this user's own should not be.
        Err(error) if error.is(Errno::ACCESS) && parent.look_at(name)?.is_none_or(|stat| stat.user != user) => {
            return Ok(SweepOutcome::NotOurs);
        }
        outcome => outcome?,
    };
    let stat = folder.stat()?;
    let is_mount_point = stat.device != parent.stat()?.device;
    if stat.user != user || is_mount_point || !stat.is_marked {
        return Ok(SweepOutcome::NotOurs);
    }
    // Before the lock is taken: it must not be withheld from a writer of another machine even for an instant.
    if !RealDisk.is_local(&folder.folder) && Some(tag) != local_tag(parent)? {
        return Ok(SweepOutcome::Live);
    }
    match RealDisk.lock_folder(&folder.folder, LockMode::Exclusive, &folder.path) {
        Ok(LockOutcome::Taken) => {}
        Ok(LockOutcome::HeldByAnother | LockOutcome::Unknown) | Err(_) => return Ok(SweepOutcome::Live),
    }
    let is_removed = remove_locked(parent, name, &folder)?;
    Ok(if is_removed { SweepOutcome::Removed } else { SweepOutcome::NotOurs })
}

/// Removes a hidden folder whose lock the caller holds. Returns `false`, and removes nothing, when the hidden name no
/// longer leads to it.
fn remove_locked(
    parent: &OpenFolder<RealDisk>,
    name: &OsStr,
    folder: &OpenFolder<RealDisk>,
) -> Result<bool, CommitError> {
    if !parent.has(name, folder)? {
        return Ok(false);
    }
    folder.remove_contents()?;
    absent_is_fine(RealDisk.remove_folder(&parent.folder, name, &folder.path))?;
    Ok(true)
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests play the writer and the sweeper")]
mod tests {
    use super::*;

    const NAME: &str = ".plan.0000000000000001.incomplete";

    /// A new folder between `mkdir` and `flock`.
    fn new_folder() -> (tempfile::TempDir, OpenFolder<RealDisk>) {
        let parent = tempfile::tempdir().unwrap();
        std::fs::create_dir(parent.path().join(NAME)).unwrap();
        let opened = OpenFolder::open(&RealDisk, parent.path()).unwrap();
        (parent, opened)
    }

    fn open(parent: &OpenFolder<RealDisk>) -> OpenFolder<RealDisk> {
        parent.open_folder(OsStr::new(NAME)).unwrap()
    }

    fn is_kept(parent: &OpenFolder<RealDisk>) -> bool {
        lock_new(parent, OsStr::new(NAME)).unwrap().is_some()
    }

    fn lock(folder: &OpenFolder<RealDisk>) -> LockOutcome {
        RealDisk.lock_folder(&folder.folder, LockMode::Exclusive, &folder.path).unwrap()
    }

    #[test]
    fn a_new_folder_is_kept_without_a_sweep() {
        let (_folder, parent) = new_folder();
        let kept = lock_new(&parent, OsStr::new(NAME)).unwrap();
        assert!(kept.is_some());
        assert_eq!(lock(&open(&parent)), LockOutcome::HeldByAnother);
    }

    #[test]
    fn a_new_folder_that_a_sweep_takes_is_given_up() {
        let (folder, parent) = new_folder();
        let sweeper = open(&parent);
        assert_eq!(lock(&sweeper), LockOutcome::Taken);
        assert!(!is_kept(&parent));
        std::fs::remove_dir(folder.path().join(NAME)).unwrap();
        assert!(!is_kept(&parent));
    }

    #[test]
    fn a_folder_published_while_it_was_being_swept_is_left_alone() {
        let (folder, parent) = new_folder();
        let path = folder.path().join(NAME);
        std::fs::write(path.join("file"), b"keep").unwrap();
        let swept = open(&parent);
        // Its writer publishes it and ends, between the sweeper's open and its lock.
        let target = folder.path().join("plan");
        std::fs::rename(&path, &target).unwrap();
        assert_eq!(lock(&swept), LockOutcome::Taken);
        assert!(!remove_locked(&parent, OsStr::new(NAME), &swept).unwrap());
        // Another folder under the old name is not the one that is locked either.
        std::fs::create_dir(&path).unwrap();
        assert!(!remove_locked(&parent, OsStr::new(NAME), &swept).unwrap());
        assert!(path.exists());
        assert_eq!(std::fs::read(target.join("file")).unwrap(), b"keep");
    }
}

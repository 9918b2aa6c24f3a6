//! Who a hidden folder belongs to: the lock that tells a live writer from a dead one.
//!
//! A writer holds `flock(LOCK_EX)` on the open descriptor of its hidden folder from before the first file until the
//! folder is published or removed. The kernel drops the lock with the last descriptor, however the writer
//! ends. Invariants:
//!
//! 1. A folder is removed only by who holds its lock and has seen, with the lock held, that its hidden name still
//!    leads to it. A folder that was published in between is therefore never taken for a leftover.
//! 2. Between `mkdir` and `flock` a new folder looks dead. A sweeper may then take it, so the writer believes
//!    in its folder only after invariant 1's check, and otherwise starts again under another name.
//! 3. What cannot be told counts as live: where the file system has no such locks, and where the folder may belong
//!    to a writer of another machine. A lock on a directory is known to one kernel and one mounted file system
//!    only (network file systems do not pass it on), so the hidden name carries a tag of both. On file systems that
//!    are not known to be local, a folder with another tag is left alone.
//!
//! A process made by `fork` shares the lock: the folder counts as live until the child ends too, or calls `exec`,
//! which closes the descriptor.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, Stat};
use rustix::io::{Errno, retry_on_intr};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::disk;
use crate::error::CommitError;
use crate::name;

/// Names tried for one hidden folder. A try is lost only to a sweeper that comes between two system calls.
const TRIES: usize = 256;

/// A hidden folder and the lock on it.
#[derive(Debug)]
pub(crate) struct Claim {
    pub(crate) directory: OwnedFd,
    pub(crate) name: OsString,
    pub(crate) path: PathBuf,
}

/// The answer to asking for a folder's lock.
pub(crate) enum Lock {
    Taken,
    HeldByAnother,
    /// The file system has no such locks.
    Unknown,
}

impl Claim {
    /// Makes a new hidden folder for `target_name` in `parent`, and locks it.
    pub(crate) fn make(parent: impl AsFd, parent_path: &Path, target_name: &OsStr) -> Result<Self, CommitError> {
        // Without a tag zero stands there, which no sweeper takes for its own.
        let tag = local_tag(&parent, parent_path)?.unwrap_or(0);
        for _ in 0..TRIES {
            let name = name::hidden(target_name, tag, random(parent_path)?);
            let path = parent_path.join(&name);
            match disk::create_folder(&parent, &name, &path) {
                Err(error) if error.is(Errno::EXIST) => continue,
                Err(error) => {
                    abandon(&parent, &name, &path);
                    return Err(error);
                }
                Ok(()) => {}
            }
            match Self::lock_new(&parent, &name, &path) {
                Ok(Some(directory)) => {
                    return Ok(Claim { directory, name, path });
                }
                Ok(None) => continue,
                Err(error) => {
                    abandon(&parent, &name, &path);
                    return Err(error);
                }
            }
        }
        Err(CommitError::io("keep an unfinished folder in", parent_path, Errno::AGAIN))
    }

    /// `None` when a sweeper took the folder first; it then removes it.
    fn lock_new(parent: impl AsFd, name: &OsStr, path: &Path) -> Result<Option<OwnedFd>, CommitError> {
        let directory = match open_folder(&parent, name, path) {
            Err(error) if error.is(Errno::NOENT) => return Ok(None),
            outcome => outcome?,
        };
        Ok(is_kept(&parent, name, &directory, path)?.then_some(directory))
    }
}

/// Locks a new folder; `false` when a sweeper was faster.
fn is_kept(parent: impl AsFd, name: &OsStr, directory: impl AsFd, path: &Path) -> Result<bool, CommitError> {
    match try_lock(&directory, path)? {
        Lock::HeldByAnother => Ok(false),
        Lock::Taken | Lock::Unknown => leads_to(parent, name, directory, path),
    }
}

/// Removes a new folder whose making failed; still empty, and under a name that nobody else makes. The error to
/// report is the one that led here.
fn abandon(parent: impl AsFd, name: &OsStr, path: &Path) {
    let _ = disk::remove_folder(parent, name, path);
}

/// Opens a directory in `parent`, never through a symbolic link.
pub(crate) fn open_folder(parent: impl AsFd, name: &OsStr, path: &Path) -> Result<OwnedFd, CommitError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    retry_on_intr(|| rustix::fs::openat(&parent, name, flags, Mode::empty()))
        .map_err(|errno| CommitError::io("open folder", path, errno))
}

/// Asks for the lock of an open directory without waiting.
pub(crate) fn try_lock(directory: impl AsFd, path: &Path) -> Result<Lock, CommitError> {
    match retry_on_intr(|| rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive)) {
        Ok(()) => Ok(Lock::Taken),
        Err(Errno::WOULDBLOCK) => Ok(Lock::HeldByAnother),
        Err(Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL) => Ok(Lock::Unknown),
        Err(errno) => Err(CommitError::io("lock", path, errno)),
    }
}

/// Whether `name` in `parent` is the directory that is open as `directory`.
pub(crate) fn leads_to(
    parent: impl AsFd,
    name: &OsStr,
    directory: impl AsFd,
    path: &Path,
) -> Result<bool, CommitError> {
    let named = match rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(false),
        outcome => outcome.map_err(|errno| CommitError::io("look at", path, errno))?,
    };
    let open = stat(directory, path)?;
    Ok((named.st_dev, named.st_ino) == (open.st_dev, open.st_ino))
}

pub(crate) fn stat(directory: impl AsFd, path: &Path) -> Result<Stat, CommitError> {
    rustix::fs::fstat(directory).map_err(|errno| CommitError::io("look at", path, errno))
}

fn random(path: &Path) -> Result<u32, CommitError> {
    let mut bytes = [0u8; 4];
    // Four bytes come whole or not at all.
    retry_on_intr(|| getrandom(&mut bytes, GetRandomFlags::empty()))
        .map_err(|errno| CommitError::io("draw a random name in", path, errno))?;
    Ok(u32::from_ne_bytes(bytes))
}

/// The tag of folders made by this kernel, since it was started, on the file system of `directory`; `None` where
/// the kernel does not say which one it is.
///
/// It takes the random id that Linux draws at boot and the number under which it mounted the file system: two
/// mounts of one network export do not share locks even on one machine.
pub(crate) fn local_tag(directory: impl AsFd, path: &Path) -> Result<Option<u32>, CommitError> {
    let device = stat(directory, path)?.st_dev as u32;
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let boot = boot.get(..8).and_then(|digits| u32::from_str_radix(digits, 16).ok());
    // An odd factor near 2^32 over the golden ratio spreads the small numbers of devices over all bits.
    Ok(boot.map(|boot| boot ^ device.wrapping_mul(0x9e37_79b1)))
}

/// Whether every writer on the file system of `directory` is known to be under this kernel.
#[cfg(target_os = "linux")]
pub(crate) fn is_local(directory: impl AsFd) -> bool {
    // Magic numbers of linux/magic.h: ext2 to ext4, xfs, btrfs, tmpfs, ramfs, overlayfs, f2fs, zfs, bcachefs.
    const LOCAL: [u32; 9] = [
        0xef53,
        0x5846_5342,
        0x9123_683e,
        0x0102_1994,
        0x8584_58f6,
        0x794c_7630,
        0xf2f5_2010,
        0x2fc1_2fc1,
        0xca45_1a4e,
    ];
    rustix::fs::fstatfs(directory).is_ok_and(|status| LOCAL.contains(&(status.f_type as u32)))
}

/// Whether every writer on the file system of `directory` is known to be under this kernel.
#[cfg(not(target_os = "linux"))]
pub(crate) fn is_local(_directory: impl AsFd) -> bool {
    true
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests play the writer and the sweeper")]
mod tests {
    use super::*;
    use crate::sweep::open_parent;

    /// A new folder, as it is between `mkdir` and `flock`.
    fn new_folder() -> (tempfile::TempDir, OwnedFd, PathBuf, OwnedFd) {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join(".plan.0000000000000001.incomplete");
        std::fs::create_dir(&path).unwrap();
        let parent_directory = open_parent(parent.path()).unwrap();
        let directory = open_folder(&parent_directory, path.file_name().unwrap(), &path).unwrap();
        (parent, parent_directory, path, directory)
    }

    #[test]
    fn a_new_folder_is_kept_where_no_sweeper_comes() {
        let (_parent, parent_directory, path, directory) = new_folder();
        let name = path.file_name().unwrap();
        assert!(is_kept(&parent_directory, name, &directory, &path).unwrap());
        let again = open_folder(&parent_directory, name, &path).unwrap();
        assert!(matches!(try_lock(&again, &path), Ok(Lock::HeldByAnother)));
    }

    #[test]
    fn a_new_folder_that_a_sweeper_is_removing_is_given_up() {
        let (_parent, parent_directory, path, directory) = new_folder();
        let name = path.file_name().unwrap();
        let sweeper = open_folder(&parent_directory, name, &path).unwrap();
        assert!(matches!(try_lock(&sweeper, &path), Ok(Lock::Taken)));
        assert!(!is_kept(&parent_directory, name, &directory, &path).unwrap());
    }

    #[test]
    fn a_new_folder_that_a_sweeper_removed_is_given_up() {
        let (_parent, parent_directory, path, directory) = new_folder();
        let name = path.file_name().unwrap();
        std::fs::remove_dir(&path).unwrap();
        assert!(!is_kept(&parent_directory, name, &directory, &path).unwrap());
        // Nor is another one of that name taken for it.
        std::fs::create_dir(&path).unwrap();
        assert!(!is_kept(&parent_directory, name, &directory, &path).unwrap());
    }
}

//! The only door to the disk: every system call of this crate that changes it is made here.
//!
//! Each goes through [`call`], which names the path in the error and, in test builds, stops at a failpoint before
//! and after the call. Calls interrupted by a signal are made again, with one exception: `fsync`, whose
//! failure is final whatever its reason.

use std::ffi::OsStr;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::retry_on_intr;

use crate::error::CommitError;
use crate::writeback;

fn call<T>(
    operation: &'static str,
    path: &Path,
    system_call: impl FnOnce() -> rustix::io::Result<T>,
) -> Result<T, CommitError> {
    #[cfg(feature = "failpoints")]
    let outcome = crate::failpoint::around(operation, path, system_call);
    #[cfg(not(feature = "failpoints"))]
    let outcome = system_call();
    outcome.map_err(|errno| CommitError::io(operation, path, errno))
}

/// Makes the directory `name` in `parent`, with the mode the umask leaves.
pub(crate) fn create_folder(parent: impl AsFd, name: &OsStr, path: &Path) -> Result<(), CommitError> {
    call("create folder", path, || retry_on_intr(|| rustix::fs::mkdirat(&parent, name, Mode::from_raw_mode(0o777))))
}

/// Makes the file `name` in `folder`; fails where anything of that name exists.
pub(crate) fn create_file(folder: impl AsFd, name: &str, path: &Path) -> Result<OwnedFd, CommitError> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    call("create file", path, || retry_on_intr(|| rustix::fs::openat(&folder, name, flags, Mode::from_raw_mode(0o666))))
}

/// Writes a prefix of `bytes` at `offset`; returns how many bytes, possibly fewer than asked.
pub(crate) fn write(file: &File, offset: u64, bytes: &[u8], path: &Path) -> Result<usize, CommitError> {
    call("write", path, || retry_on_intr(|| rustix::io::pwrite(file, bytes, offset)))
}

/// Cuts a file off after `length` bytes.
pub(crate) fn truncate(file: &File, length: u64, path: &Path) -> Result<(), CommitError> {
    call("truncate", path, || retry_on_intr(|| rustix::fs::ftruncate(file, length)))
}

/// Makes a file or directory durable. Never called again on the same descriptor after a failure.
pub(crate) fn fsync(descriptor: impl AsFd, path: &Path) -> Result<(), CommitError> {
    call("fsync", path, || rustix::fs::fsync(&descriptor))
}

/// Starts writing `range` of the file to the disk without waiting for it.
pub(crate) fn start_writeback(file: &File, range: &Range<u64>, path: &Path) -> Result<(), CommitError> {
    call("start writeback of", path, || retry_on_intr(|| writeback::start(file, range)))
}

/// Waits until `range` of the file was written. An error here is the only report of it: a later fsync of the same
/// descriptor does not repeat it.
pub(crate) fn wait_for_writeback(file: &File, range: &Range<u64>, path: &Path) -> Result<(), CommitError> {
    call("wait for writeback of", path, || retry_on_intr(|| writeback::wait(file, range)))
}

/// Renames `from`, in one open directory, to `to`, in another of the same file system. A folder takes the place of an
/// empty directory, a file that of anything but a directory.
pub(crate) fn rename(
    (from_folder, from): (impl AsFd, &OsStr),
    (to_folder, to): (impl AsFd, &OsStr),
    path: &Path,
) -> Result<(), CommitError> {
    call("rename what is finished to", path, || {
        retry_on_intr(|| rustix::fs::renameat(&from_folder, from, &to_folder, to))
    })
}

/// Removes the name of a file that is not a directory.
pub(crate) fn remove_file(folder: impl AsFd, name: &OsStr, path: &Path) -> Result<(), CommitError> {
    call("remove file", path, || retry_on_intr(|| rustix::fs::unlinkat(&folder, name, AtFlags::empty())))
}

/// Removes an empty directory.
pub(crate) fn remove_folder(parent: impl AsFd, name: &OsStr, path: &Path) -> Result<(), CommitError> {
    call("remove folder", path, || retry_on_intr(|| rustix::fs::unlinkat(&parent, name, AtFlags::REMOVEDIR)))
}

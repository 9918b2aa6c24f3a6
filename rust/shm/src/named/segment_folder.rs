//! The folder of named segments, and the names in it.
//!
//! A segment called `name` of the user `uid` is the file `tundish-<uid>-<name>`, which that user alone may open: users
//! never get in each other's way. It is the POSIX object of that name: `shm_open` finds it too.

use std::ffi::OsStr;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, fstat, fstatvfs, openat, statat, unlinkat};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::geteuid;

use crate::error::ShmError;

/// Where `shm_open` of Linux puts its names.
const STANDARD: &str = "/dev/shm";

/// The longest name of a segment, in bytes. With its prefix it fits every file system.
const MAX_NAME_BYTES: usize = 200;

/// The identity of a file, independent of its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct FileIdentity {
    /// The file system's number.
    device: u64,
    /// The file's number on it.
    inode: u64,
}

impl FileIdentity {
    pub(crate) fn of(stat: &Stat) -> Self {
        Self { device: stat.st_dev, inode: stat.st_ino }
    }
}

/// A name that a segment can have: 1 to 200 of the signs `A-Z a-z 0-9 . _ -`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SegmentName(String);

impl SegmentName {
    /// `name`, if a segment can be called so.
    pub fn new(name: &str) -> Result<Self, ShmError> {
        let is_fit = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(is_fit) {
            return Err(ShmError::Invalid(format!(
                "{name:?} cannot name a segment: give 1 to {MAX_NAME_BYTES} of the signs A-Z, a-z, 0-9, dot, underscore and hyphen"
            )));
        }
        Ok(Self(name.to_owned()))
    }

    /// The name as it was given.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn file_name(&self) -> String {
        format!("{}{}", prefix(), self.0)
    }
}

fn prefix() -> String {
    format!("tundish-{}-", geteuid().as_raw())
}

/// A folder of named segments.
#[derive(Debug)]
pub struct SegmentFolder {
    descriptor: OwnedFd,
    pub(super) path: PathBuf,
}

impl SegmentFolder {
    /// The one that all programs of the machine (or of the container) share.
    pub fn standard() -> Result<Self, ShmError> {
        Self::at(Path::new(STANDARD))
    }

    /// Another one.
    pub fn at(path: &Path) -> Result<Self, ShmError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let descriptor = retry_on_intr(|| openat(CWD, path, flags, Mode::empty()))
            .map_err(|errno| ShmError::io("open the folder of named segments", path.display().to_string(), errno))?;
        Ok(Self { descriptor, path: path.to_owned() })
    }

    /// The path for this name, whether or not there is a segment.
    pub fn path_of(&self, name: &SegmentName) -> PathBuf {
        self.path.join(name.file_name())
    }

    fn display_path(&self, name: &SegmentName) -> String {
        self.path_of(name).display().to_string()
    }

    /// The names in it that a segment of this user may have.
    pub(crate) fn names(&self) -> Result<Vec<SegmentName>, ShmError> {
        let failed = |errno| ShmError::io("list", self.path.display().to_string(), errno);
        let prefix = prefix();
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.descriptor).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_str().ok().and_then(|name| name.strip_prefix(&prefix));
            names.extend(name.and_then(|name| SegmentName::new(name).ok()));
        }
        names.sort();
        Ok(names)
    }

    /// Opens a file of this user; `None` if there is none, or it is another user's, or no plain file.
    pub(crate) fn open(&self, name: &SegmentName, access: OFlags) -> Result<Option<(OwnedFd, Stat)>, ShmError> {
        // Opening a device or a pipe could have effects.
        if !self.status(name)?.is_some_and(|stat| is_own_file(&stat)) {
            return Ok(None);
        }
        let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = retry_on_intr(|| openat(&self.descriptor, name.file_name(), flags, Mode::empty()));
        let file = match opened {
            Err(Errno::NOENT | Errno::LOOP | Errno::ISDIR | Errno::NXIO) => return Ok(None),
            outcome => outcome.map_err(|errno| ShmError::io("open", self.display_path(name), errno))?,
        };
        let stat = fstat(&file).map_err(|errno| ShmError::io("stat", self.display_path(name), errno))?;
        Ok(is_own_file(&stat).then_some((file, stat)))
    }

    /// Whether the name leads to this file.
    pub(crate) fn leads_to(&self, name: &SegmentName, file: FileIdentity) -> Result<bool, ShmError> {
        Ok(self.status(name)?.is_some_and(|stat| FileIdentity::of(&stat) == file))
    }

    pub(crate) fn status(&self, name: &SegmentName) -> Result<Option<Stat>, ShmError> {
        match statat(&self.descriptor, OsStr::new(&name.file_name()), AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            outcome => outcome.map(Some).map_err(|errno| ShmError::io("stat", self.display_path(name), errno)),
        }
    }

    /// Removes the name. The caller holds the probe lock, see `probe.rs`.
    pub(crate) fn remove(&self, name: &SegmentName) -> Result<(), ShmError> {
        match unlinkat(&self.descriptor, name.file_name(), AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(ShmError::io("remove", self.display_path(name), errno)),
        }
    }

    /// Bytes that are free; `None` where there is no limit.
    pub(crate) fn free(&self) -> Result<Option<u64>, ShmError> {
        let stats = fstatvfs(&self.descriptor)
            .map_err(|errno| ShmError::io("ask for the room in", self.path.display().to_string(), errno))?;
        // A tmpfs without a limit says that it has no blocks at all.
        Ok((stats.f_blocks > 0).then(|| stats.f_bavail.saturating_mul(stats.f_frsize)))
    }

    /// Gives a name to an open file without one; `false` if the name is taken.
    pub(crate) fn link(&self, file: BorrowedFd<'_>, name: &SegmentName) -> Result<bool, ShmError> {
        // Without a privilege, a descriptor is linked through its name in /proc only: open(2).
        let source = format!("/proc/self/fd/{}", file.as_raw_fd());
        match rustix::fs::linkat(CWD, source, &self.descriptor, name.file_name(), AtFlags::SYMLINK_FOLLOW) {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            Err(errno) => Err(ShmError::io("give a segment the name", self.display_path(name), errno)),
        }
    }

    /// Creates a file without a name that only this user may open. It is freed with its last descriptor and mapping.
    pub(crate) fn make(&self) -> Result<OwnedFd, ShmError> {
        let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let failed = |errno| ShmError::io("make a segment in", self.path.display().to_string(), errno);
        let file = retry_on_intr(|| openat(&self.descriptor, ".", flags, mode)).map_err(failed)?;
        // The umask of the process may have removed permissions.
        rustix::fs::fchmod(&file, mode).map_err(failed)?;
        Ok(file)
    }
}

pub(super) fn is_own_file(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode).is_file() && stat.st_uid == geteuid().as_raw()
}

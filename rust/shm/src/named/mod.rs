//! Named segments: memory for processes that share nothing but a name.
//!
//! A named segment exists as long as a process holds it. A segment that no process holds is dead: no process attaches to
//! it. The next process that creates under its name removes it, and so does a [`sweep`]. A segment called `name` of the
//! user `uid` is the file `tundish-<uid>-<name>`, which that user alone may open. It is the POSIX object of that name:
//! `shm_open` finds it too.
//!
//! A file has two locks. Both belong to an open file description, so the kernel drops them with its last descriptor and
//! mapping, however a process ends:
//!
//! - `flock(LOCK_SH)` is the *hold*. A process has it from before the segment got its name, or from the attaching on.
//! - `F_OFD_SETLK` (fcntl(2)) is the *probe lock*. A process takes it before it asks whether there is a hold: to
//!   attach, to create under the name, to sweep, or to drop its hold.
//!
//! Invariants:
//!
//! 1. A name leads to a whole segment: its pages are reserved, its header is written, its creator holds it. The file
//!    gets its name in one step (`O_TMPFILE` and `linkat`, open(2)); a creator that is killed before leaves nothing.
//! 2. A name is never removed while a process holds the segment, and only under the probe lock of the file that it leads
//!    to. `flock(LOCK_EX)` is asked for under the probe lock only, so where it is refused there is a real hold.
//! 3. The files of other users, and files that do not begin with this library's header, are never removed.
//! 4. The last holder removes the name. A killed holder leaves it to the next process that creates, or to a sweep.
//! 5. Any number of processes may sweep at once, and create and attach meanwhile.
//!
//! A child made by `fork` shares the holds of its parent: a segment is held until both have dropped it, or ended.
#![allow(unsafe_code)]

#[cfg(test)]
mod tests;

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Stat, fstat, fstatvfs, openat, statat, unlinkat};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::geteuid;

use crate::error::ShmError;
use crate::memory::{self, CheckCancelled, Writers};
use crate::memory_limits;
use crate::process::PerProcess;
use crate::segment::attachment::{self, AttachError, Attachment};
use crate::segment::header::SegmentHeader;
use crate::segment::{Segment, SegmentAddress, size_for};

static HAS_SWEPT: PerProcess<AtomicBool> = PerProcess::new(|| AtomicBool::new(false));

/// A claim to a name for a new segment. Dropped before `publish`, it leaves nothing.
#[derive(Debug)]
pub struct NameClaim {
    folder: Arc<SegmentFolder>,
    name: SegmentName,
}

impl NameClaim {
    /// Claims a name that is free now. A dead segment of that name is removed first, since the new one may need its
    /// room. The first claim of a process sweeps all names.
    ///
    /// # Errors
    /// [`ShmError::Exists`] if the name is taken, and the error of `check_cancelled`.
    pub fn new(
        folder: Arc<SegmentFolder>,
        name: SegmentName,
        check_cancelled: CheckCancelled<'_>,
    ) -> Result<Self, ShmError> {
        if !HAS_SWEPT.get().swap(true, Ordering::Relaxed) {
            // Segments that cannot be swept are left to the next sweep.
            if let Err(ShmError::Interrupted) = sweep(&folder, false, check_cancelled) {
                return Err(ShmError::Interrupted);
            }
        }
        clear(&folder, &name, check_cancelled)?;
        Ok(Self { folder, name })
    }

    /// A segment for `len` bytes of data, zeros, which is to get the name.
    ///
    /// # Errors
    /// [`ShmError::NoSpace`] if the file system has no room, [`ShmError::NoHeadroom`], and the error of
    /// `check_cancelled`.
    pub fn make_segment(&self, len: usize, check_cancelled: CheckCancelled<'_>) -> Result<Segment, ShmError> {
        let size = size_for(len)?.next_multiple_of(rustix::param::page_size());
        let (file, on_huge_pages) = self.make_file(size, check_cancelled)?;
        Segment::in_file(file, size, on_huge_pages)
    }

    /// Returns a file of `size` reserved bytes, and how many of them lie on huge pages. Its descriptor
    /// carries the hold, and so do the maps that are made of it.
    fn make_file(&self, size: usize, check_cancelled: CheckCancelled<'_>) -> Result<(OwnedFd, usize), ShmError> {
        let full = |free| ShmError::NoSpace { path: self.folder.path_of(&self.name), asked: size as u64, free };
        match self.folder.free()? {
            Some(free) if free < size as u64 => return Err(full(free)),
            _ => memory_limits::check(size as u64)?,
        }
        let file = self.folder.make()?;
        let on_huge_pages = match memory::reserve(file.as_fd(), size, Writers::Present, check_cancelled) {
            // Another process took the room meanwhile. Closing the file frees the reserved part.
            Err(ShmError::Io { source, .. }) if source.kind() == ErrorKind::StorageFull => {
                let reserved = memory::status(file.as_fd())?.st_blocks.unsigned_abs() * 512;
                return Err(full(reserved + self.folder.free()?.unwrap_or_default()));
            }
            outcome => outcome?,
        };
        // Nobody else knows the file.
        memory::lock_shared(file.as_fd())?;
        Ok((file, on_huge_pages))
    }

    /// Gives the name to the segment in `file`, whose header and data are written.
    ///
    /// # Errors
    /// [`ShmError::Exists`] if another process was faster, and the error of `check_cancelled`.
    pub fn publish(self, file: BorrowedFd<'_>, check_cancelled: CheckCancelled<'_>) -> Result<NameHold, ShmError> {
        let Self { folder, name } = self;
        let identity = FileIdentity::of(&memory::status(file)?);
        while !folder.link(file, &name)? {
            clear(&folder, &name, check_cancelled)?;
        }
        Ok(NameHold { folder, name, file: identity })
    }
}

/// A named segment that was attached to.
#[derive(Debug)]
pub struct NamedFile {
    /// Read-only. The descriptor carries the hold, and so do the maps that are made of it.
    pub file: OwnedFd,
    /// To be dropped after them.
    pub hold: NameHold,
}

impl NamedFile {
    /// Maps the segment and registers its attachment, if it is the one that was expected.
    ///
    /// # Errors
    /// As of [`attachment::attach`].
    pub fn into_attachment(self, expected: Option<&SegmentAddress>) -> Result<Arc<Attachment>, ShmError> {
        let NamedFile { file, hold } = self;
        let attached = Attachment::new(file, expected, false, Some(Arc::new(hold)));
        attached.map(attachment::add).map_err(AttachError::into_error)
    }
}

/// Attaches to the segment of this name.
///
/// # Errors
/// [`ShmError::Missing`] if no process holds a segment of this name, and the error of `check_cancelled`.
pub fn attach(
    folder: Arc<SegmentFolder>,
    name: SegmentName,
    check_cancelled: CheckCancelled<'_>,
) -> Result<NamedFile, ShmError> {
    let missing = || ShmError::Missing { path: folder.path_of(&name) };
    let probe = ProbedFile::take(&folder, &name, check_cancelled)?.ok_or_else(missing)?;
    if !probe.is_held()? {
        return Err(missing());
    }
    let (file, stat) = folder.open(&name, OFlags::RDONLY)?.ok_or_else(missing)?;
    let identity = FileIdentity::of(&stat);
    if identity != probe.identity() {
        // A process that does not ask for the lock has put another file there.
        return Err(missing());
    }
    // It succeeds: the exclusive lock is asked for under the probe lock only.
    memory::lock_shared(file.as_fd())?;
    drop(probe);
    Ok(NamedFile { file, hold: NameHold { folder, name, file: identity } })
}

/// Removes a segment's name when its last holder drops it.
///
/// Drop it after the descriptors and maps that carry the hold in this process. Otherwise the name is left to a sweep.
#[derive(Debug)]
pub struct NameHold {
    folder: Arc<SegmentFolder>,
    name: SegmentName,
    file: FileIdentity,
}

impl Drop for NameHold {
    fn drop(&mut self) {
        // Whatever fails here leaves the name to the next sweep.
        if let Ok(Some(probe)) = ProbedFile::take(&self.folder, &self.name, &mut || Ok(()))
            && probe.identity() == self.file
            && matches!(probe.is_held(), Ok(false))
        {
            let _ = probe.remove();
        }
    }
}

/// Removes a dead segment of this name.
fn clear(folder: &SegmentFolder, name: &SegmentName, check_cancelled: CheckCancelled<'_>) -> Result<(), ShmError> {
    let holder = match ProbedFile::take(folder, name, check_cancelled)? {
        None if folder.status(name)?.is_none() => return Ok(()),
        None => "another user or program, which made it".to_owned(),
        Some(probe) if probe.is_held()? => {
            format!("process {}, which made it, or by processes that are attached to it", probe.maker)
        }
        Some(probe) => return probe.remove(),
    };
    Err(ShmError::Exists { path: folder.path_of(name), holder })
}

/// Longest wait for the lock, which is held for microseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
const RETRY_INTERVAL: Duration = Duration::from_micros(200);

/// A segment's file under its probe lock: no other process attaches to it or removes its name.
#[derive(Debug)]
pub(crate) struct ProbedFile<'a> {
    folder: &'a SegmentFolder,
    name: &'a SegmentName,
    file: OwnedFd,
    identity: FileIdentity,
    /// Bytes of the file.
    pub(crate) bytes: usize,
    /// The process that made it.
    pub(crate) maker: u32,
}

impl<'a> ProbedFile<'a> {
    /// Waits for the probe lock of the segment that has this name. `None` where that is no segment of this user:
    /// nothing is locked then. A file is a segment from the moment it gets its name.
    ///
    /// # Errors
    /// If another process keeps the lock for longer than [`LOCK_TIMEOUT`], and the error of `check_cancelled`.
    pub(crate) fn take(
        folder: &'a SegmentFolder,
        name: &'a SegmentName,
        check_cancelled: CheckCancelled<'_>,
    ) -> Result<Option<Self>, ShmError> {
        let deadline = Instant::now() + LOCK_TIMEOUT;
        let failed = |operation, errno| ShmError::io(operation, folder.path_of(name).display().to_string(), errno);
        loop {
            // A description that can write: only that may have the lock.
            let Some((file, stat)) = folder.open(name, OFlags::RDWR)? else { return Ok(None) };
            let bytes = usize::try_from(stat.st_size).unwrap_or_default();
            let maker = match SegmentHeader::read(file.as_fd(), bytes, name.as_str()) {
                Ok(header) => header.maker,
                Err(ShmError::NotASegment { .. }) => return Ok(None),
                Err(error) => return Err(error),
            };
            match lock(&file, libc::F_WRLCK) {
                Ok(()) => {
                    let probe = Self { folder, name, file, identity: FileIdentity::of(&stat), bytes, maker };
                    // It may have been removed since it was opened, and the name given to another.
                    if folder.leads_to(name, probe.identity)? {
                        return Ok(Some(probe));
                    }
                }
                Err(Errno::AGAIN | Errno::ACCESS) => std::thread::sleep(RETRY_INTERVAL),
                Err(errno) => return Err(failed("lock", errno)),
            }
            check_cancelled()?;
            if Instant::now() > deadline {
                return Err(failed("lock", Errno::AGAIN));
            }
        }
    }

    pub(crate) fn identity(&self) -> FileIdentity {
        self.identity
    }

    #[cfg(test)]
    pub(crate) fn descriptor(&self) -> std::os::fd::BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Whether a process holds the segment: it has a map or a descriptor of it, or inherited one by `fork`.
    pub(crate) fn is_held(&self) -> Result<bool, ShmError> {
        let is_free = memory::lock_exclusive(self.file.as_fd())?;
        if is_free {
            // The next process that attaches has to get its shared lock.
            memory::unlock(self.file.as_fd())?;
        }
        Ok(!is_free)
    }

    /// Takes the name away.
    pub(crate) fn remove(&self) -> Result<(), ShmError> {
        self.folder.remove(self.name)
    }
}

impl Drop for ProbedFile<'_> {
    fn drop(&mut self) {
        // A child that was forked meanwhile has the description too, so to close it would not be enough.
        let _ = lock(&self.file, libc::F_UNLCK);
    }
}

fn lock(file: &OwnedFd, kind: i32) -> Result<(), Errno> {
    let all = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        // Has to be zero for locks of a description.
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and the kernel reads what the pointer leads to during the call only.
    let outcome = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const all) };
    if outcome == 0 { Ok(()) } else { Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)) }
}

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

/// A named segment of this user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedSegment {
    /// Its name.
    pub name: SegmentName,
    /// Its file.
    pub path: PathBuf,
    /// Bytes of the file.
    pub bytes: usize,
    /// The process that made it, by its id then.
    pub maker: u32,
}

/// The named segments that a sweep found.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct SweepReport {
    /// Segments that no process holds: removed unless it is a dry run.
    pub dead: Vec<NamedSegment>,
    /// Segments that a process holds.
    pub live: Vec<NamedSegment>,
    /// Errors of segments that could not be examined or removed. The next sweep tries again.
    pub failed: Vec<ShmError>,
}

/// Removes the named segments of this user that no process holds; with `dry_run` it changes nothing.
///
/// # Errors
/// If the folder cannot be listed, and the error of `check_cancelled`. The report holds the errors of single segments.
pub fn sweep(
    folder: &SegmentFolder,
    dry_run: bool,
    check_cancelled: CheckCancelled<'_>,
) -> Result<SweepReport, ShmError> {
    let mut report = SweepReport::default();
    for name in folder.names()? {
        let probe = match ProbedFile::take(folder, &name, check_cancelled) {
            Ok(Some(probe)) => probe,
            Ok(None) => continue,
            Err(ShmError::Interrupted) => return Err(ShmError::Interrupted),
            Err(error) => {
                report.failed.push(error);
                continue;
            }
        };
        let is_held = probe.is_held().and_then(|is_held| {
            if !is_held && !dry_run {
                probe.remove()?;
            }
            Ok(is_held)
        });
        let path = folder.path_of(&name);
        let segment = NamedSegment { name: name.clone(), path, bytes: probe.bytes, maker: probe.maker };
        match is_held {
            Ok(true) => report.live.push(segment),
            Ok(false) => report.dead.push(segment),
            Err(error) => report.failed.push(error),
        }
    }
    Ok(report)
}

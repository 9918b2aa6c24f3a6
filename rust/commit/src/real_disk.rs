//! The disk of this machine.
//!
//! Each call that changes the disk goes through [`change`]. It names the path in the error and, in test builds, passes
//! a failpoint before and after the system call.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use libc::{
    SYNC_FILE_RANGE_WAIT_AFTER as WAIT_AFTER, SYNC_FILE_RANGE_WAIT_BEFORE as WAIT_BEFORE,
    SYNC_FILE_RANGE_WRITE as WRITE,
};
use rustix::fs::{
    AtFlags, CWD, Dir, FallocateFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags, Stat, renameat_with,
};
use rustix::io::{Errno, retry_on_intr};

use crate::disk::{Disk, EntryKind, FileStat, LockMode, LockOutcome, Room};
use crate::error::CommitError;

/// The disk of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct RealDisk;

const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The sticky bit: the mark of an unfinished folder, see `hidden_folder.rs`.
const MARK: u32 = 0o1000;

fn change<T>(
    operation: &'static str,
    path: &Path,
    system_call: impl FnOnce() -> rustix::io::Result<T>,
) -> Result<T, CommitError> {
    #[cfg(feature = "failpoints")]
    let outcome = crate::failpoints::around(operation, path, system_call);
    #[cfg(not(feature = "failpoints"))]
    let outcome = system_call();
    outcome.map_err(|errno| CommitError::io(operation, path, errno))
}

/// A system call that changes nothing.
fn query<T>(
    operation: &'static str,
    path: &Path,
    system_call: impl FnMut() -> rustix::io::Result<T>,
) -> Result<T, CommitError> {
    retry_on_intr(system_call).map_err(|errno| CommitError::io(operation, path, errno))
}

impl Disk for RealDisk {
    type Folder = OwnedFd;
    type File = File;

    fn open_path(&self, path: &Path) -> Result<OwnedFd, CommitError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        retry_on_intr(|| rustix::fs::openat(CWD, path, flags, Mode::empty())).map_err(|errno| match errno {
            Errno::NOENT => CommitError::ParentMissing { path: path.to_path_buf() },
            Errno::NOTDIR => CommitError::NotADirectory { path: path.to_path_buf() },
            _ => CommitError::io("open folder", path, errno),
        })
    }

    fn open_folder(&self, parent: &OwnedFd, name: &OsStr, path: &Path) -> Result<OwnedFd, CommitError> {
        query("open folder", path, || rustix::fs::openat(parent, name, FOLDER, Mode::empty()))
    }

    fn open_file(&self, folder: &OwnedFd, name: &OsStr, path: &Path) -> Result<File, CommitError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        query("open", path, || rustix::fs::openat(folder, name, flags, Mode::empty())).map(File::from)
    }

    fn open_file_for_writing(&self, folder: &OwnedFd, name: &OsStr, path: &Path) -> Result<File, CommitError> {
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        query("open", path, || rustix::fs::openat(folder, name, flags, Mode::empty())).map(File::from)
    }

    fn open_file_for_direct_writing(
        &self,
        folder: &OwnedFd,
        name: &OsStr,
        path: &Path,
    ) -> Result<Option<File>, CommitError> {
        let flags = OFlags::WRONLY | OFlags::DIRECT | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        match query("open", path, || rustix::fs::openat(folder, name, flags, Mode::empty())) {
            Err(error) if error.is(Errno::INVAL) || error.is(Errno::OPNOTSUPP) => Ok(None),
            outcome => Ok(Some(outcome?.into())),
        }
    }

    fn open_or_create_file(&self, folder: &OwnedFd, name: &OsStr, path: &Path) -> Result<File, CommitError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        // Users outside the group must not be able to lock it.
        let open = || rustix::fs::openat(folder, name, flags, Mode::from_raw_mode(0o660));
        change("open or create file", path, || retry_on_intr(open)).map(File::from)
    }

    fn list(&self, folder: &OwnedFd, path: &Path) -> Result<Vec<OsString>, CommitError> {
        let failed = |errno| CommitError::io("list folder", path, errno);
        let mut names = Vec::new();
        for entry in Dir::read_from(folder).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name != "." && name != ".." {
                names.push(name.to_os_string());
            }
        }
        Ok(names)
    }

    fn look_at(&self, folder: &OwnedFd, name: &OsStr, path: &Path) -> Result<Option<FileStat>, CommitError> {
        match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(CommitError::io("look at", path, errno)),
            Ok(stat) => Ok(Some(file_stat_of(&stat))),
        }
    }

    fn folder_stat(&self, folder: &OwnedFd, path: &Path) -> Result<FileStat, CommitError> {
        open_stat(folder, path)
    }

    fn file_stat(&self, file: &File, path: &Path) -> Result<FileStat, CommitError> {
        open_stat(file, path)
    }

    fn read(&self, file: &File, path: &Path) -> Result<Vec<u8>, CommitError> {
        let mut bytes = Vec::new();
        let mut room = usize::try_from(self.file_stat(file, path)?.size).unwrap_or(usize::MAX).max(1);
        loop {
            let end = bytes.len();
            bytes.try_reserve(room).map_err(|_| CommitError::io("find memory to read", path, Errno::NOMEM))?;
            bytes.resize(end + room, 0);
            let count = self.read_at(file, end as u64, &mut bytes[end..], path)?;
            bytes.truncate(end + count);
            if count == 0 {
                return Ok(bytes);
            }
            room = (room - count).max(1 << 16);
        }
    }

    fn read_at(&self, file: &File, offset: u64, buffer: &mut [u8], path: &Path) -> Result<usize, CommitError> {
        query("read", path, || rustix::io::pread(file, &mut *buffer, offset))
    }

    fn free_room(&self, folder: &OwnedFd, path: &Path) -> Result<Room, CommitError> {
        let space = query("ask for the free space of", path, || rustix::fs::fstatvfs(folder))?;
        // Some file systems report no blocks, or no inodes, at all.
        let bytes = if space.f_blocks > 0 { space.f_bavail.saturating_mul(space.f_frsize) } else { u64::MAX };
        let files = if space.f_files > 0 { space.f_favail } else { u64::MAX };
        Ok(Room { bytes, files })
    }

    fn read_link(&self, folder: &OwnedFd, name: &OsStr, path: &Path) -> Result<OsString, CommitError> {
        let target = query("read the link", path, || rustix::fs::readlinkat(folder, name, Vec::new()))?;
        Ok(OsString::from_vec(target.into_bytes()))
    }

    fn is_local(&self, folder: &OwnedFd) -> bool {
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
        rustix::fs::fstatfs(folder).is_ok_and(|status| LOCAL.contains(&(status.f_type as u32)))
    }

    fn lock_folder(&self, folder: &OwnedFd, sharing: LockMode, path: &Path) -> Result<LockOutcome, CommitError> {
        flock(folder, sharing, path)
    }

    fn lock_file(&self, file: &File, sharing: LockMode, path: &Path) -> Result<LockOutcome, CommitError> {
        flock(file, sharing, path)
    }

    fn unlock_file(&self, file: &File) {
        // Where there are no locks there is none to release.
        let _ = rustix::fs::flock(file, FlockOperation::Unlock);
    }

    fn lock_file_for_process(&self, file: &File, path: &Path) -> Result<LockOutcome, CommitError> {
        let operation = FlockOperation::NonBlockingLockExclusive;
        answer(retry_on_intr(|| rustix::fs::fcntl_lock(file, operation)), path)
    }

    fn create_folder(&self, parent: &OwnedFd, name: &OsStr, path: &Path) -> Result<(), CommitError> {
        change("create folder", path, || {
            retry_on_intr(|| rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o777)))
        })
    }

    fn create_hidden_folder(&self, parent: &OwnedFd, name: &OsStr, path: &Path) -> Result<(), CommitError> {
        // Private only where `open_to_readers` can give it the mode that the umask leaves.
        let private = if umask().is_some() { 0o700 } else { 0o777 };
        let mode = Mode::from_raw_mode(MARK | private);
        change("create folder", path, || retry_on_intr(|| rustix::fs::mkdirat(parent, name, mode)))
    }

    fn open_to_readers(&self, folder: &OwnedFd, path: &Path) -> Result<(), CommitError> {
        let Some(umask) = umask() else { return Ok(()) };
        let special = query("look at", path, || rustix::fs::fstat(folder))?.st_mode & 0o7000;
        let mode = Mode::from_raw_mode(special | (0o777 & !umask));
        change("change the mode of", path, || retry_on_intr(|| rustix::fs::fchmod(folder, mode)))
    }

    fn unmark(&self, folder: &OwnedFd) {
        if let Ok(stat) = rustix::fs::fstat(folder) {
            let mode = Mode::from_raw_mode(stat.st_mode & 0o7777 & !MARK);
            let _ = retry_on_intr(|| rustix::fs::fchmod(folder, mode));
        }
    }

    fn create_file(&self, folder: &OwnedFd, name: &OsStr, path: &Path) -> Result<File, CommitError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(folder, name, flags, Mode::from_raw_mode(0o666));
        change("create file", path, || retry_on_intr(open)).map(File::from)
    }

    fn create_link(&self, folder: &OwnedFd, name: &OsStr, target: &OsStr, path: &Path) -> Result<(), CommitError> {
        change("create link", path, || retry_on_intr(|| rustix::fs::symlinkat(target, folder, name)))
    }

    fn allocate(&self, file: &File, length: u64, path: &Path) -> Result<(), CommitError> {
        let allocate = || rustix::fs::fallocate(file, FallocateFlags::empty(), 0, length);
        change("allocate", path, || retry_on_intr(allocate))
    }

    fn write_at(&self, file: &File, offset: u64, bytes: &[u8], path: &Path) -> Result<usize, CommitError> {
        let write = |bytes: &[u8]| change("write", path, || retry_on_intr(|| rustix::io::pwrite(file, bytes, offset)));
        #[cfg(feature = "failpoints")]
        let write = |bytes: &[u8]| {
            let (bytes, most) = crate::failpoints::shortened(bytes, path);
            write(bytes).map(|written| written.min(most))
        };
        write(bytes)
    }

    fn truncate(&self, file: &File, length: u64, path: &Path) -> Result<(), CommitError> {
        change("truncate", path, || retry_on_intr(|| rustix::fs::ftruncate(file, length)))
    }

    fn start_writeback(&self, file: &File, range: &Range<u64>, path: &Path) -> Result<(), CommitError> {
        change("start writeback of", path, || retry_on_intr(|| sync_file_range(file, range, WRITE)))
    }

    fn wait_for_writeback(&self, file: &File, range: &Range<u64>, path: &Path) -> Result<(), CommitError> {
        let flags = WAIT_BEFORE | WRITE | WAIT_AFTER;
        change("wait for writeback of", path, || retry_on_intr(|| sync_file_range(file, range, flags)))
    }

    fn evict(&self, file: &File) {
        let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
    }

    fn fsync(&self, file: &File, path: &Path) -> Result<(), CommitError> {
        change("fsync", path, || rustix::fs::fsync(file))
    }

    fn fsync_folder(&self, folder: &OwnedFd, path: &Path) -> Result<(), CommitError> {
        change("fsync", path, || rustix::fs::fsync(folder))
    }

    fn rename(
        &self,
        (from_folder, from): (&OwnedFd, &OsStr),
        (to_folder, to): (&OwnedFd, &OsStr),
        path: &Path,
    ) -> Result<(), CommitError> {
        let rename = || rustix::fs::renameat(from_folder, from, to_folder, to);
        change("rename what is finished to", path, || retry_on_intr(rename))
    }

    fn rename_new(
        &self,
        (from_folder, from): (&OwnedFd, &OsStr),
        (to_folder, to): (&OwnedFd, &OsStr),
        path: &Path,
    ) -> Result<(), CommitError> {
        let rename = || renameat_with(from_folder, from, to_folder, to, RenameFlags::NOREPLACE);
        change("rename to the new name", path, || unsupported_is_invalid(retry_on_intr(rename)))
    }

    fn exchange(
        &self,
        (one_folder, one): (&OwnedFd, &OsStr),
        (other_folder, other): (&OwnedFd, &OsStr),
        path: &Path,
    ) -> Result<(), CommitError> {
        let exchange = || renameat_with(one_folder, one, other_folder, other, RenameFlags::EXCHANGE);
        change("exchange what is finished with", path, || unsupported_is_invalid(retry_on_intr(exchange)))
    }

    fn remove_file(&self, folder: &OwnedFd, name: &OsStr, path: &Path) -> Result<(), CommitError> {
        change("remove file", path, || retry_on_intr(|| rustix::fs::unlinkat(folder, name, AtFlags::empty())))
    }

    fn remove_folder(&self, parent: &OwnedFd, name: &OsStr, path: &Path) -> Result<(), CommitError> {
        change("remove folder", path, || retry_on_intr(|| rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR)))
    }
}

#[allow(clippy::unnecessary_cast, reason = "the fields are of other types on other systems")]
fn file_stat_of(stat: &Stat) -> FileStat {
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => EntryKind::File,
        FileType::Directory => EntryKind::Folder,
        FileType::Symlink => EntryKind::Link,
        _ => EntryKind::Other,
    };
    FileStat {
        kind,
        device: stat.st_dev as u64,
        inode: stat.st_ino,
        size: stat.st_size as u64,
        taken: stat.st_blocks as u64 * 512,
        user: stat.st_uid,
        is_marked: stat.st_mode & MARK != 0,
    }
}

fn open_stat(descriptor: impl AsFd, path: &Path) -> Result<FileStat, CommitError> {
    query("look at", path, || rustix::fs::fstat(&descriptor)).map(|stat| file_stat_of(&stat))
}

fn flock(descriptor: impl AsFd, sharing: LockMode, path: &Path) -> Result<LockOutcome, CommitError> {
    let operation = match sharing {
        LockMode::Shared => FlockOperation::NonBlockingLockShared,
        LockMode::Exclusive => FlockOperation::NonBlockingLockExclusive,
    };
    answer(retry_on_intr(|| rustix::fs::flock(&descriptor, operation)), path)
}

fn answer(outcome: rustix::io::Result<()>, path: &Path) -> Result<LockOutcome, CommitError> {
    match outcome {
        Ok(()) => Ok(LockOutcome::Taken),
        // POSIX allows either for a lock of fcntl.
        Err(Errno::WOULDBLOCK | Errno::ACCESS) => Ok(LockOutcome::HeldByAnother),
        // Network file systems translate locks: a folder cannot be open for writing (EBADF), and a server may have
        // no lock daemon (ENOLCK).
        Err(Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL | Errno::BADF | Errno::NOLCK) => Ok(LockOutcome::Unknown),
        Err(errno) => Err(CommitError::io("lock", path, errno)),
    }
}

/// The umask of this process; `None` where the system does not say. To ask with `umask()` would change it for a moment.
fn umask() -> Option<u32> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"))?;
    u32::from_str_radix(line.trim(), 8).ok()
}

/// Kernels and file systems report an unknown kind of rename with several error numbers.
fn unsupported_is_invalid(outcome: rustix::io::Result<()>) -> rustix::io::Result<()> {
    match outcome {
        Err(Errno::NOSYS | Errno::OPNOTSUPP) => Err(Errno::INVAL),
        outcome => outcome,
    }
}

/// rustix has no `sync_file_range`.
#[allow(unsafe_code)]
fn sync_file_range(file: &File, range: &Range<u64>, flags: u32) -> rustix::io::Result<()> {
    let offset = libc::off64_t::try_from(range.start).map_err(|_| Errno::OVERFLOW)?;
    let length = libc::off64_t::try_from(range.end - range.start).map_err(|_| Errno::OVERFLOW)?;
    // SAFETY: the descriptor is open for the whole call, and no memory is passed.
    let status = unsafe { libc::sync_file_range(file.as_raw_fd(), offset, length, flags) };
    if status == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

//! A network disk as one machine sees it: late, changed, or cut off.

use std::cell::Cell;
use std::ffi::{OsStr, OsString};
use std::ops::Range;
use std::path::Path;

use tundish_commit::disk::{Disk, FileStat, LockMode, LockOutcome};
use tundish_commit::{CommitError, RealDisk};

const EINVAL: i32 = 22;
pub const ETIMEDOUT: i32 = 110;

/// A network file system with or without locks and `renameat2`.
#[derive(Debug, Clone, Copy)]
pub struct NetworkDisk {
    /// The answer to every lock request.
    pub lock: LockOutcome,
    has_renames: bool,
}

/// Locks hold within one machine only.
pub const LOCAL_LOCKS: NetworkDisk = NetworkDisk { lock: LockOutcome::Taken, has_renames: true };
/// The file system has no locks.
pub const NO_LOCKS: NetworkDisk = NetworkDisk { lock: LockOutcome::Unknown, has_renames: true };
/// The file system has no `renameat2`.
pub const NO_NEW_RENAMES: NetworkDisk = NetworkDisk { lock: LockOutcome::Taken, has_renames: false };

thread_local! {
    /// A change elsewhere, right after this thread has listed a folder.
    pub static AFTER_LISTING: Cell<Option<Box<dyn FnOnce()>>> = const { Cell::new(None) };
    /// Whether the answer to this thread's next rename is lost and the server stops answering.
    pub static LOSES_ANSWER: Cell<bool> = const { Cell::new(false) };
    /// Whether the server does not answer this thread.
    pub static IS_CUT_OFF: Cell<bool> = const { Cell::new(false) };
    /// Whether this thread finds checkpoints with other inode numbers than before.
    pub static RENUMBERS: Cell<bool> = const { Cell::new(false) };
    /// Removed names that this thread's cache still lists in every folder.
    pub static REMEMBERED: Cell<Vec<OsString>> = const { Cell::new(Vec::new()) };
}

type Folder = <RealDisk as Disk>::Folder;
type File = <RealDisk as Disk>::File;
pub type Outcome<T> = Result<T, CommitError>;

macro_rules! as_the_real_disk {
    ($path:ident: $(fn $name:ident($($argument:ident: $type:ty),*) $(-> $outcome:ty)?;)*) => {
        $(fn $name(&self, $($argument: $type),*) $(-> $outcome)? { RealDisk.$name($($argument),*) })*
    };
}

fn failed(operation: &'static str, path: &Path, code: i32) -> CommitError {
    CommitError::Io { operation, path: path.to_path_buf(), source: std::io::Error::from_raw_os_error(code) }
}

impl NetworkDisk {
    fn no_such_rename(path: &Path) -> Outcome<()> {
        Err(failed("rename", path, EINVAL))
    }

    /// The answer to a rename that the server carried out.
    fn answer(renamed: Outcome<()>, path: &Path) -> Outcome<()> {
        if LOSES_ANSWER.take() {
            renamed.unwrap();
            IS_CUT_OFF.set(true);
            return Err(failed("rename", path, ETIMEDOUT));
        }
        renamed
    }
}

impl Disk for NetworkDisk {
    type Folder = Folder;
    type File = File;

    forwarded!(as_the_real_disk);

    fn evict(&self, file: &File) {
        RealDisk.evict(file);
    }

    fn list(&self, folder: &Folder, path: &Path) -> Outcome<Vec<OsString>> {
        let mut found = RealDisk.list(folder, path)?;
        if let Some(elsewhere) = AFTER_LISTING.take() {
            elsewhere();
        }
        let remembered = REMEMBERED.take();
        found.extend(remembered.iter().filter(|name| !found.contains(name)).cloned().collect::<Vec<_>>());
        REMEMBERED.set(remembered);
        Ok(found)
    }

    fn look_at(&self, folder: &Folder, name: &OsStr, path: &Path) -> Outcome<Option<FileStat>> {
        if IS_CUT_OFF.get() {
            return Err(failed("look at", path, ETIMEDOUT));
        }
        let mut found = RealDisk.look_at(folder, name, path)?;
        if let Some(found) = found.as_mut().filter(|_| RENUMBERS.get() && name.to_string_lossy().starts_with("hf-")) {
            found.inode += 1 << 40;
        }
        Ok(found)
    }

    fn is_local(&self, _folder: &Folder) -> bool {
        false
    }

    fn lock_folder(&self, _folder: &Folder, _sharing: LockMode, _path: &Path) -> Outcome<LockOutcome> {
        Ok(self.lock)
    }

    fn lock_file(&self, _file: &File, _sharing: LockMode, _path: &Path) -> Outcome<LockOutcome> {
        Ok(self.lock)
    }

    fn unmark(&self, folder: &Folder) {
        RealDisk.unmark(folder);
    }

    fn unlock_file(&self, file: &File) {
        RealDisk.unlock_file(file);
    }

    fn lock_file_for_process(&self, _file: &File, _path: &Path) -> Outcome<LockOutcome> {
        Ok(self.lock)
    }

    fn rename_new(&self, from: (&Folder, &OsStr), to: (&Folder, &OsStr), path: &Path) -> Outcome<()> {
        if self.has_renames {
            Self::answer(RealDisk.rename_new(from, to, path), path)
        } else {
            Self::no_such_rename(path)
        }
    }

    fn exchange(&self, one: (&Folder, &OsStr), other: (&Folder, &OsStr), path: &Path) -> Outcome<()> {
        if self.has_renames {
            Self::answer(RealDisk.exchange(one, other, path), path)
        } else {
            Self::no_such_rename(path)
        }
    }
}

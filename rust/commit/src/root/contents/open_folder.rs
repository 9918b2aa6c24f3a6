//! An open folder with its disk and path.
//!
//! Invariants: names are relative to the open folder, wherever its path leads by now. A replacement is durable before
//! it takes its place, and the change of names is durable before the call returns.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::root_names;
use crate::disk::remove_contents::remove_contents;
use crate::disk::{
    self, Disk, EntryKind, FileStat, LockMode, LockOutcome, Room, absent_is_fine, confirm_rename, leads_to,
};
use crate::error::CommitError;

/// The largest single write.
const LARGEST_WRITE: usize = 8 << 20;

pub(crate) struct OpenFolder<D: Disk> {
    pub(crate) disk: D,
    pub(crate) folder: D::Folder,
    pub(crate) path: PathBuf,
}

impl<D: Disk + Clone> OpenFolder<D> {
    pub(crate) fn open(disk: &D, path: &Path) -> Result<Self, CommitError> {
        Ok(Self { disk: disk.clone(), folder: disk.open_path(path)?, path: path.to_path_buf() })
    }

    /// Opens the folder at `path`. Creates it if only its last part is missing: more missing parts mean a mistyped
    /// path, or a disk that is not mounted.
    pub(crate) fn open_or_create(disk: &D, path: &Path) -> Result<Self, CommitError> {
        let missing = match Self::open(disk, path) {
            Err(error @ CommitError::ParentMissing { .. }) => error,
            outcome => return outcome,
        };
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(missing);
        };
        let parent = Self::open(disk, parent)?;
        match disk.create_folder(&parent.folder, name, path) {
            // Another process was faster; or it is a broken link, which cannot be opened.
            Err(error) if error.is(Errno::EXIST) => {}
            outcome => outcome?,
        }
        parent.sync()?;
        Self::open(disk, path)
    }

    pub(crate) fn open_folder(&self, name: &OsStr) -> Result<Self, CommitError> {
        let path = self.path.join(name);
        Ok(Self { disk: self.disk.clone(), folder: self.disk.open_folder(&self.folder, name, &path)?, path })
    }

    pub(crate) fn open_file(&self, name: &OsStr) -> Result<D::File, CommitError> {
        self.disk.open_file(&self.folder, name, &self.path.join(name))
    }

    pub(crate) fn look_at(&self, name: &OsStr) -> Result<Option<FileStat>, CommitError> {
        self.disk.look_at(&self.folder, name, &self.path.join(name))
    }

    pub(crate) fn list(&self) -> Result<Vec<OsString>, CommitError> {
        self.disk.list(&self.folder, &self.path)
    }

    /// Whether the folder `name` is in it.
    pub(crate) fn has_folder(&self, name: &OsStr) -> Result<bool, CommitError> {
        Ok(self.look_at(name)?.is_some_and(|stat| stat.kind == EntryKind::Folder))
    }

    /// The room that its contents take, and itself.
    pub(crate) fn taken(&self) -> Result<Room, CommitError> {
        let mut taken = Room { bytes: 0, files: 1 };
        for name in self.list()? {
            let Some(stat) = self.look_at(&name)? else { continue };
            let inner = match stat.kind {
                EntryKind::Folder => self.open_folder(&name)?.taken()?,
                _ => Room { bytes: stat.taken, files: 1 },
            };
            taken.bytes += inner.bytes;
            taken.files += inner.files;
        }
        Ok(taken)
    }

    /// Whether a process holds the lock that writers take on the folder `name`.
    pub(crate) fn has_live_writer(&self, name: &OsStr) -> Result<bool, CommitError> {
        if !self.has_folder(name)? {
            return Ok(false);
        }
        let folder = self.open_folder(name)?;
        // The owner that made it is dead. Where locks cannot show other writers, the folder would stay for ever.
        Ok(self.disk.lock_folder(&folder.folder, LockMode::Exclusive, &folder.path)? == LockOutcome::HeldByAnother)
    }

    pub(crate) fn stat(&self) -> Result<FileStat, CommitError> {
        self.disk.folder_stat(&self.folder, &self.path)
    }

    /// Whether `name` leads to that open folder.
    pub(crate) fn has(&self, name: &OsStr, folder: &Self) -> Result<bool, CommitError> {
        leads_to(&self.disk, &self.folder, name, &folder.folder, &folder.path)
    }

    /// Makes the names in it durable.
    pub(crate) fn sync(&self) -> Result<(), CommitError> {
        self.disk.fsync_folder(&self.folder, &self.path)
    }

    /// Makes the names in it and in all folders in it durable, the innermost first.
    pub(crate) fn sync_all(&self) -> Result<(), CommitError> {
        for name in self.list()? {
            if self.has_folder(&name)? {
                self.open_folder(&name)?.sync_all()?;
            }
        }
        self.sync()
    }

    /// Makes a folder that no other user can open.
    pub(crate) fn create_private_folder(&self, name: &OsStr) -> Result<Self, CommitError> {
        self.disk.create_private_folder(&self.folder, name, &self.path.join(name))?;
        self.open_folder(name)
    }

    /// Gives a private folder the mode that the umask leaves.
    pub(crate) fn open_to_readers(&self) -> Result<(), CommitError> {
        self.disk.open_to_readers(&self.folder, &self.path)
    }

    /// Makes a new file with durable bytes and returns its status. Its name is not durable yet.
    pub(crate) fn create_file(&self, name: &OsStr, bytes: &[u8]) -> Result<FileStat, CommitError> {
        let path = self.path.join(name);
        let file = self.disk.create_file(&self.folder, name, &path)?;
        disk::write_all(&self.disk, &file, 0, bytes, &path, LARGEST_WRITE, |_| Ok(()))?;
        self.disk.fsync(&file, &path)?;
        self.disk.file_stat(&file, &path)
    }

    /// Replaces a symbolic link or file by a link to `target`, durably.
    pub(crate) fn replace_link(&self, name: &OsStr, target: &OsStr) -> Result<(), CommitError> {
        self.replace(name, |temporary| {
            self.disk.create_link(&self.folder, temporary, target, &self.path.join(temporary))?;
            // The contents of a link have no fsync of their own.
            self.sync()
        })
    }

    fn replace(&self, name: &OsStr, make: impl FnOnce(&OsStr) -> Result<(), CommitError>) -> Result<(), CommitError> {
        let temporary = root_names::temporary(name);
        absent_is_fine(self.remove_file(&temporary))?;
        let made = make(&temporary).and_then(|()| {
            let from = (&self.folder, temporary.as_os_str());
            self.disk.rename(from, (&self.folder, name), &self.path.join(name))
        });
        if let Err(error) = made {
            // Best effort: the next replacement, or the next start, removes it too.
            let _ = self.remove_file(&temporary);
            return Err(error);
        }
        self.sync()
    }

    /// Renames the folder `from` to the unused name `to`; fails with `EEXIST` where something has that name.
    pub(crate) fn rename_new(&self, from: &OsStr, to: &OsStr) -> Result<(), CommitError> {
        let path = self.path.join(to);
        let moved = self.look_at(from)?;
        let ends = ((&self.folder, from), (&self.folder, to));
        match self.disk.rename_new(ends.0, ends.1, &path) {
            // Network file systems have no such rename. Only the owner renames here, and a plain rename never
            // replaces a folder that is not empty.
            Err(error) if error.is(Errno::INVAL) => {
                if self.look_at(to)?.is_some() {
                    return Err(CommitError::io("rename to the new name", &path, Errno::EXIST));
                }
                let renamed = self.disk.rename(ends.0, ends.1, &path);
                confirm_rename(&self.disk, ends.1, &path, moved, renamed)
            }
            outcome => confirm_rename(&self.disk, ends.1, &path, moved, outcome),
        }
    }

    /// Exchanges the folder `from` with the folder `to`.
    pub(crate) fn exchange(&self, from: &OsStr, to: &OsStr) -> Result<(), CommitError> {
        let path = self.path.join(to);
        let moved = self.look_at(from)?;
        let exchanged = self.disk.exchange((&self.folder, from), (&self.folder, to), &path);
        confirm_rename(&self.disk, (&self.folder, to), &path, moved, exchanged).map_err(|error| match error {
            error if error.is(Errno::INVAL) => CommitError::ExchangeUnsupported { path },
            error => error,
        })
    }

    /// The first unused name of a sequence.
    pub(crate) fn free_name(&self, name: impl Fn(u64) -> OsString) -> Result<OsString, CommitError> {
        let mut number = 0;
        loop {
            let candidate = name(number);
            if self.look_at(&candidate)?.is_none() {
                return Ok(candidate);
            }
            number += 1;
        }
    }

    pub(crate) fn remove_file(&self, name: &OsStr) -> Result<(), CommitError> {
        self.disk.remove_file(&self.folder, name, &self.path.join(name))
    }

    /// Removes the file or folder `name` with its contents.
    pub(crate) fn remove(&self, name: &OsStr) -> Result<(), CommitError> {
        let Some(stat) = self.look_at(name)? else {
            return Ok(());
        };
        if stat.kind != EntryKind::Folder {
            return absent_is_fine(self.remove_file(name));
        }
        let path = self.path.join(name);
        if stat.device != self.stat()?.device {
            return Err(CommitError::io("remove the mounted file system at", &path, Errno::BUSY));
        }
        let inner = self.open_folder(name)?;
        remove_contents(&self.disk, &inner.folder, &path)?;
        absent_is_fine(self.disk.remove_folder(&self.folder, name, &path))
    }
}

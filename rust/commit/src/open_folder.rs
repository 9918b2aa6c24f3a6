//! An open folder with its disk and path.
//!
//! Invariants:
//!
//! 1. Names are relative to the open folder, wherever its path leads by now.
//! 2. A link is durable before it takes its place, and the change of names is durable before the call returns.
//! 3. Everything is removed relative to open folders and never through a symbolic link or a mount point, so nothing
//!    outside the folder can be lost.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::disk::{self, Disk, EntryKind, FileStat, LockMode, LockOutcome, Room, absent_is_fine};
use crate::error::CommitError;

/// The entry that a rename may replace.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Replacing {
    /// Nothing; else it fails with `EEXIST`.
    Nothing,
    /// Nothing or an empty folder.
    EmptyFolder,
    /// A folder, which gets the old name.
    Folder,
}

pub(crate) struct OpenFolder<D: Disk> {
    pub(crate) disk: D,
    pub(crate) folder: D::Folder,
    pub(crate) path: PathBuf,
}

impl<D: Disk> OpenFolder<D> {
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
        let named = self.disk.look_at(&self.folder, name, &folder.path)?;
        named.map_or(Ok(false), |named| Ok(named.is_same(&folder.stat()?)))
    }

    /// Makes the names in it durable.
    pub(crate) fn sync(&self) -> Result<(), CommitError> {
        self.disk.fsync_folder(&self.folder, &self.path)
    }

    /// Makes the name of what was published at `path` durable.
    pub(crate) fn sync_name(&self, path: &Path) -> Result<(), CommitError> {
        self.sync().map_err(|error| match error {
            CommitError::Io { source, .. } => CommitError::NotDurable { path: path.to_path_buf(), source },
            other => other,
        })
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

    /// Makes a new file with durable bytes and returns its status. Its name is not durable yet.
    pub(crate) fn create_file(&self, name: &OsStr, bytes: &[u8]) -> Result<FileStat, CommitError> {
        let path = self.path.join(name);
        let file = self.disk.create_file(&self.folder, name, &path)?;
        disk::write_all(&self.disk, &file, 0, bytes, &path, |_| Ok(()))?;
        self.disk.fsync(&file, &path)?;
        self.disk.file_stat(&file, &path)
    }

    /// Replaces a symbolic link or file by a link to `target`, durably. Until then the link has the name `temporary`.
    pub(crate) fn replace_link(&self, name: &OsStr, target: &OsStr, temporary: &OsStr) -> Result<(), CommitError> {
        absent_is_fine(self.remove_file(temporary))?;
        let made = self.disk.create_link(&self.folder, temporary, target, &self.path.join(temporary)).and_then(|()| {
            // The contents of a link have no fsync of their own.
            self.sync()?;
            self.disk.rename((&self.folder, temporary), (&self.folder, name), &self.path.join(name))
        });
        if let Err(error) = made {
            // Best effort: the next replacement, or the next start, removes it too.
            let _ = self.remove_file(temporary);
            return Err(error);
        }
        self.sync()
    }

    /// Renames the folder `from` to `to`.
    pub(crate) fn rename(&self, from: &OsStr, to: &OsStr, replacing: Replacing) -> Result<(), CommitError> {
        let path = self.path.join(to);
        let moved = self.look_at(from)?;
        let (from, target) = ((&self.folder, from), (&self.folder, to));
        let renamed = match replacing {
            Replacing::EmptyFolder => self.disk.rename(from, target, &path),
            Replacing::Folder => self.disk.exchange(from, target, &path),
            Replacing::Nothing => match self.disk.rename_new(from, target, &path) {
                // Network file systems have no such rename. Only the owner renames here, and a plain rename never
                // replaces a folder that is not empty.
                Err(error) if error.is(Errno::INVAL) => {
                    if self.look_at(to)?.is_some() {
                        return Err(CommitError::io("rename to the new name", &path, Errno::EXIST));
                    }
                    self.disk.rename(from, target, &path)
                }
                outcome => outcome,
            },
        };
        self.confirm_rename(to, moved, renamed)
    }

    /// Accepts a failed rename if `name` leads to what was `moved`: network file systems may report failure for a
    /// rename that the server carried out.
    pub(crate) fn confirm_rename(
        &self,
        name: &OsStr,
        moved: Option<FileStat>,
        renamed: Result<(), CommitError>,
    ) -> Result<(), CommitError> {
        let Err(error) = renamed else {
            return Ok(());
        };
        match (self.look_at(name)?, moved) {
            (Some(found), Some(moved)) if found.is_same(&moved) => Ok(()),
            _ => Err(error),
        }
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

    /// Removes the file or folder `name` with its contents, if it is there.
    pub(crate) fn remove(&self, name: &OsStr) -> Result<(), CommitError> {
        match self.remove_file(name) {
            // Linux answers the first, POSIX the second.
            Err(error) if error.is(Errno::ISDIR) || error.is(Errno::PERM) => self.remove_folder(name, error),
            outcome => absent_is_fine(outcome),
        }
    }

    /// Removes everything in it.
    pub(crate) fn remove_contents(&self) -> Result<(), CommitError> {
        self.list()?.iter().try_for_each(|name| self.remove(name))
    }

    /// `not_a_file`: why it could not be removed as a file.
    fn remove_folder(&self, name: &OsStr, not_a_file: CommitError) -> Result<(), CommitError> {
        let inner = match self.open_folder(name) {
            Err(error) if error.is(Errno::NOENT) => return Ok(()),
            // It is a file after all, which may not be removed.
            Err(error) if error.is(Errno::NOTDIR) || error.is(Errno::LOOP) => return Err(not_a_file),
            outcome => outcome?,
        };
        if inner.stat()?.device != self.stat()?.device {
            return Err(CommitError::io("remove the mounted file system at", &inner.path, Errno::BUSY));
        }
        inner.remove_contents()?;
        absent_is_fine(self.disk.remove_folder(&self.folder, name, &inner.path))
    }
}

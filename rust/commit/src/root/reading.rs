//! Reading a root without owning it, and keeping a checkpoint from going while it is read.
//!
//! A reader holds a shared lock on the checkpoint's manifest; who removes or replaces a checkpoint holds an exclusive one
//! from before it loses its name until it is gone. What always holds: neither waits for the other; a reader believes in its
//! lock only when the folder still has its name, seen with the lock held. Where the file system has no such
//! locks nobody can read under one, and so nothing is in anybody's way.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::checkpoint::{self, Checkpoint};
use super::directory::Directory;
use super::{Root, layout};
use crate::disk::{Disk, EntryKind, Lock, Sharing};
use crate::error::CommitError;
use crate::manifest::{self, Kind};

use rustix::io::Errno;

/// Keeps a checkpoint from being removed or replaced until it is dropped.
#[derive(Debug)]
pub struct ReadLock<F> {
    path: PathBuf,
    _manifest: F,
}

impl<F> ReadLock<F> {
    /// The checkpoint's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// A checkpoint that nobody can begin to read under a lock as long as this lives.
pub(super) struct Kept<D: Disk> {
    _manifest: Option<D::File>,
}

/// Locks readers out of what has that name.
///
/// # Errors
/// [`CommitError::CheckpointInUse`] when somebody reads it.
pub(super) fn keep_from_readers<D: Disk + Clone>(root: &Directory<D>, name: &OsStr) -> Result<Kept<D>, CommitError> {
    let folder = root.open_folder(name)?;
    let manifest = OsStr::new(manifest::FILE_NAME);
    if folder.look_at(manifest)?.is_none_or(|status| status.kind != EntryKind::File) {
        // Nobody can read it under a lock: there is nothing to lock.
        return Ok(Kept { _manifest: None });
    }
    let path = folder.path.join(manifest);
    let mut file = folder.open_file(manifest)?;
    let mut lock = folder.disk.lock_file(&file, Sharing::Exclusive, &path)?;
    if lock == Lock::Unknown {
        // Network file systems give such a lock only on what is open for writing.
        file = folder.disk.open_file_for_writing(&folder.folder, manifest, &path)?;
        lock = folder.disk.lock_file(&file, Sharing::Exclusive, &path)?;
    }
    match lock {
        Lock::HeldByAnother => Err(CommitError::CheckpointInUse { path: folder.path, reason: "it is being read" }),
        Lock::Taken | Lock::Unknown => Ok(Kept { _manifest: Some(file) }),
    }
}

fn read_lock<D: Disk + Clone>(root: &Directory<D>, kind: Kind, step: u64) -> Result<ReadLock<D::File>, CommitError> {
    let name = layout::checkpoint(kind, step);
    let gone = || CommitError::NoSuchCheckpoint { path: root.path.join(&name) };
    if root.look_at(&name)?.is_none_or(|status| status.kind != EntryKind::Folder) {
        return Err(gone());
    }
    let absent_is_gone = |error: CommitError| if error.is(Errno::NOENT) { gone() } else { error };
    let folder = root.open_folder(&name).map_err(absent_is_gone)?;
    let manifest = OsStr::new(manifest::FILE_NAME);
    let file = folder.open_file(manifest).map_err(absent_is_gone)?;
    match folder.disk.lock_file(&file, Sharing::Shared, &folder.path.join(manifest))? {
        Lock::Taken => {}
        // It is being removed or replaced.
        Lock::HeldByAnother => return Err(gone()),
        Lock::Unknown => return Err(CommitError::io("lock against removal", &folder.path, Errno::NOLCK)),
    }
    if !root.has(&name, &folder)? {
        return Err(gone());
    }
    Ok(ReadLock { path: folder.path, _manifest: file })
}

impl<D: Disk + Clone + 'static> Root<D> {
    /// Keeps a checkpoint from being removed or replaced as long as the lock lives, in whichever process.
    ///
    /// # Errors
    /// [`CommitError::NoSuchCheckpoint`]; `ENOLCK` where the file system has no locks.
    pub fn read_lock(&self, kind: Kind, step: u64) -> Result<ReadLock<D::File>, CommitError> {
        read_lock(&self.root, kind, step)
    }
}

/// A root as anybody may look at it: nothing is locked, repaired or kept in mind.
pub struct ReadonlyRoot<D: Disk + Clone> {
    root: Directory<D>,
}

impl<D: Disk + Clone> ReadonlyRoot<D> {
    /// Opens the root at `path`.
    ///
    /// # Errors
    /// [`CommitError::ParentMissing`], [`CommitError::NotADirectory`], [`CommitError::Io`].
    pub fn open(disk: D, path: &Path) -> Result<Self, CommitError> {
        Ok(Self { root: Directory::open(&disk, &super::opening::absolute(path)?)? })
    }

    /// The absolute path.
    pub fn path(&self) -> &Path {
        &self.root.path
    }

    /// The whole checkpoints of now: by kind, steps ascending.
    pub fn list(&self) -> Result<Vec<Checkpoint>, CommitError> {
        let mut steps = self.steps(None)?;
        steps.sort_unstable();
        let examined = steps.into_iter().filter_map(|(kind, step)| checkpoint::examine(&self.root, kind, step).ok());
        Ok(examined.map(|published| published.checkpoint).collect())
    }

    /// The newest whole checkpoint of a kind.
    pub fn latest(&self, kind: Kind) -> Result<Option<PathBuf>, CommitError> {
        let mut steps = self.steps(Some(kind))?;
        steps.sort_unstable();
        let mut newest_first = steps.into_iter().rev();
        let newest = newest_first.find_map(|(kind, step)| checkpoint::examine(&self.root, kind, step).ok());
        Ok(newest.map(|published| published.checkpoint.path))
    }

    /// As [`Root::read_lock`].
    pub fn read_lock(&self, kind: Kind, step: u64) -> Result<ReadLock<D::File>, CommitError> {
        read_lock(&self.root, kind, step)
    }

    fn steps(&self, only: Option<Kind>) -> Result<Vec<super::Key>, CommitError> {
        let steps = self.root.list()?.into_iter().filter_map(|name| match layout::classify(&name) {
            layout::Entry::Checkpoint(kind, step) if only.is_none_or(|only| only == kind) => Some((kind, step)),
            _ => None,
        });
        Ok(steps.collect())
    }
}

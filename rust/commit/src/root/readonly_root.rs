//! A root as anybody may read it, without its writer lock.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::names;
use super::read_lock::{POLL, ReadLock, lock_checkpoint};
use super::whole_checkpoint::{self, CheckpointInfo, CheckpointKey, ExamineFailure, PublishedCheckpoint};
use super::writer_lock::nonce_of;
use crate::disk::Disk;
use crate::error::CommitError;
use crate::hidden_names::absolute;
use crate::manifest::CheckpointKind;
use crate::open_folder::OpenFolder;

/// How long to look again for the successor of checkpoints that disappeared. A network file system may list removed
/// ones for longer; then its readers do not see new ones either.
const CATCH_UP: Duration = Duration::from_secs(2);

/// A root opened for reading: nothing is locked, repaired or remembered.
pub struct ReadonlyRoot<D: Disk> {
    root: OpenFolder<D>,
}

impl<D: Disk> ReadonlyRoot<D> {
    /// Opens the root at `path`.
    ///
    /// # Errors
    /// [`CommitError::ParentMissing`], [`CommitError::NotADirectory`], [`CommitError::Io`].
    pub fn open(disk: D, path: &Path) -> Result<Self, CommitError> {
        Ok(Self { root: OpenFolder::open(&disk, &absolute(path)?)? })
    }

    /// The absolute path.
    pub fn path(&self) -> &Path {
        &self.root.path
    }

    /// The random id in `.owner`; equal ids mean the same folder. `None` where nobody ever owned it.
    ///
    /// # Errors
    /// [`CommitError::Io`].
    pub fn owner(&self) -> Result<Option<String>, CommitError> {
        nonce_of(&self.root)
    }

    /// The whole checkpoints: by kind, steps ascending.
    ///
    /// # Errors
    /// [`CommitError::Io`] when the root cannot be read.
    pub fn list(&self) -> Result<Vec<CheckpointInfo>, CommitError> {
        Ok(self.survey()?.whole)
    }

    /// Everything that is named like a checkpoint.
    ///
    /// # Errors
    /// As [`list`](ReadonlyRoot::list).
    pub fn survey(&self) -> Result<RootListing, CommitError> {
        let mut listing = RootListing::default();
        for key in self.keys()? {
            match self.examine(key)? {
                None => {}
                Some(Ok(published)) => listing.whole.push(published.checkpoint),
                Some(Err(reason)) => {
                    let (kind, step) = key;
                    let path = self.root.path.join(names::checkpoint(kind, step));
                    listing.damaged.push(DamagedCheckpoint { kind, step, path, reason });
                }
            }
        }
        Ok(listing)
    }

    /// The newest whole checkpoint of a kind.
    ///
    /// # Errors
    /// As [`list`](ReadonlyRoot::list).
    pub fn latest(&self, kind: CheckpointKind) -> Result<Option<PathBuf>, CommitError> {
        let until = Instant::now() + CATCH_UP;
        loop {
            let mut is_any_gone = false;
            for key in self.keys()?.into_iter().rev().filter(|(found, _)| *found == kind) {
                match self.examine(key)? {
                    Some(Ok(published)) => return Ok(Some(published.checkpoint.path)),
                    Some(Err(_)) => {}
                    None => is_any_gone = true,
                }
            }
            // A checkpoint that is gone was mostly removed for one that was published after this listing.
            if !is_any_gone || Instant::now() > until {
                return Ok(None);
            }
            std::thread::sleep(POLL);
        }
    }

    /// As [`read_lock_at`](super::read_lock_at), of the checkpoint of this kind and step.
    ///
    /// # Errors
    /// The errors of [`read_lock_at`](super::read_lock_at).
    pub fn read_lock(&self, kind: CheckpointKind, step: u64) -> Result<ReadLock<D>, CommitError> {
        lock_checkpoint(&self.root, kind, step)
    }

    /// The kinds and steps of all names of checkpoints, ascending.
    fn keys(&self) -> Result<Vec<CheckpointKey>, CommitError> {
        let mut keys: Vec<CheckpointKey> = self.root.list()?.into_iter().filter_map(|name| key_of(&name)).collect();
        keys.sort_unstable();
        Ok(keys)
    }

    /// Whether it is whole, or why not; `None` when it is gone.
    fn examine(&self, (kind, step): CheckpointKey) -> Result<Option<Result<PublishedCheckpoint, String>>, CommitError> {
        let name = names::checkpoint(kind, step);
        loop {
            let before = self.root.look_at(&name)?;
            let reason = match whole_checkpoint::examine(&self.root, kind, step) {
                Ok(published) => return Ok(Some(Ok(published))),
                Err(ExamineFailure::NotWhole(reason)) => reason,
                Err(ExamineFailure::Unreadable(error)) => return Err(error),
            };
            // A checkpoint that was removed or replaced meanwhile is not damaged.
            match (before, self.root.look_at(&name)?) {
                (_, None) => return Ok(None),
                (Some(before), Some(now)) if before.is_same(&now) => return Ok(Some(Err(reason))),
                _ => {}
            }
        }
    }
}

/// Everything in a root that is named like a checkpoint: by kind, steps ascending.
#[derive(Debug, Default)]
pub struct RootListing {
    /// Whole checkpoints.
    pub whole: Vec<CheckpointInfo>,
    /// The others.
    pub damaged: Vec<DamagedCheckpoint>,
}

/// A folder that is named like a checkpoint and is not whole.
#[derive(Debug)]
pub struct DamagedCheckpoint {
    /// The kind in its name.
    pub kind: CheckpointKind,
    /// The step in its name.
    pub step: u64,
    /// Its absolute path.
    pub path: PathBuf,
    /// Why it is not whole.
    pub reason: String,
}

fn key_of(name: &OsStr) -> Option<CheckpointKey> {
    match names::classify(name) {
        names::RootEntry::Checkpoint(kind, step) => Some((kind, step)),
        _ => None,
    }
}

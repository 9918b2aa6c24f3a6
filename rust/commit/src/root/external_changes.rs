//! Finds out whether published checkpoints are still there: people remove, rename and replace them.
//!
//! Invariants: the next call that depends on a checkpoint notices that it is gone. A checkpoint is forgotten only when
//! its name does not lead to its manifest.

use std::ffi::OsStr;
use std::sync::Arc;

use rustix::io::Errno;

use super::checkpoint_root::Root;
use super::contents::whole_checkpoint::PublishedCheckpoint;
use super::contents::{CheckpointInfo, CheckpointKey, Checkpoints, root_names};
use crate::disk::{Disk, EntryKind};
use crate::error::CommitError;
use crate::manifest::{self, CheckpointKind};

impl<D: Disk + Clone + 'static> Root<D> {
    /// The published checkpoints: by kind, steps ascending. Checkpoints that a person removed or renamed are left out.
    ///
    /// # Errors
    /// [`CommitError::Io`] when the root cannot be read.
    pub fn list(&self) -> Result<Vec<CheckpointInfo>, CommitError> {
        self.forget_missing()?;
        Ok(self.published()?.into_values().map(|published| published.checkpoint.clone()).collect())
    }

    /// A copy of what is known, for use without the lock.
    pub(super) fn published(&self) -> Result<Checkpoints, CommitError> {
        Ok(self.state()?.published.clone())
    }

    /// Forgets every checkpoint that is gone.
    pub(super) fn forget_missing(&self) -> Result<(), CommitError> {
        for key in self.published()?.into_keys() {
            self.is_present(key)?;
        }
        Ok(())
    }

    /// The newest step of a kind that is there. Forgets newer ones that are gone.
    pub(super) fn newest_present(&self, kind: CheckpointKind) -> Result<Option<u64>, CommitError> {
        loop {
            let newest = self.state()?.newest(kind);
            match newest {
                Some(step) if !self.is_present((kind, step))? => {}
                newest => return Ok(newest),
            }
        }
    }

    /// Whether a checkpoint is published and there. Forgets it if it is gone.
    pub(super) fn is_present(&self, key: CheckpointKey) -> Result<bool, CommitError> {
        let Some(published) = self.state()?.published.get(&key).cloned() else {
            return Ok(false);
        };
        let is_there = self.is_there(key, &published)?;
        if !is_there {
            let mut state = self.state()?;
            // Another one may have been published in its place since.
            if state.published.get(&key).is_some_and(|known| Arc::ptr_eq(known, &published)) {
                state.published.remove(&key);
            }
        }
        Ok(is_there)
    }

    /// Whether the name leads to a folder with the manifest file of that checkpoint.
    fn is_there(&self, (kind, step): CheckpointKey, published: &PublishedCheckpoint) -> Result<bool, CommitError> {
        let folder = match self.root.open_folder(&root_names::checkpoint(kind, step)) {
            // It is gone, or this library did not make it.
            Err(error)
                if [Errno::NOENT, Errno::NOTDIR, Errno::LOOP, Errno::ACCESS].iter().any(|&code| error.is(code)) =>
            {
                return Ok(false);
            }
            outcome => outcome?,
        };
        let found = folder.look_at(OsStr::new(manifest::FILE_NAME))?;
        Ok(found.is_some_and(|found| found.kind == EntryKind::File && found.is_same(&published.manifest)))
    }
}

//! What an owner knows to be published.

use std::path::PathBuf;

use super::{Checkpoint, Checkpoints, Root, State, newest};
use crate::disk::Disk;
use crate::error::CommitError;
use crate::manifest::Kind;

impl<D: Disk + Clone + 'static> Root<D> {
    /// The published checkpoints: by kind, steps ascending. What a person removed or renamed is left out.
    ///
    /// # Errors
    /// [`CommitError::Io`] when the root cannot be looked at.
    pub fn list(&self) -> Result<Vec<Checkpoint>, CommitError> {
        self.forget_vanished()?;
        Ok(self.published()?.into_values().map(|published| published.checkpoint.clone()).collect())
    }

    /// The newest published checkpoint of a kind.
    ///
    /// # Errors
    /// As [`list`](Root::list).
    pub fn latest(&self, kind: Kind) -> Result<Option<PathBuf>, CommitError> {
        Ok(self.find_newest(kind)?.map(|step| self.checkpoint_path((kind, step))))
    }

    /// A copy of what is known, for who goes on to the disk with it.
    pub(super) fn published(&self) -> Result<Checkpoints, CommitError> {
        Ok(self.state()?.published.clone())
    }
}

impl<D: Disk + Clone + 'static> State<D> {
    /// The newest of a kind.
    pub(super) fn newest(&self, kind: Kind) -> Option<u64> {
        newest(&self.published, kind)
    }
}

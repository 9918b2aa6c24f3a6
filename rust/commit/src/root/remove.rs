//! Removes a checkpoint that is no longer needed, and protects checkpoints from removal.
//!
//! Invariant: the link leads elsewhere before the checkpoint loses its name, and the folder is emptied only when that
//! is durable.

use std::ffi::OsString;
use std::sync::Arc;

use rustix::io::Errno;

use super::checkpoint_root::Root;
use super::contents::whole_checkpoint::PublishedCheckpoint;
use super::contents::{CheckpointKey, latest_links, root_names};
use super::reading::exclude_readers;
use crate::disk::Disk;
use crate::error::CommitError;
use crate::manifest::CheckpointKind;

impl<D: Disk + Clone + 'static> Root<D> {
    /// Removes a checkpoint: its name, then its bytes once that is durable.
    ///
    /// # Errors
    /// [`CommitError::CheckpointInUse`] for the newest of its kind, for one that is being read and for one that is
    /// protected; [`CommitError::NoSuchCheckpoint`]; [`CommitError::Io`]. A checkpoint that lost its name no longer
    /// counts; the next start removes what remains of it.
    pub fn remove(&self, kind: CheckpointKind, step: u64) -> Result<(), CommitError> {
        let key = (kind, step);
        let path = self.checkpoint_path(key);
        let publish_lock = self.publish_lock()?;
        self.check_owned()?;
        self.forget_missing()?;
        if self.newest_present(kind)? == Some(step) {
            return Err(CommitError::CheckpointInUse { path, reason: "it is the newest of its kind" });
        }
        if !self.is_present(key)? {
            return Err(CommitError::NoSuchCheckpoint { path });
        }
        let no_readers =
            exclude_readers(&self.root, &root_names::checkpoint(kind, step)).map_err(|error| match error {
                error if error.is(Errno::NOENT) => CommitError::NoSuchCheckpoint { path },
                error => error,
            })?;
        latest_links::move_latest_link_away(&self.root, &self.published()?, key)?;
        let published = self.unlist(key)?;
        let hidden = match self.hide(key) {
            Ok(hidden) => hidden,
            Err(error) => {
                // It still has its name.
                self.state()?.published.extend(published.map(|published| (key, published)));
                return Err(error);
            }
        };
        self.root.sync()?;
        // Emptying it takes time, and needs no lock.
        drop(publish_lock);
        self.root.remove(&hidden)?;
        drop(no_readers);
        Ok(())
    }

    /// Keeps the checkpoints of a step from being removed as long as the root is open: both kinds, also those published
    /// later. Returns at once; a checkpoint whose removal has begun, and which is no longer listed, still goes.
    ///
    /// # Errors
    /// [`CommitError::RootLost`] in a child made by `fork`.
    pub fn protect(&self, step: u64) -> Result<(), CommitError> {
        self.state()?.protected.insert(step);
        Ok(())
    }

    /// Takes a checkpoint off the list of published ones, unless it is protected.
    fn unlist(&self, key: CheckpointKey) -> Result<Option<Arc<PublishedCheckpoint>>, CommitError> {
        let mut state = self.state()?;
        if state.protected.contains(&key.1) {
            return Err(CommitError::CheckpointInUse { path: self.checkpoint_path(key), reason: "it is protected" });
        }
        Ok(state.published.remove(&key))
    }

    /// Renames the folder of a checkpoint to a name for removal and returns that.
    fn hide(&self, (kind, step): CheckpointKey) -> Result<OsString, CommitError> {
        let name = self.root.free_name(|number| root_names::removed(kind, step, number))?;
        self.root.rename_new(&root_names::checkpoint(kind, step), &name)?;
        Ok(name)
    }
}

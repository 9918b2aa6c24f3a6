//! Removes a checkpoint that is no longer needed, and protects checkpoints from removal.
//!
//! Invariants: the link leads elsewhere before the checkpoint loses its name, and the folder is emptied only when that
//! is durable. The registry omits the checkpoint before that, unless the disk has no room for a new registry. Then
//! removing the checkpoint makes the room, and the registry is written last. Every start repairs such a registry.

use std::ffi::OsString;
use std::sync::Arc;

use rustix::io::Errno;

use super::checkpoint_root::Root;
use super::contents::whole_checkpoint::PublishedCheckpoint;
use super::contents::{CheckpointKey, registry_and_links, root_names};
use super::reading::exclude_readers;
use crate::disk::Disk;
use crate::error::CommitError;
use crate::manifest::CheckpointKind;

/// A checkpoint under a hidden name.
struct HiddenCheckpoint {
    name: OsString,
    /// The registry still lists it.
    is_registered: bool,
}

impl<D: Disk + Clone + 'static> Root<D> {
    /// Removes a checkpoint: from the registry, then its name, then its bytes once that is durable.
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
            // A person may have removed it since the registry was written.
            registry_and_links::repair_registry(&self.root, &self.published()?)?;
            return Err(CommitError::NoSuchCheckpoint { path });
        }
        let no_readers =
            exclude_readers(&self.root, &root_names::checkpoint(kind, step)).map_err(|error| match error {
                error if error.is(Errno::NOENT) => CommitError::NoSuchCheckpoint { path },
                error => error,
            })?;
        registry_and_links::move_latest_link_away(&self.root, &self.published()?, key)?;
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
        self.root.remove(&hidden.name)?;
        drop(no_readers);
        if hidden.is_registered {
            let _publish_lock = self.publish_lock()?;
            self.check_owned()?;
            self.forget_missing()?;
            registry_and_links::write_registry(&self.root, &self.published()?)?;
        }
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

    /// Writes the registry without the checkpoint, where there is room for that, and hides the folder.
    fn hide(&self, (kind, step): CheckpointKey) -> Result<HiddenCheckpoint, CommitError> {
        let name = self.root.free_name(|number| root_names::removed(kind, step, number))?;
        let is_registered = match registry_and_links::write_registry(&self.root, &self.published()?) {
            Err(error) if error.is_out_of_space() => true,
            outcome => outcome.map(|()| false)?,
        };
        self.root.rename_new(&root_names::checkpoint(kind, step), &name)?;
        Ok(HiddenCheckpoint { name, is_registered })
    }
}

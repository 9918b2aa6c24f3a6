//! Removing a checkpoint that is not needed any more.
//!
//! What always holds: the pointer leads elsewhere before it loses its name, and it is emptied only when that is
//! durable. It has left the registry before that too, except where the disk has no room for a new registry: then its
//! bytes make that room, and what the registry says of it until then leads to nothing. Every start writes such a
//! registry again.

use std::ffi::OsString;
use std::sync::Arc;

use rustix::io::Errno;

use super::checkpoint::Published;
use super::reading::keep_from_readers;
use super::{Key, Root, layout, records};
use crate::disk::Disk;
use crate::error::CommitError;
use crate::manifest::Kind;

/// A checkpoint that has lost its name.
struct Hidden {
    name: OsString,
    /// The registry still lists it.
    is_registered: bool,
}

impl<D: Disk + Clone + 'static> Root<D> {
    /// Removes a checkpoint: from the registry, then its name, then, when that is durable, its bytes; from the registry
    /// last where its bytes have to make room for that.
    ///
    /// # Errors
    /// [`CommitError::CheckpointInUse`] for the newest of its kind, for one that is being read and for one that is
    /// protected; [`CommitError::NoSuchCheckpoint`]; [`CommitError::Io`]. A checkpoint that has lost its name is not counted any
    /// more; what of it cannot be removed, the next start removes.
    pub fn remove(&self, kind: Kind, step: u64) -> Result<(), CommitError> {
        let key = (kind, step);
        let path = self.checkpoint_path(key);
        let changes = self.changes()?;
        self.check_owned()?;
        self.forget_vanished()?;
        if self.find_newest(kind)? == Some(step) {
            return Err(CommitError::CheckpointInUse { path, reason: "it is the newest of its kind" });
        }
        if !self.find(key)? {
            // Somebody else may have removed it since the registry was written.
            records::repair_registry(&self.root, &self.published()?)?;
            return Err(CommitError::NoSuchCheckpoint { path });
        }
        let kept = keep_from_readers(&self.root, &layout::checkpoint(kind, step)).map_err(|error| match error {
            error if error.is(Errno::NOENT) => CommitError::NoSuchCheckpoint { path },
            error => error,
        })?;
        records::point_away(&self.root, &self.published()?, key)?;
        let published = self.take_off(key)?;
        let hidden = match self.hide(key) {
            Ok(hidden) => hidden,
            Err(error) => {
                // It still has its name.
                self.state()?.published.extend(published.map(|published| (key, published)));
                return Err(error);
            }
        };
        self.root.sync()?;
        // Emptying it takes time, and concerns nobody else.
        drop(changes);
        self.root.remove(&hidden.name)?;
        drop(kept);
        if hidden.is_registered {
            let _changes = self.changes()?;
            self.check_owned()?;
            self.forget_vanished()?;
            records::write_registry(&self.root, &self.published()?)?;
        }
        Ok(())
    }

    /// Keeps the checkpoints of a step from being removed, of both kinds and whenever they are published, as long as the
    /// root is open. Waits for nothing: what is on its way out, and so not listed any more, goes.
    ///
    /// # Errors
    /// [`CommitError::RootLost`] in a child made by `fork`.
    pub fn protect(&self, step: u64) -> Result<(), CommitError> {
        self.state()?.protected.insert(step);
        Ok(())
    }

    /// Takes a checkpoint off what is known to be published, unless it is protected: who protects it from now on sees
    /// that it has gone.
    fn take_off(&self, key: Key) -> Result<Option<Arc<Published>>, CommitError> {
        let mut state = self.state()?;
        if state.protected.contains(&key.1) {
            return Err(CommitError::CheckpointInUse { path: self.checkpoint_path(key), reason: "it is protected" });
        }
        Ok(state.published.remove(&key))
    }

    /// Takes a checkpoint off the registry, where there is room for that, and its name away.
    fn hide(&self, (kind, step): Key) -> Result<Hidden, CommitError> {
        let name = self.root.free_name(|number| layout::removed(kind, step, number))?;
        let is_registered = match records::write_registry(&self.root, &self.published()?) {
            Err(error) if error.is_out_of_space() => true,
            outcome => outcome.map(|()| false)?,
        };
        self.root.rename_new(&layout::checkpoint(kind, step), &name)?;
        Ok(Hidden { name, is_registered })
    }
}

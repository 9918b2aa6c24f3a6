//! Removing a checkpoint that is not needed any more.
//!
//! What always holds: the pointer leads elsewhere before it loses its name, and it is emptied only when that is
//! durable. It has left the registry before that too, except where the disk has no room for a new registry: then its
//! bytes make that room, and what the registry says of it until then leads to nothing. Every start writes such a
//! registry again.

use std::ffi::OsString;

use rustix::io::Errno;

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
    /// [`CommitError::CheckpointInUse`] for the newest of its kind and for one that is being read;
    /// [`CommitError::NoSuchCheckpoint`]; [`CommitError::Io`]. A checkpoint that has lost its name is not counted any
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
        let published = self.state()?.published.remove(&key);
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

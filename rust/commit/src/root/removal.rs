//! Removing a checkpoint that is not needed any more.

use super::reading::keep_from_readers;
use super::{Root, layout, records};
use crate::disk::Disk;
use crate::error::CommitError;
use crate::manifest::Kind;

impl<D: Disk + Clone + 'static> Root<D> {
    /// Removes a checkpoint: from the registry, then its name, then, when that is durable, its bytes.
    ///
    /// # Errors
    /// [`CommitError::CheckpointInUse`] for the newest of its kind and for one that is being read;
    /// [`CommitError::NoSuchCheckpoint`]; [`CommitError::Io`]. A checkpoint that has lost its name is not counted any more;
    /// what of it cannot be removed, the next start removes.
    pub fn remove(&self, kind: Kind, step: u64) -> Result<(), CommitError> {
        let key = (kind, step);
        let path = self.checkpoint_path(key);
        let mut state = self.owned()?;
        if state.newest(kind) == Some(step) {
            return Err(CommitError::CheckpointInUse { path, reason: "it is the newest of its kind" });
        }
        if !state.published.contains_key(&key) {
            return Err(CommitError::NoSuchCheckpoint { path });
        }
        let name = layout::checkpoint(kind, step);
        let kept = keep_from_readers(&self.root, &name)?;
        let aside = self.root.free_name(|number| layout::removed(kind, step, number))?;
        let published = state.published.remove(&key);
        let hidden =
            records::write_registry(&self.root, &state.published).and_then(|()| self.root.rename_new(&name, &aside));
        if let Err(error) = hidden {
            // It still has its name.
            state.published.extend(published.map(|published| (key, published)));
            return Err(error);
        }
        self.root.sync()?;
        // Emptying it takes time, and concerns nobody else.
        drop(state);
        self.root.remove(&aside)?;
        drop(kept);
        Ok(())
    }
}

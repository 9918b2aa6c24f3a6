//! Removes checkpoints that are no longer needed, and sets newer ones aside after a rollback.
//!
//! Invariants:
//!
//! 1. The link leads elsewhere before a checkpoint loses its name, and its folder is emptied only when that is durable.
//! 2. `discard_after` makes an empty marker file, `.discard-after-<step>`, durable before the first checkpoint is
//!    renamed, and removes it after the last. Without the marker nothing has changed. With it, the next start completes
//!    the operation. So after a crash all of the checkpoints are set aside, or none. An owner that failed on the way
//!    changes nothing more, because the next start would set aside what it saved since. All other calls wait until it
//!    is over.

use std::cmp::Reverse;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::io::Errno;

use super::checkpoint_root::Root;
use super::latest_links;
use super::names::{self, RootEntry};
use super::read_lock::exclude_readers;
use super::whole_checkpoint::{CheckpointKey, Checkpoints, PublishedCheckpoint};
use crate::disk::{Disk, EntryKind, absent_is_fine};
use crate::error::CommitError;
use crate::manifest::CheckpointKind;
use crate::open_folder::{OpenFolder, Replacing};

impl<D: Disk> Root<D> {
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
        let no_readers = exclude_readers(&self.root, &names::checkpoint(kind, step)).map_err(|error| match error {
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
        let name = self.root.free_name(|number| names::removed(kind, step, number))?;
        self.root.rename(&names::checkpoint(kind, step), &name, Replacing::Nothing)?;
        Ok(name)
    }

    /// Renames every checkpoint above `step`, of both kinds, whole or not, to a name that begins with `discarded-`. It
    /// no longer counts and is never removed. Returns the new paths.
    ///
    /// # Errors
    /// [`CommitError::CheckpointInUse`] while one of them is being read or written; [`CommitError::NameTaken`]. Then
    /// nothing was changed.
    pub fn discard_after(&self, step: u64) -> Result<Vec<PathBuf>, CommitError> {
        let _publish_lock = self.publish_lock()?;
        let _begin_lock = self.begin_lock()?;
        self.check_owned()?;
        self.forget_missing()?;
        let mut state = self.state()?;
        let path = |key: &CheckpointKey| self.checkpoint_path(*key);
        if let Some((key, _)) = state.in_progress.iter().find(|((_, writing), _)| *writing > step) {
            return Err(CommitError::CheckpointInUse { path: path(key), reason: "it is being written" });
        }
        let newer = above(&self.root, step)?;
        if newer.is_empty() {
            return Ok(Vec::new());
        }
        let marker = names::discard_marker(step);
        if self.root.look_at(&marker)?.is_some() {
            let path = self.root.path.join(marker);
            return Err(CommitError::NameTaken { path, needed_for: "setting checkpoints aside" });
        }
        let mut no_readers = Vec::new();
        for &(kind, step) in &newer {
            no_readers.push(exclude_readers(&self.root, &names::checkpoint(kind, step))?);
        }
        state.is_discarding = true;
        self.root.disk.create_file(&self.root.folder, &marker, &self.root.path.join(&marker))?;
        // Its name is durable before the first checkpoint loses its own.
        self.root.sync()?;
        state.published.retain(|(_, newer), _| *newer <= step);
        for kind in CheckpointKind::ALL {
            latest_links::update_latest_link(&self.root, &state.published, kind)?;
        }
        let set_aside = set_aside(&self.root, step)?;
        state.uncertain.retain(|(_, uncertain)| *uncertain <= step);
        state.is_discarding = false;
        Ok(set_aside)
    }
}

/// Whether `name` is a marker: a plain file.
pub(crate) fn is_discard_marker<D: Disk>(root: &OpenFolder<D>, name: &OsStr) -> Result<bool, CommitError> {
    Ok(root.look_at(name)?.is_some_and(|stat| stat.kind == EntryKind::File))
}

/// The checkpoints above a step, the newest first, so that the remaining ones never have a gap.
fn above<D: Disk>(root: &OpenFolder<D>, step: u64) -> Result<Vec<CheckpointKey>, CommitError> {
    let mut newer = Vec::new();
    for name in root.list()? {
        match names::classify(&name) {
            RootEntry::Checkpoint(kind, found) if found > step && root.has_folder(&name)? => newer.push((kind, found)),
            _ => {}
        }
    }
    newer.sort_unstable_by_key(|&(kind, step)| (Reverse(step), kind));
    Ok(newer)
}

/// Completes at a start what a marker says, from wherever it stopped.
pub(crate) fn complete_discard<D: Disk>(
    root: &OpenFolder<D>,
    published: &mut Checkpoints,
    step: u64,
) -> Result<Vec<PathBuf>, CommitError> {
    published.retain(|(_, newer), _| *newer <= step);
    for kind in CheckpointKind::ALL {
        latest_links::update_latest_link(root, published, kind)?;
    }
    set_aside(root, step)
}

/// Renames the checkpoints above a step, to which no link leads any more, and removes the marker.
fn set_aside<D: Disk>(root: &OpenFolder<D>, step: u64) -> Result<Vec<PathBuf>, CommitError> {
    let mut set_aside = Vec::new();
    for (kind, step) in above(root, step)? {
        let to = root.free_name(|number| names::set_aside(kind, step, number))?;
        root.rename(&names::checkpoint(kind, step), &to, Replacing::Nothing)?;
        set_aside.push(root.path.join(to));
    }
    root.sync()?;
    absent_is_fine(root.remove_file(&names::discard_marker(step)))?;
    root.sync()?;
    Ok(set_aside)
}

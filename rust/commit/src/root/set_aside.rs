//! `discard_after`: sets checkpoints aside after a rollback.
//!
//! An empty marker file, `.discard-after-<step>`, is made durable before the first checkpoint is renamed, and removed
//! after the last.
//!
//! Invariants: without the marker nothing has changed. With it, the next start completes the operation. So after a
//! crash all of the checkpoints are set aside, or none. An owner that failed on the way changes nothing more, because
//! the next start would set aside what it saved since.
//!
//! All other calls wait until it is over.

use std::cmp::Reverse;
use std::ffi::OsStr;
use std::path::PathBuf;

use super::checkpoint_root::Root;
use super::contents::root_names::RootEntry;
use super::contents::{CheckpointKey, Checkpoints, OpenFolder, latest_links, root_names};
use super::reading::exclude_readers;
use crate::disk::{Disk, EntryKind, absent_is_fine};
use crate::error::CommitError;
use crate::manifest::CheckpointKind;

impl<D: Disk + Clone + 'static> Root<D> {
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
        let marker = root_names::discard_marker(step);
        if self.root.look_at(&marker)?.is_some() {
            let path = self.root.path.join(marker);
            return Err(CommitError::NameTaken { path, needed_for: "setting checkpoints aside" });
        }
        let mut no_readers = Vec::new();
        for &(kind, step) in &newer {
            no_readers.push(exclude_readers(&self.root, &root_names::checkpoint(kind, step))?);
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
pub(crate) fn is_discard_marker<D: Disk + Clone>(root: &OpenFolder<D>, name: &OsStr) -> Result<bool, CommitError> {
    Ok(root.look_at(name)?.is_some_and(|stat| stat.kind == EntryKind::File))
}

/// The checkpoints above a step, the newest first, so that the remaining ones never have a gap.
fn above<D: Disk + Clone>(root: &OpenFolder<D>, step: u64) -> Result<Vec<CheckpointKey>, CommitError> {
    let mut newer = Vec::new();
    for name in root.list()? {
        match root_names::classify(&name) {
            RootEntry::Checkpoint(kind, found) if found > step && is_folder(root, &name)? => newer.push((kind, found)),
            _ => {}
        }
    }
    newer.sort_unstable_by_key(|&(kind, step)| (Reverse(step), kind));
    Ok(newer)
}

fn is_folder<D: Disk + Clone>(root: &OpenFolder<D>, name: &OsStr) -> Result<bool, CommitError> {
    Ok(root.look_at(name)?.is_some_and(|stat| stat.kind == EntryKind::Folder))
}

/// Completes at a start what a marker says, from wherever it stopped.
pub(crate) fn complete<D: Disk + Clone>(
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
fn set_aside<D: Disk + Clone>(root: &OpenFolder<D>, step: u64) -> Result<Vec<PathBuf>, CommitError> {
    let mut set_aside = Vec::new();
    for (kind, step) in above(root, step)? {
        let to = root.free_name(|number| root_names::set_aside(kind, step, number))?;
        root.rename_new(&root_names::checkpoint(kind, step), &to)?;
        set_aside.push(root.path.join(to));
    }
    root.sync()?;
    absent_is_fine(root.remove_file(&root_names::discard_marker(step)))?;
    root.sync()?;
    Ok(set_aside)
}

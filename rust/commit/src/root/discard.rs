//! Setting checkpoints aside after a rollback.
//!
//! An empty file, `.discard-after-<step>`, is made durable before the first checkpoint is renamed and removed after the
//! last. What always holds: before it is there nothing has changed, and once it is there the next start completes what
//! was begun; so after a crash either none or all are set aside. What has the name of such a file and is none says
//! nothing. An owner that failed on the way changes nothing more: the next start would set aside what it saved since.
//! That start goes on without what a full disk has no room for, since a root has to be opened before it can be pruned:
//! a pointer that cannot be changed is removed, a registry that cannot be written names what is gone.
//!
//! Everybody waits until it is over: a run that goes back saves nothing meanwhile, and what is half set aside is to be
//! seen by nobody.

use std::cmp::Reverse;
use std::ffi::OsStr;
use std::path::PathBuf;

use super::directory::Directory;
use super::layout::Entry;
use super::reading::keep_from_readers;
use super::{Checkpoints, Key, Root, layout, records};
use crate::disk::{Disk, EntryKind, absent_is_fine};
use crate::error::CommitError;
use crate::manifest::Kind;

impl<D: Disk + Clone + 'static> Root<D> {
    /// Sets everything above `step` aside, of both kinds, whole or not, under names that begin with `discarded-`. It is
    /// not counted, removed or looked at any more; what has become of it is returned.
    ///
    /// # Errors
    /// [`CommitError::CheckpointInUse`], while one of them is being read or written, and [`CommitError::NameTaken`]:
    /// nothing was changed.
    pub fn discard_after(&self, step: u64) -> Result<Vec<PathBuf>, CommitError> {
        let _changes = self.changes()?;
        let _beginnings = self.beginnings()?;
        self.check_owned()?;
        self.forget_vanished()?;
        let mut state = self.state()?;
        let path = |key: &Key| self.checkpoint_path(*key);
        if let Some((key, _)) = state.attempts.iter().find(|((_, writing), _)| *writing > step) {
            return Err(CommitError::CheckpointInUse { path: path(key), reason: "it is being written" });
        }
        let newer = above(&self.root, step)?;
        if newer.is_empty() {
            return Ok(Vec::new());
        }
        let intent = layout::intent(step);
        if self.root.look_at(&intent)?.is_some() {
            let path = self.root.path.join(intent);
            return Err(CommitError::NameTaken { path, needed_for: "setting checkpoints aside" });
        }
        let mut kept = Vec::new();
        for &(kind, step) in &newer {
            kept.push(keep_from_readers(&self.root, &layout::checkpoint(kind, step))?);
        }
        state.is_discarding = true;
        // Its name is durable before the first checkpoint loses its own: the registry is made durable in between.
        self.root.disk.create_file(&self.root.folder, &intent, &self.root.path.join(&intent))?;
        state.published.retain(|(_, newer), _| *newer <= step);
        for kind in Kind::ALL {
            records::point(&self.root, &state.published, kind)?;
        }
        records::write_registry(&self.root, &state.published)?;
        let set_aside = set_aside(&self.root, step)?;
        state.doubtful.retain(|(_, doubtful)| *doubtful <= step);
        state.is_discarding = false;
        Ok(set_aside)
    }
}

/// Whether `name`, which an intent would have, is one.
pub(super) fn is_intent<D: Disk + Clone>(root: &Directory<D>, name: &OsStr) -> Result<bool, CommitError> {
    Ok(root.look_at(name)?.is_some_and(|status| status.kind == EntryKind::File))
}

/// What is above a step, the newest first, so that what is left at any time is without gaps.
fn above<D: Disk + Clone>(root: &Directory<D>, step: u64) -> Result<Vec<Key>, CommitError> {
    let mut newer = Vec::new();
    for name in root.list()? {
        match layout::classify(&name) {
            Entry::Checkpoint(kind, found) if found > step && is_folder(root, &name)? => newer.push((kind, found)),
            _ => {}
        }
    }
    newer.sort_unstable_by_key(|&(kind, step)| (Reverse(step), kind));
    Ok(newer)
}

fn is_folder<D: Disk + Clone>(root: &Directory<D>, name: &OsStr) -> Result<bool, CommitError> {
    Ok(root.look_at(name)?.is_some_and(|status| status.kind == EntryKind::Folder))
}

/// Does at a start what an intent says, from wherever it was left.
pub(super) fn complete<D: Disk + Clone>(
    root: &Directory<D>,
    published: &mut Checkpoints,
    step: u64,
) -> Result<Vec<PathBuf>, CommitError> {
    published.retain(|(_, newer), _| *newer <= step);
    for kind in Kind::ALL {
        records::point_or_not(root, published, kind)?;
    }
    match records::write_registry(root, published) {
        Err(error) if error.is_out_of_space() => {}
        outcome => outcome?,
    }
    set_aside(root, step)
}

/// Renames what is above a step, which no pointer leads to any more, and removes the intent.
fn set_aside<D: Disk + Clone>(root: &Directory<D>, step: u64) -> Result<Vec<PathBuf>, CommitError> {
    let mut set_aside = Vec::new();
    for (kind, step) in above(root, step)? {
        let to = root.free_name(|number| layout::set_aside(kind, step, number))?;
        root.rename_new(&layout::checkpoint(kind, step), &to)?;
        set_aside.push(root.path.join(to));
    }
    root.sync()?;
    absent_is_fine(root.remove_file(&layout::intent(step)))?;
    root.sync()?;
    Ok(set_aside)
}

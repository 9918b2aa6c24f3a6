//! Whether what is known to be published is still there: people remove, rename and replace checkpoints.
//!
//! What always holds: that a checkpoint has gone is found by the next call that it makes a difference to; it is
//! forgotten only when a look at its own name finds nothing, or another folder with another manifest; it is taken to be
//! there without a look only where the root, which is listed in one pass, tells for certain which folder has its name.
//! What is to be removed or not to be removed is looked at itself.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::sync::Arc;

use rustix::io::Errno;

use super::checkpoint::Published;
use super::directory::Directory;
use super::layout::{self, Entry};
use super::{Checkpoints, Key, Root};
use crate::disk::{Disk, EntryKind};
use crate::error::CommitError;
use crate::manifest::{self, Kind};

impl<D: Disk + Clone + 'static> Root<D> {
    /// Forgets every checkpoint that has gone.
    ///
    /// # Errors
    /// [`CommitError::Io`] when the root cannot be looked at.
    pub(super) fn forget_vanished(&self) -> Result<(), CommitError> {
        let known = self.published()?;
        for (key, published) in vanished(&self.root, &known)? {
            self.forget(key, published)?;
        }
        Ok(())
    }

    /// The newest of a kind that is there; those above it that have gone are forgotten.
    ///
    /// # Errors
    /// As [`forget_vanished`](Root::forget_vanished).
    pub(super) fn find_newest(&self, kind: Kind) -> Result<Option<u64>, CommitError> {
        loop {
            let newest = self.state()?.newest(kind);
            match newest {
                Some(step) if !self.find((kind, step))? => {}
                newest => return Ok(newest),
            }
        }
    }

    /// Whether a checkpoint is published and there; one that has gone is forgotten.
    ///
    /// # Errors
    /// As [`forget_vanished`](Root::forget_vanished).
    pub(super) fn find(&self, key: Key) -> Result<bool, CommitError> {
        let Some(published) = self.state()?.published.get(&key).cloned() else {
            return Ok(false);
        };
        let is_there = is_there(&self.root, key, &published)?;
        if !is_there {
            self.forget(key, &published)?;
        }
        Ok(is_there)
    }

    /// Forgets that very checkpoint: another may have been published in its place since it was looked at.
    fn forget(&self, key: Key, published: &Arc<Published>) -> Result<(), CommitError> {
        let mut state = self.state()?;
        if state.published.get(&key).is_some_and(|known| Arc::ptr_eq(known, published)) {
            state.published.remove(&key);
        }
        Ok(())
    }
}

/// What of the known checkpoints has gone.
fn vanished<'a, D: Disk + Clone>(
    root: &Directory<D>,
    known: &'a Checkpoints,
) -> Result<Vec<(Key, &'a Arc<Published>)>, CommitError> {
    if known.is_empty() {
        return Ok(Vec::new());
    }
    let device = root.status()?.device;
    let mut told: BTreeMap<Key, u64> = BTreeMap::new();
    for listed in root.list_with_numbers()? {
        if let (Entry::Checkpoint(kind, step), Some(number)) = (layout::classify(&listed.name), listed.number) {
            told.insert((kind, step), number);
        }
    }
    let mut vanished = Vec::new();
    for (&key, published) in known {
        let is_told = published.status.device == device && told.get(&key) == Some(&published.status.number);
        if !is_told && !is_there(root, key, published)? {
            vanished.push((key, published));
        }
    }
    Ok(vanished)
}

fn is_there<D: Disk + Clone>(
    root: &Directory<D>,
    (kind, step): Key,
    published: &Published,
) -> Result<bool, CommitError> {
    let name = layout::checkpoint(kind, step);
    match root.look_at(&name)? {
        // A file may have got the number of the folder that was removed for it.
        Some(found) if found.kind == EntryKind::Folder => {
            Ok(found.is_same(&published.status) || has_manifest(root, &name, published)?)
        }
        _ => Ok(false),
    }
}

/// Whether the folder of that name has the very manifest of a checkpoint. Overlayfs, where its layers lie on several file
/// systems, gives a folder another number once memory was short, and no file.
fn has_manifest<D: Disk + Clone>(
    root: &Directory<D>,
    name: &OsStr,
    published: &Published,
) -> Result<bool, CommitError> {
    let folder = match root.open_folder(name) {
        // It has gone meanwhile, or nobody of ours made it.
        Err(error) if [Errno::NOENT, Errno::NOTDIR, Errno::LOOP, Errno::ACCESS].iter().any(|&code| error.is(code)) => {
            return Ok(false);
        }
        outcome => outcome?,
    };
    let found = folder.look_at(OsStr::new(manifest::FILE_NAME))?;
    Ok(found.is_some_and(|found| found.kind == EntryKind::File && found.is_same(&published.manifest)))
}

//! The links `hf-latest` and `dcp-latest`, derived from the published checkpoints.
//!
//! Invariants: they lead only to checkpoints that are durable under their names, and each is replaced in one step. This
//! library never relies on them; they are for people, tools and scripts.

use std::ffi::{OsStr, OsString};

use super::names;
use super::whole_checkpoint::{CheckpointKey, Checkpoints, newest};
use crate::disk::{Disk, EntryKind, absent_is_fine};
use crate::error::CommitError;
use crate::manifest::CheckpointKind;
use crate::open_folder::OpenFolder;

/// Refuses a root in which something else has the name of a link.
pub(crate) fn check_names<D: Disk>(root: &OpenFolder<D>) -> Result<(), CommitError> {
    CheckpointKind::ALL.into_iter().try_for_each(|kind| check_latest_link(root, &names::latest_link(kind)))
}

fn check_latest_link<D: Disk>(root: &OpenFolder<D>, name: &OsStr) -> Result<(), CommitError> {
    match root.look_at(name)? {
        Some(stat) if stat.kind != EntryKind::Link => {
            Err(CommitError::NameTaken { path: root.path.join(name), needed_for: "the link to the newest checkpoint" })
        }
        _ => Ok(()),
    }
}

/// Makes the link of a kind lead to the newest checkpoint, or removes it without any. Returns whether it changed.
///
/// A disk without room for a second link loses the old one first, and is left without a link where it has no room for
/// any: checkpoints must be published and removed all the same. The next start makes the link.
pub(crate) fn update_latest_link<D: Disk>(
    root: &OpenFolder<D>,
    published: &Checkpoints,
    kind: CheckpointKind,
) -> Result<bool, CommitError> {
    let name = names::latest_link(kind);
    check_latest_link(root, &name)?;
    let target = newest(published, kind).map(|step| names::checkpoint(kind, step));
    if target == current_target(root, &name)? {
        return Ok(false);
    }
    let Some(target) = target else {
        return remove_latest_link(root, &name).map(|()| true);
    };
    match root.replace_link(&name, &target, &names::temporary(&name)) {
        Err(error) if error.is_out_of_space() => {}
        outcome => return outcome.map(|()| true),
    }
    remove_latest_link(root, &name)?;
    match root.replace_link(&name, &target, &names::temporary(&name)) {
        Err(error) if error.is_out_of_space() => Ok(true),
        outcome => outcome.map(|()| true),
    }
}

fn remove_latest_link<D: Disk>(root: &OpenFolder<D>, name: &OsStr) -> Result<(), CommitError> {
    absent_is_fine(root.remove_file(name))?;
    root.sync()
}

/// Updates the link if it leads to a checkpoint that is about to be removed.
pub(crate) fn move_latest_link_away<D: Disk>(
    root: &OpenFolder<D>,
    published: &Checkpoints,
    (kind, step): CheckpointKey,
) -> Result<(), CommitError> {
    if current_target(root, &names::latest_link(kind)).is_ok_and(|target| target == Some(names::checkpoint(kind, step)))
    {
        update_latest_link(root, published, kind)?;
    }
    Ok(())
}

fn current_target<D: Disk>(root: &OpenFolder<D>, name: &OsStr) -> Result<Option<OsString>, CommitError> {
    match root.look_at(name)? {
        None => Ok(None),
        Some(_) => root.disk.read_link(&root.folder, name, &root.path.join(name)).map(Some),
    }
}

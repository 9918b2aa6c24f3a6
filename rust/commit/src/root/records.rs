//! The registry and the pointers, made from what is published.
//!
//! What always holds: they name only checkpoints that are durable under their names at that time, and each is replaced
//! in one step. Nothing in this library believes them; they are for people, tools and scripts.

use std::ffi::{OsStr, OsString};

use serde::Serialize;

use super::checkpoint::Checkpoint;
use super::directory::Directory;
use super::{Checkpoints, Key, layout, newest};
use crate::disk::{Disk, EntryKind};
use crate::error::CommitError;
use crate::manifest::Kind;

const FORMAT_VERSION: u32 = 1;

#[derive(Serialize)]
struct Registry<'a> {
    format_version: u32,
    checkpoints: Vec<Registered<'a>>,
}

#[derive(Serialize)]
struct Registered<'a> {
    folder: String,
    #[serde(flatten)]
    checkpoint: &'a Checkpoint,
}

/// Whether something of another sort than this library's has one of the names.
///
/// # Errors
/// [`CommitError::NameTaken`].
pub(super) fn check_names<D: Disk + Clone>(root: &Directory<D>) -> Result<(), CommitError> {
    refuse_folder(root, OsStr::new(layout::REGISTRY), "the registry of checkpoints")?;
    Kind::ALL.into_iter().try_for_each(|kind| check_pointer(root, &layout::pointer(kind)))
}

fn refuse_folder<D: Disk + Clone>(
    root: &Directory<D>,
    name: &OsStr,
    needed_for: &'static str,
) -> Result<(), CommitError> {
    match root.look_at(name)? {
        Some(status) if !matches!(status.kind, EntryKind::File | EntryKind::Link) => {
            Err(CommitError::NameTaken { path: root.path.join(name), needed_for })
        }
        _ => Ok(()),
    }
}

fn check_pointer<D: Disk + Clone>(root: &Directory<D>, name: &OsStr) -> Result<(), CommitError> {
    match root.look_at(name)? {
        Some(status) if status.kind != EntryKind::Link => {
            Err(CommitError::NameTaken { path: root.path.join(name), needed_for: "the link to the newest checkpoint" })
        }
        _ => Ok(()),
    }
}

/// Writes the registry of what is published.
pub(super) fn write_registry<D: Disk + Clone>(root: &Directory<D>, published: &Checkpoints) -> Result<(), CommitError> {
    root.replace_file(OsStr::new(layout::REGISTRY), &registry(published))
}

/// Writes the registry where it is not what it has to be; whether it was not.
pub(super) fn repair_registry<D: Disk + Clone>(
    root: &Directory<D>,
    published: &Checkpoints,
) -> Result<bool, CommitError> {
    let name = OsStr::new(layout::REGISTRY);
    let bytes = registry(published);
    // It is as long as it has to be before it is read: what lies there may be anything.
    let is_right = match root.look_at(name)? {
        None => published.is_empty(),
        Some(status) if status.kind == EntryKind::File && status.size == bytes.len() as u64 => {
            root.disk.read(&root.open_file(name)?, &root.path.join(name)).is_ok_and(|found| found == bytes)
        }
        Some(_) => false,
    };
    if !is_right {
        root.replace_file(name, &bytes)?;
    }
    Ok(!is_right)
}

fn registry(published: &Checkpoints) -> Vec<u8> {
    let checkpoints = published.iter().map(|(&(kind, step), published)| Registered {
        folder: layout::checkpoint(kind, step).to_string_lossy().into_owned(),
        checkpoint: &published.checkpoint,
    });
    let registry = Registry { format_version: FORMAT_VERSION, checkpoints: checkpoints.collect() };
    // Strings, integers and JSON that was read as such: nothing of it can fail to be JSON.
    let mut bytes = serde_json::to_vec_pretty(&registry).unwrap_or_default();
    bytes.push(b'\n');
    bytes
}

/// Makes the pointer of a kind lead to the newest that is published, where it does not; whether it did not. Without any
/// there is no pointer.
pub(super) fn point<D: Disk + Clone>(
    root: &Directory<D>,
    published: &Checkpoints,
    kind: Kind,
) -> Result<bool, CommitError> {
    let name = layout::pointer(kind);
    check_pointer(root, &name)?;
    let target = newest(published, kind).map(|step| layout::checkpoint(kind, step));
    if target == current_target(root, &name)? {
        return Ok(false);
    }
    match target {
        Some(target) => root.replace_link(&name, &target)?,
        None => remove_pointer(root, &name)?,
    }
    Ok(true)
}

/// As [`point`], but where there is no room to change a pointer it is removed.
pub(super) fn point_or_not<D: Disk + Clone>(
    root: &Directory<D>,
    published: &Checkpoints,
    kind: Kind,
) -> Result<(), CommitError> {
    match point(root, published, kind) {
        Err(error) if error.is_out_of_space() => {
            let name = layout::pointer(kind);
            if root.look_at(&name)?.is_some() { remove_pointer(root, &name) } else { Ok(()) }
        }
        outcome => outcome.map(drop),
    }
}

fn remove_pointer<D: Disk + Clone>(root: &Directory<D>, name: &OsStr) -> Result<(), CommitError> {
    root.remove_file(name)?;
    root.sync()
}

/// Makes the pointer lead to the newest where it leads to a checkpoint that is to go, as when there was no room to
/// change it before. Where it leads elsewhere it may stay as it is: that a disk is full must not keep it full.
pub(super) fn point_away<D: Disk + Clone>(
    root: &Directory<D>,
    published: &Checkpoints,
    (kind, step): Key,
) -> Result<(), CommitError> {
    if current_target(root, &layout::pointer(kind)).is_ok_and(|target| target == Some(layout::checkpoint(kind, step))) {
        point(root, published, kind)?;
    }
    Ok(())
}

fn current_target<D: Disk + Clone>(root: &Directory<D>, name: &OsStr) -> Result<Option<OsString>, CommitError> {
    match root.look_at(name)? {
        None => Ok(None),
        Some(_) => root.disk.read_link(&root.folder, name, &root.path.join(name)).map(Some),
    }
}

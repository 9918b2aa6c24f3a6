//! The registry `checkpoints.json` and the links `hf-latest` and `dcp-latest`, derived from the published checkpoints.
//!
//! Invariants: they name only checkpoints that are durable under their names, and each is replaced in one step. This
//! library never relies on them; they are for people, tools and scripts.

use std::ffi::{OsStr, OsString};

use serde::Serialize;

use super::open_folder::OpenFolder;
use super::root_names;
use super::whole_checkpoint::{CheckpointInfo, CheckpointKey, Checkpoints, newest};
use crate::disk::{Disk, EntryKind};
use crate::error::CommitError;
use crate::manifest::CheckpointKind;

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
    checkpoint: &'a CheckpointInfo,
}

/// Refuses a root in which something else has one of these names.
pub(crate) fn check_names<D: Disk + Clone>(root: &OpenFolder<D>) -> Result<(), CommitError> {
    refuse_folder(root, OsStr::new(root_names::REGISTRY), "the registry of checkpoints")?;
    CheckpointKind::ALL.into_iter().try_for_each(|kind| check_latest_link(root, &root_names::latest_link(kind)))
}

fn refuse_folder<D: Disk + Clone>(
    root: &OpenFolder<D>,
    name: &OsStr,
    needed_for: &'static str,
) -> Result<(), CommitError> {
    match root.look_at(name)? {
        Some(stat) if !matches!(stat.kind, EntryKind::File | EntryKind::Link) => {
            Err(CommitError::NameTaken { path: root.path.join(name), needed_for })
        }
        _ => Ok(()),
    }
}

fn check_latest_link<D: Disk + Clone>(root: &OpenFolder<D>, name: &OsStr) -> Result<(), CommitError> {
    match root.look_at(name)? {
        Some(stat) if stat.kind != EntryKind::Link => {
            Err(CommitError::NameTaken { path: root.path.join(name), needed_for: "the link to the newest checkpoint" })
        }
        _ => Ok(()),
    }
}

/// Writes the registry.
pub(crate) fn write_registry<D: Disk + Clone>(
    root: &OpenFolder<D>,
    published: &Checkpoints,
) -> Result<(), CommitError> {
    root.replace_file(OsStr::new(root_names::REGISTRY), &registry(published))
}

/// Writes the registry if it differs from what is published; whether it did.
pub(crate) fn repair_registry<D: Disk + Clone>(
    root: &OpenFolder<D>,
    published: &Checkpoints,
) -> Result<bool, CommitError> {
    let name = OsStr::new(root_names::REGISTRY);
    let bytes = registry(published);
    // The size is compared first: the file may be anything.
    let is_right = match root.look_at(name)? {
        None => published.is_empty(),
        Some(stat) if stat.kind == EntryKind::File && stat.size == bytes.len() as u64 => {
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
        folder: root_names::checkpoint(kind, step).to_string_lossy().into_owned(),
        checkpoint: &published.checkpoint,
    });
    let registry = Registry { format_version: FORMAT_VERSION, checkpoints: checkpoints.collect() };
    // It consists of strings, integers and parsed JSON, so serializing it cannot fail.
    let mut bytes = serde_json::to_vec_pretty(&registry).unwrap_or_default();
    bytes.push(b'\n');
    bytes
}

/// Makes the link of a kind lead to the newest checkpoint, or removes it without any. Returns whether it changed.
pub(crate) fn update_latest_link<D: Disk + Clone>(
    root: &OpenFolder<D>,
    published: &Checkpoints,
    kind: CheckpointKind,
) -> Result<bool, CommitError> {
    let name = root_names::latest_link(kind);
    check_latest_link(root, &name)?;
    let target = newest(published, kind).map(|step| root_names::checkpoint(kind, step));
    if target == current_target(root, &name)? {
        return Ok(false);
    }
    match target {
        Some(target) => root.replace_link(&name, &target)?,
        None => remove_latest_link(root, &name)?,
    }
    Ok(true)
}

/// As [`update_latest_link`], but on a full disk the link is removed.
pub(crate) fn update_or_remove_latest_link<D: Disk + Clone>(
    root: &OpenFolder<D>,
    published: &Checkpoints,
    kind: CheckpointKind,
) -> Result<(), CommitError> {
    match update_latest_link(root, published, kind) {
        Err(error) if error.is_out_of_space() => {
            let name = root_names::latest_link(kind);
            if root.look_at(&name)?.is_some() { remove_latest_link(root, &name) } else { Ok(()) }
        }
        outcome => outcome.map(drop),
    }
}

fn remove_latest_link<D: Disk + Clone>(root: &OpenFolder<D>, name: &OsStr) -> Result<(), CommitError> {
    root.remove_file(name)?;
    root.sync()
}

/// Updates the link if it leads to a checkpoint that is about to be removed. Otherwise it stays as it is, because a
/// removal must work on a full disk.
pub(crate) fn move_latest_link_away<D: Disk + Clone>(
    root: &OpenFolder<D>,
    published: &Checkpoints,
    (kind, step): CheckpointKey,
) -> Result<(), CommitError> {
    if current_target(root, &root_names::latest_link(kind))
        .is_ok_and(|target| target == Some(root_names::checkpoint(kind, step)))
    {
        update_latest_link(root, published, kind)?;
    }
    Ok(())
}

fn current_target<D: Disk + Clone>(root: &OpenFolder<D>, name: &OsStr) -> Result<Option<OsString>, CommitError> {
    match root.look_at(name)? {
        None => Ok(None),
        Some(_) => root.disk.read_link(&root.folder, name, &root.path.join(name)).map(Some),
    }
}

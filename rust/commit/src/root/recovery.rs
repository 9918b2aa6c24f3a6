//! Recovery at every start: completes or undoes what the last owner left unfinished.
//!
//! Invariants: nothing is removed before the visible names are durable. Only leftovers (`names.rs`) are removed,
//! and none that a process still writes into. Opening a clean root changes nothing.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use serde::Serialize;

use super::names::{self, RootEntry};
use super::whole_checkpoint::{Checkpoints, ExamineFailure, examine};
use super::{latest_links, removal};
use crate::disk::Disk;
use crate::error::CommitError;
use crate::manifest::CheckpointKind;
use crate::open_folder::OpenFolder;

/// The results of opening a root. Paths are absolute.
#[derive(Debug, Default, Clone, Serialize)]
pub struct RecoveryReport {
    /// Leftovers of dead attempts, removed.
    pub removed: Vec<String>,
    /// Leftovers that a process still writes into, left alone.
    pub live: Vec<String>,
    /// Checkpoints that an unfinished `discard_after` was to set aside, under their new names.
    pub set_aside: Vec<String>,
    /// The links that did not match the folders, written again.
    pub repaired: Vec<String>,
    /// Entries that are named like a checkpoint and are none, and why. They stay as they are.
    pub ignored: BTreeMap<String, String>,
    /// Errors of removals.
    pub failed: Vec<String>,
}

struct ScannedRoot {
    published: Checkpoints,
    leftovers: Vec<OsString>,
    discard_markers: Vec<u64>,
}

/// Recovers a root that this process owns.
pub(crate) fn recover<D: Disk>(root: &OpenFolder<D>) -> Result<(Checkpoints, RecoveryReport), CommitError> {
    latest_links::check_names(root)?;
    // The last owner may have died between a rename and this fsync.
    root.sync()?;
    let mut recovery = RecoveryReport::default();
    let ScannedRoot { mut published, leftovers, mut discard_markers } = scan(root, &mut recovery)?;
    // Before anything is written: they may fill the disk.
    for name in leftovers {
        remove_leftover(root, &name, &mut recovery);
    }
    // The lowest step covers all others.
    discard_markers.sort_unstable();
    for step in discard_markers {
        let moved = removal::complete_discard(root, &mut published, step)?;
        recovery.ignored.retain(|path, _| root.look_at(file_name(path)).is_ok_and(|found| found.is_some()));
        recovery.set_aside.extend(moved.iter().map(|path| path.display().to_string()));
    }
    repair(root, &published, &mut recovery)?;
    Ok((published, recovery))
}

fn file_name(path: &str) -> &OsStr {
    OsStr::new(path.rsplit('/').next().unwrap_or(path))
}

fn scan<D: Disk>(root: &OpenFolder<D>, recovery: &mut RecoveryReport) -> Result<ScannedRoot, CommitError> {
    let mut found = ScannedRoot { published: Checkpoints::new(), leftovers: Vec::new(), discard_markers: Vec::new() };
    let mut names = root.list()?;
    names.sort_unstable();
    for name in names {
        match names::classify(&name) {
            RootEntry::Checkpoint(kind, step) => match examine(root, kind, step) {
                Ok(whole) => {
                    found.published.insert((kind, step), Arc::new(whole));
                }
                Err(ExamineFailure::NotWhole(reason)) => {
                    recovery.ignored.insert(display_path(root, &name), reason);
                }
                // A root is not rebuilt from folders that could not be read.
                Err(ExamineFailure::Unreadable(error)) => return Err(error),
            },
            RootEntry::Leftover => found.leftovers.push(name),
            RootEntry::DiscardMarker(step) if removal::is_discard_marker(root, &name)? => {
                found.discard_markers.push(step)
            }
            RootEntry::DiscardMarker(_) | RootEntry::Other => {}
        }
    }
    Ok(found)
}

/// Makes the links lead to the newest checkpoints.
fn repair<D: Disk>(
    root: &OpenFolder<D>,
    published: &Checkpoints,
    recovery: &mut RecoveryReport,
) -> Result<(), CommitError> {
    for kind in CheckpointKind::ALL {
        if latest_links::update_latest_link(root, published, kind)? {
            recovery.repaired.push(display_path(root, &names::latest_link(kind)));
        }
    }
    Ok(())
}

/// Removes a leftover. A failure must not keep the root from being opened.
fn remove_leftover<D: Disk>(root: &OpenFolder<D>, name: &OsStr, recovery: &mut RecoveryReport) {
    match root.has_live_writer(name) {
        Ok(true) => return recovery.live.push(display_path(root, name)),
        Ok(false) => {}
        Err(error) => return recovery.failed.push(error.to_string()),
    }
    match root.remove(name) {
        Ok(()) => recovery.removed.push(display_path(root, name)),
        Err(error) => recovery.failed.push(error.to_string()),
    }
}

fn display_path<D: Disk>(root: &OpenFolder<D>, name: &OsStr) -> String {
    root.path.join(name).display().to_string()
}

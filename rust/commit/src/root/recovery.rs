//! What every start does before anything else: makes a root out of what the last owner left.
//!
//! What always holds: nothing is removed before what is visible is durable; only what `layout.rs` calls a leftover is
//! removed, and of that nothing a process still writes into; what is in order is not written again, so that a root is
//! opened without a change where there is nothing to mend.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use serde::Serialize;

use super::checkpoint::{Unwhole, examine};
use super::directory::Directory;
use super::layout::Entry;
use super::{Checkpoints, discard, layout, records};
use crate::disk::{Disk, EntryKind, Lock, Sharing};
use crate::error::CommitError;
use crate::manifest::Kind;

/// What opening a root found and mended. Paths are absolute.
#[derive(Debug, Default, Clone, Serialize)]
pub struct Recovery {
    /// Leftovers of dead attempts, removed.
    pub removed: Vec<String>,
    /// Leftovers that a process still writes into, left alone.
    pub live: Vec<String>,
    /// Checkpoints that a `discard_after` which did not end was to set aside, and under which name they are.
    pub set_aside: Vec<String>,
    /// Registry and pointers that did not say what the folders say, written again.
    pub repaired: Vec<String>,
    /// What is called like a checkpoint and is none, and why; left as it is.
    pub ignored: BTreeMap<String, String>,
    /// What should have been removed, or on a full disk written again, and could not be.
    pub failed: Vec<String>,
}

struct Found {
    published: Checkpoints,
    leftovers: Vec<OsString>,
    intents: Vec<u64>,
}

/// Recovers a root that is owned.
pub(super) fn recover<D: Disk + Clone>(root: &Directory<D>) -> Result<(Checkpoints, Recovery), CommitError> {
    records::check_names(root)?;
    // The last owner may have died between a rename and this.
    root.sync()?;
    let mut recovery = Recovery::default();
    let Found { mut published, leftovers, mut intents } = look_around(root, &mut recovery)?;
    // Before anything is written: the disk may be full of them.
    for name in leftovers {
        remove_leftover(root, &name, &mut recovery);
    }
    // The lowest sets aside what all others would.
    intents.sort_unstable();
    for step in intents {
        let set_aside = discard::complete(root, &mut published, step)?;
        recovery.ignored.retain(|path, _| root.look_at(file_name(path)).is_ok_and(|found| found.is_some()));
        recovery.set_aside.extend(set_aside.iter().map(|path| path.display().to_string()));
    }
    repair(root, &published, &mut recovery)?;
    Ok((published, recovery))
}

fn file_name(path: &str) -> &OsStr {
    OsStr::new(path.rsplit('/').next().unwrap_or(path))
}

fn look_around<D: Disk + Clone>(root: &Directory<D>, recovery: &mut Recovery) -> Result<Found, CommitError> {
    let mut found = Found { published: Checkpoints::new(), leftovers: Vec::new(), intents: Vec::new() };
    let mut names = root.list()?;
    names.sort_unstable();
    for name in names {
        match layout::classify(&name) {
            Entry::Checkpoint(kind, step) => match examine(root, kind, step) {
                Ok(whole) => {
                    found.published.insert((kind, step), Arc::new(whole));
                }
                Err(Unwhole::For(reason)) => {
                    recovery.ignored.insert(shown(root, &name), reason);
                }
                // A root is not made anew of what nobody could look at.
                Err(Unwhole::Unseen(error)) => return Err(error),
            },
            Entry::Leftover => found.leftovers.push(name),
            Entry::Intent(step) if discard::is_intent(root, &name)? => found.intents.push(step),
            Entry::Intent(_) | Entry::Other => {}
        }
    }
    Ok(found)
}

fn repair<D: Disk + Clone>(
    root: &Directory<D>,
    published: &Checkpoints,
    recovery: &mut Recovery,
) -> Result<(), CommitError> {
    let registry = records::repair_registry(root, published);
    note_repair(root, OsStr::new(layout::REGISTRY), registry, recovery)?;
    for kind in Kind::ALL {
        let pointer = records::point(root, published, kind);
        note_repair(root, &layout::pointer(kind), pointer, recovery)?;
    }
    Ok(())
}

/// What there is no room for stays as it was: it names only what is there or was, and a root has to be opened before it
/// can be pruned.
fn note_repair<D: Disk + Clone>(
    root: &Directory<D>,
    name: &OsStr,
    repaired: Result<bool, CommitError>,
    recovery: &mut Recovery,
) -> Result<(), CommitError> {
    match repaired {
        Err(error) if error.is_out_of_space() => recovery.failed.push(error.to_string()),
        Ok(true) => recovery.repaired.push(shown(root, name)),
        outcome => return outcome.map(drop),
    }
    Ok(())
}

/// Removes a leftover; what cannot be removed must not keep a root from being opened.
fn remove_leftover<D: Disk + Clone>(root: &Directory<D>, name: &OsStr, recovery: &mut Recovery) {
    match is_written_into(root, name) {
        Ok(true) => return recovery.live.push(shown(root, name)),
        Ok(false) => {}
        Err(error) => return recovery.failed.push(error.to_string()),
    }
    match root.remove(name) {
        Ok(()) => recovery.removed.push(shown(root, name)),
        Err(error) => recovery.failed.push(error.to_string()),
    }
}

/// Whether a process holds the lock that writers take on the folder they write into.
pub(super) fn is_written_into<D: Disk + Clone>(root: &Directory<D>, name: &OsStr) -> Result<bool, CommitError> {
    if root.look_at(name)?.is_none_or(|status| status.kind != EntryKind::Folder) {
        return Ok(false);
    }
    let folder = root.open_folder(name)?;
    // The owner that made it is dead. Where a lock cannot tell of other writers, it would be kept for ever.
    Ok(root.disk.lock_folder(&folder.folder, Sharing::Exclusive, &folder.path)? == Lock::HeldByAnother)
}

fn shown<D: Disk + Clone>(root: &Directory<D>, name: &OsStr) -> String {
    root.path.join(name).display().to_string()
}

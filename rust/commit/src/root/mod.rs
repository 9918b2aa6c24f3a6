//! A root: the folder of a run's checkpoints, and what decides which of them exist.
//!
//! A checkpoint is begun, written into a hidden folder by whoever writes, and published; the names are in `layout.rs`.
//! What always holds:
//!
//! 1. The folders decide. A folder that is called `hf-100` and is whole is a published checkpoint; registry and
//!    pointers are made from the folders, and every start makes them again where they differ.
//! 2. In this order, each durable before the next: the files and folders of a checkpoint, its name, the registry, the
//!    pointer; then what it replaces goes. What goes leaves the pointer and the registry first (the registry last on a
//!    full disk), then loses its name, and is emptied only when that is durable. So a crash between any two steps
//!    leaves a root whose every visible checkpoint is whole, and the next start finishes or undoes what was under way.
//! 3. The newest checkpoint of a kind is never removed, nor one that is being read, nor one that was protected before it
//!    was taken off what is listed.
//! 4. Only the owner (`owner/`) changes a root, and only what `layout.rs` calls its own; nothing is reached through a
//!    symbolic link.
//! 5. A failed fsync fails what it was for, for good. A checkpoint whose name was perhaps not made durable is not
//!    counted until the next start has looked at it.
//! 6. Two changes of what is visible never interleave, and what is known of the root says that a checkpoint is
//!    published when it is durable and recorded; who only wants to know, or begins one, waits for no fsync (`locks.rs`).
//! 7. What people removed, renamed or replaced is noticed by the next call that it makes a difference to (`looking.rs`).
//!
//! Everything goes through a [`Disk`](crate::disk::Disk), so that the tests can take the power away between
//! any two steps: the method is that of "All File Systems Are Not Created Equal" (Pillai et al., OSDI 2014).

mod checkpoint;
mod directory;
mod discard;
mod layout;
mod listing;
mod locks;
mod looking;
mod opening;
mod owner;
mod publish;
mod reading;
mod records;
mod recovery;
mod removal;
mod verify;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::disk::{Disk, Status};
use crate::manifest::Kind;

use checkpoint::Published;
use directory::Directory;
use owner::Owner;

pub use checkpoint::{Checkpoint, Damage};
pub use opening::Opening;
pub use owner::{Identity, Patience, Timing};
pub use reading::{Damaged, ReadLock, ReadonlyRoot, Survey, read_lock_at, verify_checkpoint};
pub use recovery::Recovery;
pub use verify::Part;

/// The key of a checkpoint in a root.
type Key = (Kind, u64);

/// Published checkpoints, by kind and step.
type Checkpoints = BTreeMap<Key, Arc<Published>>;

/// A root that this process owns, and alone may change. Its methods may be called from several threads.
pub struct Root<D: Disk + Clone + 'static> {
    root: Directory<D>,
    process: u32,
    recovered: Recovery,
    /// Held by who changes what is visible.
    changes: Mutex<()>,
    /// Held by who gives the hidden name of a checkpoint that is being written to something, or takes it away.
    beginnings: Mutex<()>,
    /// Held for as long as it takes to look something up, never through a call of the disk; but see `discard.rs`.
    state: Mutex<State<D>>,
}

struct State<D: Disk + Clone + 'static> {
    /// `None` once the root is closed.
    owner: Option<Arc<Owner<D>>>,
    /// Whole and durable, and recorded as far as that was possible.
    published: Checkpoints,
    /// Perhaps visible, and whole if they are, but not known to be durable under their names: what is being renamed, and
    /// what the rename or the fsync after it failed of.
    doubtful: BTreeSet<Key>,
    /// What is being published is among them until it is over.
    attempts: BTreeMap<Key, Attempt<D>>,
    /// The steps whose checkpoints are not removed.
    protected: BTreeSet<u64>,
    /// Whether setting aside was begun and did not end.
    is_discarding: bool,
}

/// A checkpoint that is being written.
#[derive(Clone)]
struct Attempt<D: Disk + Clone> {
    folder: Arc<Directory<D>>,
    status: Status,
    /// Its publication failed, and cannot be tried again.
    failed: bool,
}

impl<D: Disk + Clone + 'static> Root<D> {
    /// The absolute path.
    pub fn path(&self) -> &Path {
        &self.root.path
    }

    /// What opening found and mended.
    pub fn recovered(&self) -> &Recovery {
        &self.recovered
    }

    fn checkpoint_path(&self, (kind, step): Key) -> PathBuf {
        self.root.path.join(layout::checkpoint(kind, step))
    }
}

fn newest(published: &Checkpoints, kind: Kind) -> Option<u64> {
    published.range((kind, 0)..=(kind, u64::MAX)).next_back().map(|(&(_, step), _)| step)
}

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
//! 3. The newest checkpoint of a kind is never removed, nor one that is being read.
//! 4. Only the owner (`owner/`) changes a root, and only what `layout.rs` calls its own; nothing is reached through a
//!    symbolic link.
//! 5. A failed fsync fails what it was for, for good. A checkpoint whose name was perhaps not made durable is not
//!    counted until the next start has looked at it.
//!
//! Everything goes through a [`Disk`](crate::disk::Disk), so that the tests can take the power away between
//! any two steps: the method is that of "All File Systems Are Not Created Equal" (Pillai et al., OSDI 2014).

mod checkpoint;
mod directory;
mod discard;
mod layout;
mod listing;
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
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::disk::{Disk, Status};
use crate::error::CommitError;
use crate::manifest::Kind;

use checkpoint::Published;
use directory::Directory;
use owner::Owner;

pub use checkpoint::{Checkpoint, Damage};
pub use opening::Opening;
pub use owner::{Identity, Patience, Timing};
pub use reading::{Damaged, ReadLock, ReadonlyRoot, Survey, read_lock_at, verify_folder};
pub use recovery::Recovery;

/// The key of a checkpoint in a root.
type Key = (Kind, u64);

/// A root that this process owns, and alone may change. Its methods may be called from several threads.
pub struct Root<D: Disk + Clone + 'static> {
    root: Directory<D>,
    process: u32,
    recovered: Recovery,
    state: Mutex<State<D>>,
}

struct State<D: Disk + Clone + 'static> {
    /// `None` once the root is closed.
    owner: Option<Owner<D>>,
    /// Whole and durable.
    published: BTreeMap<Key, Published>,
    /// Whole and visible, but the fsync of their names failed.
    doubtful: BTreeSet<Key>,
    attempts: BTreeMap<Key, Attempt<D>>,
    /// Whether setting aside was begun and did not end.
    is_discarding: bool,
}

/// A checkpoint that is being written.
struct Attempt<D: Disk + Clone> {
    folder: Directory<D>,
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

    /// Lets go of the root; what is being written is left to the next owner to remove.
    pub fn close(&self) {
        // A copy in a child made by `fork` has nothing to let go of.
        if let Ok(mut state) = self.state() {
            let owner = state.owner.take();
            // With their locks, by which the next owner would take them for somebody's who still writes.
            state.attempts.clear();
            drop(state);
            // Outside the lock: it waits for the heart.
            drop(owner);
        }
    }

    /// # Errors
    /// [`CommitError::RootLost`] in a child made by `fork`, which may find the lock held by a thread that it
    /// does not have.
    fn state(&self) -> Result<MutexGuard<'_, State<D>>, CommitError> {
        if self.process != std::process::id() {
            return Err(self.lost("it belongs to the process that this one was forked from"));
        }
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn lost(&self, reason: &str) -> CommitError {
        CommitError::RootLost { path: self.root.path.clone(), reason: reason.to_owned() }
    }

    /// The state, for who is about to change the root.
    ///
    /// # Errors
    /// [`CommitError::RootLost`] when it is not this process's, or not where it was.
    fn owned(&self) -> Result<MutexGuard<'_, State<D>>, CommitError> {
        let mut state = self.state()?;
        state.owner.as_ref().ok_or_else(|| self.lost("it was closed"))?.check(&self.root)?;
        if state.is_discarding {
            return Err(self.lost("setting checkpoints aside failed on the way: open it again"));
        }
        let now =
            Directory::open(&self.root.disk, &self.root.path).map_err(|_| self.lost("it was moved or removed"))?;
        if !now.status()?.is_same(&self.root.status()?) {
            return Err(self.lost("another folder has taken its place"));
        }
        state.forget_vanished(&self.root)?;
        Ok(state)
    }

    fn checkpoint_path(&self, (kind, step): Key) -> PathBuf {
        self.root.path.join(layout::checkpoint(kind, step))
    }
}

impl<D: Disk + Clone + 'static> State<D> {
    /// Forgets checkpoints that a person removed or renamed.
    fn forget_vanished(&mut self, root: &Directory<D>) -> Result<(), CommitError> {
        let mut vanished = Vec::new();
        for (&(kind, step), published) in &self.published {
            let found = root.look_at(&layout::checkpoint(kind, step))?;
            if !found.is_some_and(|found| found.is_same(&published.status)) {
                vanished.push((kind, step));
            }
        }
        for key in vanished {
            self.published.remove(&key);
        }
        Ok(())
    }
}

fn newest(published: &BTreeMap<Key, Published>, kind: Kind) -> Option<u64> {
    published.range((kind, 0)..=(kind, u64::MAX)).next_back().map(|(&(_, step), _)| step)
}

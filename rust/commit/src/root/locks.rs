//! Who waits for whom in a root.
//!
//! To make something durable may take a disk seconds, in a network file system that others load even more, and the
//! thread that trains is not to wait for that. So there are three locks, taken in this order:
//!
//! 1. `changes`: who publishes, removes, replaces, gives up, sets aside or closes holds it from the first look to the
//!    last fsync. Two of them never interleave: the registry and the pointers are written in the order of what they
//!    record. The root is made durable under it alone, since a failed fsync is told but once: it has to reach who made
//!    the change.
//! 2. `beginnings`: who begins a checkpoint holds it alone, and waits for no publication. What it changes is hidden and
//!    has no part in what is visible; where it tries whether the folder to be replaced can be exchanged, it makes the
//!    root durable and holds `changes` as well. Who gives an attempt up, or takes the root from its process, holds both;
//!    who publishes takes the hidden name away under `changes` alone, since nobody begins what is an attempt still.
//! 3. `state`: what is known, held through no call of the disk. A copy of it is looked at outside of the lock, and what
//!    was found of a checkpoint is noted only where the state still has that very one.
//!
//! So a reader of the state finds a checkpoint published when it is durable and recorded, and not before; one that is
//! being replaced is not counted from the exchange until the new one is; one that is being removed is not counted from
//! before it leaves the registry, and can be protected no longer. What is being published is an attempt until its hidden
//! name is free again: nobody begins the same step, or a lower one, meanwhile.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::directory::Directory;
use super::{Root, State};
use crate::disk::Disk;
use crate::error::CommitError;

impl<D: Disk + Clone + 'static> Root<D> {
    /// The right to change what is visible.
    ///
    /// # Errors
    /// As [`state`](Root::state).
    pub(super) fn changes(&self) -> Result<MutexGuard<'_, ()>, CommitError> {
        self.locked(&self.changes)
    }

    /// The right to begin a checkpoint.
    ///
    /// # Errors
    /// As [`state`](Root::state).
    pub(super) fn beginnings(&self) -> Result<MutexGuard<'_, ()>, CommitError> {
        self.locked(&self.beginnings)
    }

    /// What is known.
    ///
    /// # Errors
    /// [`CommitError::RootLost`] in a child made by `fork`, which may find the lock held by a thread that it
    /// does not have.
    pub(super) fn state(&self) -> Result<MutexGuard<'_, State<D>>, CommitError> {
        self.locked(&self.state)
    }

    fn locked<'a, T>(&self, lock: &'a Mutex<T>) -> Result<MutexGuard<'a, T>, CommitError> {
        if self.process != std::process::id() {
            return Err(self.lost("it belongs to the process that this one was forked from"));
        }
        Ok(lock.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn lost(&self, reason: &str) -> CommitError {
        CommitError::RootLost { path: self.root.path.clone(), reason: reason.to_owned() }
    }

    /// Makes sure that the root is still this process's, and where it was: for who is about to change it, and holds the
    /// right to.
    ///
    /// # Errors
    /// [`CommitError::RootLost`].
    pub(super) fn check_owned(&self) -> Result<(), CommitError> {
        let (owner, is_discarding) = {
            let state = self.state()?;
            (state.owner.clone(), state.is_discarding)
        };
        owner.ok_or_else(|| self.lost("it was closed"))?.check(&self.root)?;
        if is_discarding {
            return Err(self.lost("setting checkpoints aside failed on the way: open it again"));
        }
        let now =
            Directory::open(&self.root.disk, &self.root.path).map_err(|_| self.lost("it was moved or removed"))?;
        if !now.status()?.is_same(&self.root.status()?) {
            return Err(self.lost("another folder has taken its place"));
        }
        Ok(())
    }

    /// Lets go of the root; what is being written is left to the next owner to remove.
    pub fn close(&self) {
        // A copy in a child made by `fork` has nothing to let go of.
        let Ok(changes) = self.changes() else { return };
        let Ok(beginnings) = self.beginnings() else { return };
        let Ok(mut state) = self.state() else { return };
        let owner = state.owner.take();
        // With their locks, by which the next owner would take them for somebody's who still writes.
        state.attempts.clear();
        drop(state);
        drop(beginnings);
        drop(changes);
        // The last: who changes the root has it no longer than the locks. Outside of them: it waits for the heart.
        debug_assert!(owner.as_ref().is_none_or(|owner| Arc::strong_count(owner) == 1));
        drop(owner);
    }
}

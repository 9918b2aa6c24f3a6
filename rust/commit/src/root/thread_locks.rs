//! The locks of an open root.
//!
//! An fsync may take seconds, and the thread that trains must not wait for one. So there are three locks, taken in
//! this order:
//!
//! 1. `publish_lock`: publish, remove, abandon, discard and close hold it from the first look to the last fsync. So
//!    the links are changed in the order of the publications. Only its holder makes the root durable,
//!    because a failed fsync is reported once and must reach the change it belongs to.
//! 2. `begin_lock`: beginning a checkpoint takes it alone and waits for no publication. It changes hidden names only.
//!    Abandoning a checkpoint and closing the root hold both.
//! 3. `state`: what is known, held during no disk call. Callers copy it, look at the disk without the lock, and then
//!    change only the entry that they looked at.
//!
//! So the state lists a checkpoint as published when it is durable and its link is changed. A checkpoint that is being replaced is
//! not listed from the exchange until the new one is. One that is being removed is not listed from before it loses its name, and can no longer be protected. A checkpoint that is being published stays in progress until its hidden
//! name is free again; nobody begins the same or a lower step meanwhile.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::checkpoint_root::{Root, State};
use super::contents::OpenFolder;
use crate::disk::Disk;
use crate::error::CommitError;

impl<D: Disk + Clone + 'static> Root<D> {
    /// Locks changes of what is visible.
    pub(super) fn publish_lock(&self) -> Result<MutexGuard<'_, ()>, CommitError> {
        self.locked(&self.publish_lock)
    }

    /// Locks the beginning of checkpoints.
    pub(super) fn begin_lock(&self) -> Result<MutexGuard<'_, ()>, CommitError> {
        self.locked(&self.begin_lock)
    }

    /// Locks what is known.
    pub(super) fn state(&self) -> Result<MutexGuard<'_, State<D>>, CommitError> {
        self.locked(&self.state)
    }

    fn locked<'a, T>(&self, lock: &'a Mutex<T>) -> Result<MutexGuard<'a, T>, CommitError> {
        if self.process != std::process::id() {
            return Err(self.lost("it belongs to the process that this one was forked from"));
        }
        Ok(lock.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn lost(&self, reason: &str) -> CommitError {
        CommitError::RootLost { path: self.root.path.clone(), reason: reason.to_owned() }
    }

    /// Checks that the root still belongs to this process and is where it was, before a change.
    pub(super) fn check_owned(&self) -> Result<(), CommitError> {
        let (writer_lock, is_discarding) = {
            let state = self.state()?;
            (state.writer_lock.clone(), state.is_discarding)
        };
        writer_lock.ok_or_else(|| self.lost("it was closed"))?.check(&self.root)?;
        if is_discarding {
            return Err(self.lost("setting checkpoints aside failed on the way: open it again"));
        }
        let now =
            OpenFolder::open(&self.root.disk, &self.root.path).map_err(|_| self.lost("it was moved or removed"))?;
        if !now.stat()?.is_same(&self.root.stat()?) {
            return Err(self.lost("another folder has taken its place"));
        }
        Ok(())
    }

    /// Releases the root. The next owner removes what is still being written.
    pub fn close(&self) {
        // A copy in a child made by `fork` has nothing to release.
        let Ok(publish_lock) = self.publish_lock() else { return };
        let Ok(begin_lock) = self.begin_lock() else { return };
        let Ok(mut state) = self.state() else { return };
        let writer_lock = state.writer_lock.take();
        // This drops the locks on their folders, which the next owner would take for those of live writers.
        state.in_progress.clear();
        state.reserved.clear();
        drop(state);
        drop(begin_lock);
        drop(publish_lock);
        debug_assert!(writer_lock.as_ref().is_none_or(|lock| Arc::strong_count(lock) == 1));
        // Last, and without the locks: it waits for the heartbeat to end.
        drop(writer_lock);
    }
}

//! The root as its owner holds it: opened, locked, and what is known of it.
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
//! So the state lists a checkpoint as published when it is durable and its link is changed. A checkpoint that is being
//! replaced is not listed from the exchange until the new one is. One that is being removed is not listed from before it
//! loses its name, and can no longer be protected. A checkpoint that is being published stays in progress until its
//! hidden name is free again; nobody begins the same or a lower step meanwhile.
//!
//! People remove, rename and replace published checkpoints. Invariants: the next call that depends on one notices that
//! it is gone. It is forgotten only when its name does not lead to its manifest.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;

use super::names;
use super::recovery::{self, RecoveryReport};
use super::whole_checkpoint::{CheckpointInfo, CheckpointKey, Checkpoints, PublishedCheckpoint, newest};
use super::writer_lock::{HeartbeatTiming, ProcessIdentity, WaitCallback, WriterLock};
use crate::disk::{Disk, EntryKind, Room};
use crate::error::{CommitError, FirstFailure};
use crate::hidden_folder::HiddenFolder;
use crate::hidden_names::absolute;
use crate::manifest::{self, CheckpointKind};
use crate::open_folder::OpenFolder;

/// A root that this process owns, and alone may change. Its methods may be called from several threads.
///
/// - [`open`](Root::open) takes the writer lock and recovers the root; [`close`](Root::close) releases it.
/// - [`reserve`](Root::reserve) checks a step and the room on the disk.
/// - [`begin`](Root::begin) makes the folder of a checkpoint. [`publish`](Root::publish) or [`abandon`](Root::abandon)
///   ends what it began.
/// - [`list`](Root::list) returns the published checkpoints.
/// - [`remove`](Root::remove) removes one of them, unless [`protect`](Root::protect) was called for its step.
/// - [`discard_after`](Root::discard_after) sets newer ones aside after a rollback.
pub struct Root<D: Disk> {
    pub(super) root: OpenFolder<D>,
    pub(super) process: u32,
    pub(super) recovered: RecoveryReport,
    /// Held while visible names change.
    pub(super) publish_lock: Mutex<()>,
    /// Held while the hidden name of an unfinished checkpoint is created or taken away.
    pub(super) begin_lock: Mutex<()>,
    /// Held for lookups in memory, never during a disk call; `discard_after` is the exception.
    pub(super) state: Mutex<State<D>>,
}

pub(super) struct State<D: Disk> {
    /// `None` once the root is closed.
    pub(super) writer_lock: Option<Arc<WriterLock<D>>>,
    /// Whole and durable.
    pub(super) published: Checkpoints,
    /// Visible or not, durable or not: a rename is under way, or the rename or the fsync after it failed.
    pub(super) uncertain: BTreeSet<CheckpointKey>,
    /// Begun, and neither published nor abandoned yet.
    pub(super) in_progress: BTreeMap<CheckpointKey, InProgress<D>>,
    /// The room that checkpoints will take which are neither published nor abandoned yet.
    pub(super) reserved: BTreeMap<CheckpointKey, Room>,
    /// Steps whose checkpoints are not removed.
    pub(super) protected: BTreeSet<u64>,
    /// A `discard_after` began and did not end.
    pub(super) is_discarding: bool,
}

/// A checkpoint that is being written.
pub(super) struct InProgress<D: Disk> {
    pub(super) hidden: Arc<HiddenFolder<D>>,
    /// The failure of its publication, which cannot be tried again.
    pub(super) failure: FirstFailure,
}

/// How a root is opened.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// The process that opens it.
    pub identity: ProcessIdentity,
    /// How its owners keep time.
    pub timing: HeartbeatTiming,
    /// How long to wait for another owner to die or release the root. Finding out whether there is one takes up to
    /// [`HeartbeatTiming::stale`] in any case, where it may run on another machine.
    pub wait: Duration,
}

impl OpenOptions {
    /// Opens for this process, and waits for so long.
    pub fn new(wait: Duration) -> Self {
        Self { identity: ProcessIdentity::current(), timing: HeartbeatTiming::default(), wait }
    }
}

impl<D: Disk> Root<D> {
    /// Opens the root at `path` as its owner and recovers it. Creates the folder if only its last part is missing.
    ///
    /// # Errors
    /// - [`CommitError::RootInUse`], which names the owner.
    /// - [`CommitError::ParentMissing`], [`CommitError::NotADirectory`], [`CommitError::NameTaken`].
    /// - [`CommitError::Io`]: for example a root that may not be written.
    /// - The error of `on_wait`.
    pub fn open(disk: D, path: &Path, options: OpenOptions, on_wait: WaitCallback<'_>) -> Result<Self, CommitError> {
        let root = OpenFolder::open_or_create(&disk, &absolute(path)?)?;
        let OpenOptions { identity, timing, wait } = options;
        let writer_lock = WriterLock::acquire(&root, identity, timing, wait, on_wait)?;
        let (published, recovered) = recovery::recover(&root)?;
        let state = State {
            writer_lock: Some(Arc::new(writer_lock)),
            published,
            is_discarding: false,
            uncertain: BTreeSet::new(),
            in_progress: BTreeMap::new(),
            reserved: BTreeMap::new(),
            protected: BTreeSet::new(),
        };
        Ok(Self {
            root,
            process: std::process::id(),
            recovered,
            publish_lock: Mutex::new(()),
            begin_lock: Mutex::new(()),
            state: Mutex::new(state),
        })
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

    /// The absolute path.
    pub fn path(&self) -> &Path {
        &self.root.path
    }

    /// The random text of this ownership, which [`ReadonlyRoot::owner`](super::ReadonlyRoot::owner) reads elsewhere.
    ///
    /// # Errors
    /// [`CommitError::RootLost`] once it is closed, and in a child made by `fork`.
    pub fn owner(&self) -> Result<String, CommitError> {
        let writer_lock = self.state()?.writer_lock.clone();
        writer_lock.map(|lock| lock.nonce().to_owned()).ok_or_else(|| self.lost("it was closed"))
    }

    /// The results of opening.
    pub fn recovered(&self) -> &RecoveryReport {
        &self.recovered
    }

    pub(super) fn checkpoint_path(&self, (kind, step): CheckpointKey) -> PathBuf {
        self.root.path.join(names::checkpoint(kind, step))
    }

    // ---- Locks ----

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

    // ---- Which checkpoints are there ----

    /// The published checkpoints: by kind, steps ascending. Checkpoints that a person removed or renamed are left out.
    ///
    /// # Errors
    /// [`CommitError::Io`] when the root cannot be read.
    pub fn list(&self) -> Result<Vec<CheckpointInfo>, CommitError> {
        self.forget_missing()?;
        Ok(self.published()?.into_values().map(|published| published.checkpoint.clone()).collect())
    }

    /// A copy of what is known, for use without the lock.
    pub(super) fn published(&self) -> Result<Checkpoints, CommitError> {
        Ok(self.state()?.published.clone())
    }

    /// Forgets every checkpoint that is gone.
    pub(super) fn forget_missing(&self) -> Result<(), CommitError> {
        for key in self.published()?.into_keys() {
            self.is_present(key)?;
        }
        Ok(())
    }

    /// The newest step of a kind that is there. Forgets newer ones that are gone.
    pub(super) fn newest_present(&self, kind: CheckpointKind) -> Result<Option<u64>, CommitError> {
        loop {
            let newest = self.state()?.newest(kind);
            match newest {
                Some(step) if !self.is_present((kind, step))? => {}
                newest => return Ok(newest),
            }
        }
    }

    /// Whether a checkpoint is published and there. Forgets it if it is gone.
    pub(super) fn is_present(&self, key: CheckpointKey) -> Result<bool, CommitError> {
        let Some(published) = self.state()?.published.get(&key).cloned() else {
            return Ok(false);
        };
        let is_there = self.is_there(key, &published)?;
        if !is_there {
            let mut state = self.state()?;
            // Another one may have been published in its place since.
            if state.published.get(&key).is_some_and(|known| Arc::ptr_eq(known, &published)) {
                state.published.remove(&key);
            }
        }
        Ok(is_there)
    }

    /// Whether the name leads to a folder with the manifest file of that checkpoint.
    fn is_there(&self, (kind, step): CheckpointKey, published: &PublishedCheckpoint) -> Result<bool, CommitError> {
        let folder = match self.root.open_folder(&names::checkpoint(kind, step)) {
            // It is gone, or this library did not make it.
            Err(error)
                if [Errno::NOENT, Errno::NOTDIR, Errno::LOOP, Errno::ACCESS].iter().any(|&code| error.is(code)) =>
            {
                return Ok(false);
            }
            outcome => outcome?,
        };
        let found = folder.look_at(OsStr::new(manifest::FILE_NAME))?;
        Ok(found.is_some_and(|found| found.kind == EntryKind::File && found.is_same(&published.manifest)))
    }
}

impl<D: Disk> State<D> {
    /// The newest published step of a kind.
    pub(super) fn newest(&self, kind: CheckpointKind) -> Option<u64> {
        newest(&self.published, kind)
    }
}

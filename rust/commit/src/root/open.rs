//! Opening a root: taking its writer lock and recovering it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::checkpoint_root::{Root, State};
use super::contents::OpenFolder;
use super::recovery;
use super::writer_lock::{HeartbeatTiming, ProcessIdentity, WaitCallback, WriterLock};
use crate::disk::Disk;
use crate::error::CommitError;
use crate::hidden_names::absolute;

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

impl<D: Disk + Clone + 'static> Root<D> {
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
}

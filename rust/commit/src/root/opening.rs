//! Opening a root: taking it over and recovering it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::directory::Directory;
use super::owner::{Identity, Owner, Patience, Timing};
use super::{Root, State, recovery};
use crate::disk::Disk;
use crate::error::CommitError;

/// How a root is opened.
#[derive(Debug, Clone)]
pub struct Opening {
    /// Who opens it.
    pub identity: Identity,
    /// How its owners keep time.
    pub timing: Timing,
    /// How long to wait for another owner to die or let go. Whether there is one is found out in any case, which takes
    /// up to [`Timing::stale`] where it may run elsewhere.
    pub wait: Duration,
}

impl Opening {
    /// This process, waiting for so long.
    pub fn new(wait: Duration) -> Self {
        Self { identity: Identity::current(), timing: Timing::default(), wait }
    }
}

impl<D: Disk + Clone + 'static> Root<D> {
    /// Opens the root at `path` as its owner, made where it is not there but what it lies in is, and recovers it.
    ///
    /// # Errors
    /// [`CommitError::RootInUse`], which names the owner; [`CommitError::ParentMissing`];
    /// [`CommitError::NotADirectory`]; [`CommitError::NameTaken`]; [`CommitError::Io`] among others for a root that may
    /// not be written; what `patience` ends with.
    pub fn open(disk: D, path: &Path, opening: Opening, patience: Patience<'_>) -> Result<Self, CommitError> {
        let root = Directory::open_or_create(&disk, &absolute(path)?)?;
        let Opening { identity, timing, wait } = opening;
        let owner = Owner::acquire(&root, identity, timing, wait, patience)?;
        let (published, recovered) = recovery::recover(&root)?;
        let state = State {
            owner: Some(Arc::new(owner)),
            published,
            is_discarding: false,
            doubtful: BTreeSet::new(),
            attempts: BTreeMap::new(),
            protected: BTreeSet::new(),
        };
        Ok(Self {
            root,
            process: std::process::id(),
            recovered,
            changes: Mutex::new(()),
            beginnings: Mutex::new(()),
            state: Mutex::new(state),
        })
    }
}

pub(super) fn absolute(path: &Path) -> Result<PathBuf, CommitError> {
    std::path::absolute(path).map_err(|source| CommitError::Io {
        operation: "find the current folder for",
        path: path.to_path_buf(),
        source,
    })
}

//! The root as its owner holds it in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::contents::{CheckpointKey, Checkpoints, OpenFolder, newest, root_names};
use super::recovery::RecoveryReport;
use super::writer_lock::WriterLock;
use crate::disk::{Disk, Room};
use crate::error::CommitError;
use crate::manifest::CheckpointKind;

/// A root that this process owns, and alone may change. Its methods may be called from several threads.
///
/// - [`open`](Root::open) takes the writer lock and recovers the root; [`close`](Root::close) releases it.
/// - [`reserve`](Root::reserve) checks a step and the room on the disk.
/// - [`begin`](Root::begin) makes the folder of a checkpoint. [`publish`](Root::publish) or [`abandon`](Root::abandon)
///   ends what it began.
/// - [`list`](Root::list) returns the published checkpoints.
/// - [`remove`](Root::remove) removes one of them, unless [`protect`](Root::protect) was called for its step.
/// - [`discard_after`](Root::discard_after) sets newer ones aside after a rollback.
pub struct Root<D: Disk + Clone + 'static> {
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

pub(super) struct State<D: Disk + Clone + 'static> {
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
#[derive(Clone)]
pub(super) struct InProgress<D: Disk + Clone> {
    pub(super) folder: Arc<OpenFolder<D>>,
    /// Whether its publication failed and cannot be tried again.
    pub(super) failed: bool,
}

impl<D: Disk + Clone + 'static> Root<D> {
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
        self.root.path.join(root_names::checkpoint(kind, step))
    }
}

impl<D: Disk + Clone + 'static> State<D> {
    /// The newest published step of a kind.
    pub(super) fn newest(&self, kind: CheckpointKind) -> Option<u64> {
        newest(&self.published, kind)
    }
}

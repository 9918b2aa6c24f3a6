//! The root of a run's checkpoints: which of them exist, and who may change that.
//!
//! A checkpoint is begun, written into a hidden folder, and published by one rename. `names.rs` lists
//! all names in a root.
//!
//! Invariants:
//!
//! 1. The folders decide. A folder named `hf-100` that is whole is a published checkpoint. The links are
//!    derived from the folders; every start writes them again where they differ.
//! 2. Publication has an order: files and folders of the checkpoint, its name, the link, removal of what it replaces.
//!    Each step is durable before the next. A removal first changes the link, then takes the name away. The folder is
//!    emptied when that is durable. After a
//!    crash between any two steps every visible checkpoint is whole, and the next start completes or undoes the rest.
//! 3. These are never removed: the newest checkpoint of a kind, one that is being read, one that is protected.
//! 4. Only the process that holds the writer lock changes a root, and only names that `names.rs` defines. Nothing
//!    is reached through a symbolic link.
//! 5. A failed fsync is final for what it was meant to make durable. A checkpoint whose name may not be durable is not
//!    counted until the next start has looked at it.
//! 6. Two changes of what is visible never interleave. A checkpoint counts as published once its name is
//!    durable and the link is changed. Queries, and the beginning of a checkpoint, wait for no fsync (`checkpoint_root.rs`).
//! 7. The next call that depends on a checkpoint notices that people removed, renamed or replaced it
//!    (`checkpoint_root.rs`).
//!
//! Everything goes through a [`Disk`](crate::disk::Disk), so that tests can cut the power between any two steps.
//!
//! ```
//! use std::time::Duration;
//!
//! use tundish_commit::root::{OpenOptions, Root};
//! use tundish_commit::{CheckpointKind, RealDisk, write_small_file};
//!
//! let parent = tempfile::tempdir().unwrap();
//! let options = OpenOptions::new(Duration::ZERO);
//! let root = Root::open(RealDisk, &parent.path().join("run"), options, &mut || Ok(()))?;
//! let folder = root.begin(CheckpointKind::Hf, 100, false)?;
//! write_small_file(folder, "config.json", b"{}")?;
//! let manifest = r#"{"format_version": 1, "kind": "hf", "step": 100, "files": [{"name": "config.json", "size": 2}]}"#;
//! let path = root.publish(CheckpointKind::Hf, 100, manifest, false)?;
//! assert_eq!(path, parent.path().join("run/hf-100"));
//! assert_eq!(root.list()?.len(), 1);
//! root.close();
//! # Ok::<(), tundish_commit::CommitError>(())
//! ```

mod checkpoint_root;
mod latest_links;
mod names;
mod publish;
mod read_lock;
mod readonly_root;
mod recovery;
mod removal;
mod verify;
mod whole_checkpoint;
mod writer_lock;

pub use checkpoint_root::{OpenOptions, Root};
pub use names::unfinished_name;
pub use read_lock::{ReadLock, read_lock_at, verify_checkpoint};
pub use readonly_root::{DamagedCheckpoint, ReadonlyRoot, RootListing};
pub use recovery::RecoveryReport;
pub use whole_checkpoint::{CheckpointInfo, Damage};
pub use writer_lock::{HeartbeatTiming, ProcessIdentity, WaitCallback};

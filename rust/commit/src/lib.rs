//! Durable, atomic publication of a folder or a file.
//!
//! A [`Folder`] is written under a hidden name beside its target and appears under the target's name in one
//! step, when all of it is on the disk; [`replace_file`] does the same for a single file. What always holds:
//!
//! 1. Under the target's name there is the whole folder or file, or there is what was there before. The order that
//!    gives this: fsync of every file, fsync of the folder, rename, fsync of the parent.
//! 2. A write or fsync that failed is never taken for one that succeeded: the kernel may have dropped the bytes and
//!    forgotten the error, so the folder can no longer be published, and the fsync is not tried again.
//! 3. A writer that dies at any instant leaves at most its hidden folder. The next [`Folder::create`] in the
//!    same parent, or [`sweep()`], removes it; the folder of a live writer is never touched (see `claim.rs`).
//! 4. Every system call that changes the disk goes through [`disk`], where test builds (feature `failpoints`) can
//!    be killed or made to fail at each one.
//!
//! The checkpoints of a run are published so too, but many ranks write each of them and readers look for the newest:
//! [`root`] decides which of them exist, [`shards`] writes their files, and [`staging`] is the memory they are written
//! from.
//!
//! The method is that of "All File Systems Are Not Created Equal" (Pillai et al., OSDI 2014) for atomic
//! replacement; why a failed fsync is final is shown in "Can Applications Recover from fsync Failures?" (Rebello
//! et al., USENIX ATC 2020).
//!
//! ```
//! let parent = tempfile::tempdir().unwrap();
//! let folder = tundish_commit::Folder::create(parent.path().join("plan"))?;
//! let mut file = folder.create_file("plan.json")?;
//! file.append(b"{}")?;
//! file.finish()?;
//! folder.publish()?;
//! assert_eq!(std::fs::read(parent.path().join("plan/plan.json")).unwrap(), b"{}");
//! # Ok::<(), tundish_commit::CommitError>(())
//! ```

#![deny(unsafe_code)]

mod checksum;
mod claim;
pub mod disk;
mod error;
#[cfg(feature = "failpoints")]
mod failpoint;
mod file;
mod file_metadata;
mod folder;
mod ledger;
pub mod manifest;
mod name;
mod reading;
mod remove;
pub mod root;
mod seal;
pub mod shards;
mod sidecar;
pub mod staging;
mod sweep;
mod tree;
mod writeback;

pub use checksum::{Checksum, NotAChecksum};
pub use error::CommitError;
pub use file::FolderFile;
pub use file_metadata::FileMetadata;
pub use folder::{Folder, free_space, replace_file};
pub use manifest::{Kind, Manifest};
pub use seal::seal;
pub use sidecar::{checksum_file, write_small_file};
pub use sweep::{SweepReport, sweep};

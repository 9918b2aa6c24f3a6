//! Durable, atomic publication of folders, files and checkpoints.
//!
//! An [`AtomicFolder`] is written under a hidden name beside its target. One rename gives it the target's name, after
//! every byte of it is durable. [`replace_file`] does the same for a single file. Four rules hold:
//!
//! 1. The target's name leads to the whole new folder or file, or to what was there before. The order is: fsync of
//!    every file, fsync of the folder, rename, fsync of the parent.
//! 2. A failed write or fsync is final. The kernel may have dropped the bytes and forgotten the error, so the folder
//!    can no longer be published and the fsync is not repeated.
//! 3. A writer that dies at any instant leaves at most its hidden folder. The next [`AtomicFolder::create`] in the same
//!    parent, or [`sweep()`], removes it. The folder of a live writer is never touched.
//! 4. Every system call that changes the disk goes through [`disk`]. Test builds (feature `failpoints`) can kill the
//!    process or fail the call at each of them.
//!
//! Checkpoints follow the same rules with many writers and readers: [`root`] decides which checkpoints exist,
//! [`ShardWriter`] writes their files, and [`staging`] holds the memory they are written from.
//!
//! The method of atomic replacement is that of "All File Systems Are Not Created Equal" (Pillai et al., OSDI 2014).
//! "Can Applications Recover from fsync Failures?" (Rebello et al., USENIX ATC 2020) shows why a failed fsync is final.
//!
//! ```
//! let parent = tempfile::tempdir().unwrap();
//! let folder = tundish_commit::AtomicFolder::create(parent.path().join("plan"))?;
//! let mut file = folder.create_file("plan.json")?;
//! file.append(b"{}")?;
//! file.finish()?;
//! folder.publish()?;
//! assert_eq!(std::fs::read(parent.path().join("plan/plan.json")).unwrap(), b"{}");
//! # Ok::<(), tundish_commit::CommitError>(())
//! ```

#![deny(unsafe_code)]

mod atomic_folder;
mod checksum;
pub mod disk;
mod error;
#[cfg(feature = "failpoints")]
mod failpoints;
mod file_checksums;
mod folder_tree;
mod hidden_folder;
mod hidden_names;
pub mod manifest;
mod open_folder;
mod output_file;
mod real_disk;
pub mod root;
mod shard_writer;
pub mod staging;
mod work_queue;
mod writer_threads;

pub use atomic_folder::{AtomicFolder, FolderFile, free_space, replace_file};
pub use checksum::{Checksum, NotAChecksum};
pub use error::CommitError;
pub use file_checksums::checksum_file;
pub use folder_tree::write_small_file;
pub use hidden_folder::{SweepReport, sweep};
pub use manifest::{CheckpointKind, FileMetadata, Manifest, add_manifest_checksum};
pub use real_disk::RealDisk;
pub use shard_writer::ShardWriter;

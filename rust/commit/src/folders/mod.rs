//! One folder, or one file, that appears under its final name in a single rename.
//!
//! [`AtomicFolder`] is written under a hidden name. [`sweep()`] removes the hidden folders that dead writers left.

mod atomic_folder;
mod folder_file;
mod sweep;
mod unfinished_folder;
mod write_status;

pub use atomic_folder::{AtomicFolder, free_space, replace_file};
pub use folder_file::FolderFile;
pub use sweep::{SweepReport, sweep};

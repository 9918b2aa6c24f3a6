//! One folder, or one file, that appears under its final name in a single rename.
//!
//! [`Folder`] is written under a hidden name. [`sweep()`] removes the hidden folders that dead writers left.

mod file_status;
mod folder;
mod folder_file;
mod sweep;
mod unfinished_folder;

pub use folder::{Folder, free_space, replace_file};
pub use folder_file::FolderFile;
pub use sweep::{SweepReport, sweep};

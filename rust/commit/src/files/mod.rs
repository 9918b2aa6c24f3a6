//! The files of a checkpoint: opened, written back, and read again for their checksums.

pub(crate) mod file_checksums;
pub(crate) mod file_progress;
pub(crate) mod folder_tree;
pub(crate) mod small_files;
pub(crate) mod writeback;

pub use small_files::{checksum_file, write_small_file};

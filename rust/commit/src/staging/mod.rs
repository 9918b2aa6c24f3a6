//! Staging memory: holds the bytes of files until they are on the disk.
//!
//! A [`FileImage`] is the memory of one file, laid out as the file. An arena keeps freed memory for the next save,
//! because fresh pages cost fifteen to twenty times a copy into warm ones.

mod arena;
mod file_image;
mod mapped_memory;

pub use arena::{StagingStats, staging_stats, trim_staging};
pub use file_image::{FileImage, OutOfMemory};

//! Staging memory: where the bytes of a file wait until they are on the disk.
//!
//! An [`FileImage`] is one file as it will lie on the disk. Its memory comes from the arena of its process, which keeps
//! what is given back, because fresh pages cost fifteen to twenty times a copy into warm ones.

mod arena;
mod image;
mod memory;

pub use arena::{StagingStats, staging_stats, trim_staging};
pub use image::{FileImage, OutOfMemory};

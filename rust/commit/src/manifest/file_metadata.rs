//! [`FileMetadata`]: name, size and checksum of one file.

use crate::checksum::Checksum;

/// A durable file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FileMetadata {
    /// Its name relative to the checkpoint's folder, with `/` between folders.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// `None` where none was requested.
    pub checksum: Option<Checksum>,
}

//! What a checkpoint's manifest says of each file.

use crate::checksum::Checksum;

/// A file that is on the disk.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FileMetadata {
    /// Its name relative to the checkpoint's folder, with `/` between the names of folders.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// `None` where none was asked for.
    pub checksum: Option<Checksum>,
}

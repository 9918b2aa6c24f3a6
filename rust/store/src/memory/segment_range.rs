//! `SegmentRange`: a part of a shared-memory segment, for processes of the same node.

use tundish_shm::SegmentAddress;

/// A part of a segment, for processes of the same node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentRange {
    /// The segment.
    pub address: SegmentAddress,
    /// The offset of the part in its data.
    pub offset: u64,
    /// Bytes of the part.
    pub len: u64,
}

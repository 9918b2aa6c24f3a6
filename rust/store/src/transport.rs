//! `Transport`: the interface through which a process fetches.

use std::sync::Arc;

use tundish_shm::SegmentAddress;

use crate::error::StoreError;
use crate::fetch::FetchReceiver;
use crate::shard_id::{Rows, ShardId, ShardRows};
use crate::tensor_meta::TensorMeta;
use crate::time_limit::TimeLimit;

/// Fetches from owners. Called by several threads at once, for one owner each.
pub trait Transport: Sync {
    /// Fetches these shards from `owner` in one request, into `receiver`.
    ///
    /// Announces each entry of `wanted` to the receiver, by its index, with [`FetchReceiver::space`] or [`FetchReceiver::attach`].
    /// A space counts after [`FetchReceiver::complete`]. A retry may announce again all but complete entries.
    ///
    /// # Errors
    /// The receiver's, [`StoreError::Missing`] with `owner`, and those of connections.
    fn fetch(
        &self,
        owner: &Arc<str>,
        wanted: &[ShardRows],
        receiver: &mut FetchReceiver<'_>,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(), StoreError>;
}

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

/// A shard, or rows of one, as a handle names it.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The address of its owner.
    pub owner: Arc<str>,
    /// The shard.
    pub id: ShardId,
    /// The rows; all if `None`.
    pub rows: Option<Rows>,
    /// The declared type and shape, of the rows if rows are chosen.
    pub meta: TensorMeta,
}

impl Wanted {
    pub(crate) fn selection(&self) -> ShardRows {
        ShardRows { id: self.id.clone(), rows: self.rows.clone() }
    }
}

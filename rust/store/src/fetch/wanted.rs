//! `Wanted`: a shard that a process fetches.

use std::sync::Arc;

use crate::shard_id::{Rows, ShardId, ShardRows};
use crate::tensor_meta::TensorMeta;

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

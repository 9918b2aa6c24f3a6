//! `Transport`: the interface through which a process fetches.

use std::sync::Arc;

use super::receiver::FetchReceiver;
use crate::error::StoreError;
use crate::shard_id::ShardRows;
use crate::time_limit::TimeLimit;

/// Fetches from owners. Called by several threads at once, for one owner each.
pub trait Transport: Sync {
    /// Fetches these shards from `owner` in one request, into `receiver`.
    ///
    /// Calls [`FetchReceiver::space`] or [`FetchReceiver::attach`] for each entry of `wanted`, by its index. A space
    /// counts after [`FetchReceiver::complete`]. A retry may call them again for all but complete entries.
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

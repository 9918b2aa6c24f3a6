//! Binds `tundish-store`: handles, the store of the process, its server and its clients.

pub(crate) mod dtypes;
pub(crate) mod handle;
pub(crate) mod http;
pub(crate) mod shard_store;
pub(crate) mod shard_view;

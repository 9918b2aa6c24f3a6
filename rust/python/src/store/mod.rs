//! Binds `tundish-store`: handles, stores, their servers and clients.

pub(crate) mod dtypes;
pub(crate) mod handle;
pub(crate) mod http;
pub(crate) mod shard_store;
pub(crate) mod shard_view;

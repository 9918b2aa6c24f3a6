//! Binds `tundish-store`: handles of tensors, what a process stores and fetches, its server.

mod collector;
pub(crate) mod dtypes;
pub(crate) mod encoding;
pub(crate) mod handle;
mod locals;
pub(crate) mod node;
mod through;
pub(crate) mod view;
pub(crate) mod wire;

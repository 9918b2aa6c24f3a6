//! What `tundish.tree` does alike for each of many tensors and containers. No core crate is behind it.

mod dlpack;
pub(crate) mod exchange;
pub(crate) mod spans;
pub(crate) mod walk;

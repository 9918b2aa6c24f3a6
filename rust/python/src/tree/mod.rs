//! What `tundish.tree` and `tundish.scatter` do alike for each of many tensors and containers. No core crate is behind
//! it.

pub(crate) mod build;
pub(crate) mod dlpack;
pub(crate) mod exchange;
pub(crate) mod loans;
pub(crate) mod spans;
pub(crate) mod walk;

//! Helpers of `tundish.tree` and `tundish.scatter` that handle many tensors and containers at once.

pub(crate) mod dlpack;
pub(crate) mod dlpack_exchange;
pub(crate) mod overlap;
pub(crate) mod rebuild_program;
pub(crate) mod tensor_builder;
pub(crate) mod traversal;

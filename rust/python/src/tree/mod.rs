//! Helpers of `tundish.tree` and `tundish.scatter` that handle many tensors at once.

pub(crate) mod dlpack;
pub(crate) mod dlpack_exchange;
pub(crate) mod tensor_builder;

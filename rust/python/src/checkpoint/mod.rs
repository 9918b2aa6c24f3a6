//! Bindings of `tundish-commit`: checkpoint roots, file images and the shard writer.

pub(crate) mod root;
pub(crate) mod shards;

//! Bindings of `tundish-commit`: checkpoint roots, file images and the shard writer.

mod callbacks;
pub(crate) mod checkpoint_root;
mod descriptions;
pub(crate) mod file_image;
pub(crate) mod file_metadata;
pub(crate) mod read_lock;
pub(crate) mod readonly_root;
pub(crate) mod shard_writer;
pub(crate) mod tensor_copy;
pub(crate) mod verify_checkpoint;

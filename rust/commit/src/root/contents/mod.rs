//! The contents of a root on disk: names, folders, checkpoints, the registry. Nothing here knows of locks or owners.

pub(crate) mod checkpoint;
pub(crate) mod open_folder;
pub(crate) mod registry_file;
pub(crate) mod root_names;

pub use checkpoint::{CheckpointInfo, Damage};
pub(crate) use checkpoint::{CheckpointKey, Checkpoints, newest};
pub(crate) use open_folder::OpenFolder;

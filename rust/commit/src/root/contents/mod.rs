//! The contents of a root on disk: names, folders, checkpoints, links. Nothing here knows of locks or owners.

pub(crate) mod latest_links;
pub(crate) mod open_folder;
pub(crate) mod root_names;
pub(crate) mod whole_checkpoint;

pub(crate) use open_folder::OpenFolder;
pub use root_names::unfinished_name;
pub use whole_checkpoint::{CheckpointInfo, Damage};
pub(crate) use whole_checkpoint::{CheckpointKey, Checkpoints, newest};

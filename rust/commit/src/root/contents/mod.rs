//! The contents of a root on disk: names, folders, checkpoints, the registry. Nothing here knows of locks or owners.

pub(crate) mod checkpoint;
pub(crate) mod directory;
pub(crate) mod registry;
pub(crate) mod root_names;

pub use checkpoint::{Checkpoint, Damage};
pub(crate) use checkpoint::{Checkpoints, Key, newest};
pub(crate) use directory::Directory;

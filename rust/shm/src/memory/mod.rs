//! Memory files: creates, reserves, maps and locks them, and reads how much memory is left.

pub(crate) mod mapping;
pub(crate) mod memory_file;
pub(crate) mod memory_limits;

//! State of one process, sleep on a word of shared memory, and the end of a process with its parent.

pub(crate) mod futex;
mod per_process;
mod watcher;

pub use per_process::PerProcess;
pub use watcher::{exit_with_parent, without_signals};

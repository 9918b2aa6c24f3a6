//! State of one process, sleep on a word of shared memory, and the end of a process with its parent.

mod exit_with_parent;
pub(crate) mod futex;
mod per_process;

pub use exit_with_parent::{exit_with_parent, without_signals};
pub use per_process::PerProcess;

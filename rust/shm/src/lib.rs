//! Shared memory of one node: segments that processes attach to and use again, the queue of a pool's tasks, and votes.
//!
//! A [`Segment`] is memory without a name (a memfd) or with one. Its first page is a header; its data begin behind it.
//!
//! Invariants:
//!
//! 1. All pages of a segment are reserved before it is used: too little memory is an error when it is made, never a
//!    signal when it is read.
//! 2. Memory safety never rests on a header. Every length is compared with the size of the file, and memory without a
//!    name is sealed against shrinking.
//! 3. As long as a view of a segment lives in any process, that process holds a lease: a shared lock that the kernel
//!    drops with its last reference. A segment is used again only under the exclusive lock.
//! 4. A child made by `fork` reads the segments that it inherited, and recycles none of them.

#![deny(unsafe_code)]

pub mod arena;
pub mod attachment;
mod buffer_receiver;
mod error;
mod futex;
mod header;
mod lease;
pub mod mapping;
mod memory_file;
mod memory_limits;
#[cfg(target_os = "linux")]
pub mod named;
pub mod owner;
mod per_process;
mod private_copy;
mod segment;
mod send_buffer;
#[cfg(target_os = "linux")]
pub mod sweep;
pub mod task_queue;
pub mod votes;
mod watcher;

pub use buffer_receiver::{BufferReceiver, ReceivedBuffer};
pub use error::ShmError;
pub use header::{Facts, LAYOUT_ROOM, is_retired_behind};
pub use lease::Lease;
pub use memory_file::{DATA_START, GoOn};
pub use per_process::PerProcess;
pub use private_copy::PrivateCopy;
pub use segment::{Address, Segment};
pub use send_buffer::{Reference, SendBuffer};
pub use watcher::{exit_with_parent, without_signals};

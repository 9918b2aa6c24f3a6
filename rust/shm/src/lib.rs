//! Shared memory of one node: segments that processes attach to and use again, and the queue of a pool's tasks.
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
mod buffers;
mod error;
mod memory;
mod memory_limits;
pub mod named;
mod process;
mod segment;
pub mod task_queue;

pub use buffers::{BufferReceiver, BufferReference, ReceivedBuffer, SendBuffer};
pub use error::ShmError;
pub use memory::{CheckCancelled, DATA_START};
pub use process::{PerProcess, exit_with_parent, without_signals};
pub use segment::attachment::{self, Lease, PrivateMapping};
pub use segment::header::SegmentHeader;
pub use segment::{Segment, SegmentAddress};

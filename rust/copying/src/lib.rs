//! Copies host memory, through the caches or past them.
//!
//! Which way is faster depends on the reader of the copy. [`copy`] goes past the caches, for bytes that nobody reads
//! soon. [`AdaptiveCopy`] measures which way is the better one to a reader that waits.

#![deny(unsafe_code)]

mod adaptive;
mod background_copy;
mod copy_queue;
#[cfg(target_arch = "x86_64")]
mod streaming;

pub use adaptive::AdaptiveCopy;
pub use background_copy::{BackgroundCopy, WORTH_A_THREAD, copy};
pub use copy_queue::CopyRange;

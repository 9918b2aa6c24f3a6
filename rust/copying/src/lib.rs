//! Copies host memory, through the caches or past them.
//!
//! Which way is faster depends on the reader of the copy. [`copy`] goes past the caches, for bytes that nobody reads
//! soon. [`AdaptiveCopy`] measures which way is the better one to a reader that waits.

#![deny(unsafe_code)]

mod adaptive;
mod copying;
mod pieces;
#[cfg(target_arch = "x86_64")]
mod streaming;

pub use adaptive::AdaptiveCopy;
pub use copying::{Copying, WORTH_A_THREAD, copy};
pub use pieces::Copy;

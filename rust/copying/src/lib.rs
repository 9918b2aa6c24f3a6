//! Copies host memory past the caches, for bytes that are read later or by another processor.

#![deny(unsafe_code)]

mod background_copy;
mod copy_queue;
#[cfg(target_arch = "x86_64")]
mod streaming;

pub use background_copy::{BackgroundCopy, WORTH_A_THREAD, copy};
pub use copy_queue::CopyRange;

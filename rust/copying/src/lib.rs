//! Copies of host memory, through the caches or past them.
//!
//! It owns no memory. Which way is the faster depends on who reads the copy: [`copy`] goes past the caches, for what
//! nobody reads soon; a [`Handover`] finds out which way is the better one to a reader that waits for it.

#![deny(unsafe_code)]

mod copying;
mod handover;
#[cfg(target_arch = "x86_64")]
mod streaming;

pub use copying::{Copy, Copying, WORTH_A_THREAD, copy};
pub use handover::Handover;

//! Segments for processes that can reach them in no other way: not by inheritance, nor through `/proc`, nor by a name.
//!
//! The owner listens on a socket in the abstract namespace of unix(7), whose name travels in the handle. Who asks gets
//! a descriptor (SCM_RIGHTS) with a lease of its own; where it cannot take one, the bytes. Each side makes sure that
//! the other acts for the same user (SO_PEERCRED).

mod client;
mod copied;
mod server;
mod wire;

use std::time::Duration;

pub use client::{Borrowed, borrow};
pub use copied::Copied;
pub use server::socket_name;

/// The longest silence of the other side, in either direction.
const TIMEOUT: Duration = Duration::from_secs(10);

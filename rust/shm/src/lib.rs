//! Shared memory of one node: segments that processes attach to, and their recycling; the board on which a pool finds
//! its tasks, and the box in which processes that agree cast their votes.
//!
//! A [`Segment`] is memory without a name (a memfd) or with one; its first page is a header, its data begin behind it.
//! What always holds:
//!
//! 1. All pages of a segment are there before it is used: running out of memory is an error when it is made, never a
//!    signal when it is read.
//! 2. Memory safety never rests on what a header says. Whoever attaches compares every length with the size of the
//!    file, and what has no name is sealed against shrinking.
//! 3. As long as a view of a segment lives in any process, that process holds a lease: a shared lock which the kernel
//!    drops with the last reference, however the process ends. A segment is used again only by who gets the exclusive
//!    one.
//! 4. A child made by `fork` never takes its parent's segments for its own: it reads what it inherited, and recycles
//!    nothing of it.

#![deny(unsafe_code)]

pub mod arena;
pub mod board;
mod error;
mod file;
mod futex;
mod header;
mod lease;
#[cfg(target_os = "linux")]
pub mod lend;
pub mod mapping;
mod memory;
#[cfg(target_os = "linux")]
pub mod named;
pub mod owner;
mod pages;
mod parcel;
mod parcels;
mod per_process;
pub mod registry;
mod segment;
#[cfg(target_os = "linux")]
pub mod sweep;
pub mod votes;
pub mod warm;
mod watcher;

pub use error::ShmError;
pub use file::{DATA_START, GoOn};
pub use header::{Facts, LAYOUT_ROOM, is_retired_behind};
pub use lease::Lease;
pub use parcel::{Parcel, Reference};
pub use parcels::{ParcelView, Parcels};
pub use per_process::PerProcess;
pub use segment::{Address, Segment};
pub use watcher::{end_with, without_signals};

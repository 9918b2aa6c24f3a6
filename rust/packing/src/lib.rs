//! Plans of fixed-length token sequences, computed over slices of sample lengths.
//!
//! `request` checks the arguments, `integers` and `ordered_samples` read lengths and orders, `scan` hashes them. `packer`
//! computes a plan, `plan` holds it and looks packs up, `folder` keeps it on disk, `verify` checks it. `mix` orders the
//! packs of several plans by weight. `balance` splits the samples of one training step over ranks and into
//! micro-batches. The crate knows neither Python nor torch.
//!
//! ```
//! use tundish_packing::{Field, NoProgress, PackRequest, Packer};
//!
//! let lengths: [i32; 3] = [3, 5, 2];
//! let request = PackRequest { drop_last: Some(false), ..PackRequest::new(vec![lengths[..].into()], 5) };
//! let plan = Packer::new(request, &mut NoProgress)?.pack(&mut NoProgress)?;
//! // Sample 1 is cut after its second token.
//! assert_eq!(plan.column(Field::Indices).to_i64(), [0, 1, 1, 2]);
//! assert_eq!(plan.column(Field::EndOffset).to_i64(), [2, 2]);
//! # Ok::<(), tundish_packing::PackError>(())
//! ```
//!
//! Invariants:
//! 1. The same inputs give the same plan, for any number of threads and on any processor.
//! 2. Inputs may change during a call, because another thread writes to the array. The result is then an error or a
//!    wrong plan, never an access out of bounds.
//! 3. Working memory beyond inputs and outputs is bounded: a constant, a constant for each thread, one bit a sample
//!    while an order is checked, and one index a sample for an order that is drawn from a seed. `whole` says what more
//!    it takes.
#![deny(unsafe_code)]

// Columns are mapped from files and hashed as they lie in memory.
const _: () = assert!(cfg!(target_endian = "little"), "plan files and fingerprints are little-endian");

pub mod balance;
mod checksums;
pub mod error;
pub mod fingerprint;
pub mod folder;
pub mod integers;
mod memory;
pub mod mix;
pub mod ordered_samples;
mod packer;
pub mod plan;
pub mod progress;
pub mod request;
mod scan;
pub mod shuffle;
mod simd;
mod threads;
pub mod verify;

pub use checksums::ColumnChecks;
pub use error::PackError;
pub use integers::Integers;
pub use packer::{Packer, StreamPacker, StreamPiece, plan_fingerprint};
pub use plan::{Field, Plan};
pub use progress::{NoProgress, Progress};
pub use request::{Mode, Overlong, PackRequest, Remainder};

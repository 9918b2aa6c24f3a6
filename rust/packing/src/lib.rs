//! Plans of fixed-length token sequences, computed over slices of sample lengths.
//!
//! This crate owns the algorithms (`hard`), the random order (`shuffle`), the plan and its folder on
//! disk (`plan`, `folder`, `mapping`), look-ups in it (`lookup`, `sample_index`) and its check (`verify`). It knows
//! neither Python nor torch.
//!
//! What always holds:
//! 1. The same inputs give the same plan, for any number of threads and on any platform.
//! 2. Inputs may change under a running call (another thread writes to the array): the result is
//!    then an error or a wrong plan, never an access out of bounds.
//! 3. Working memory beyond inputs and outputs is bounded: a constant and one more a thread, plus one bit a sample
//!    where an order is given that leaves samples out or is a bad one, plus one index a sample where it is drawn from a
//!    seed.
#![deny(unsafe_code)]

mod array;
mod cell;
mod crew;
pub mod error;
pub mod fingerprint;
pub mod folder;
pub mod hard;
pub mod integers;
pub mod lookup;
pub mod mapping;
mod memory;
mod npy;
mod ordered;
pub mod plan;
mod processor;
mod room;
pub mod sample_index;
pub mod shuffle;
mod sink;
pub mod verify;
pub mod watch;

pub use array::Array;
pub use error::PackError;
pub use integers::Integers;
pub use plan::{Field, Plan};
pub use watch::{Silent, Watch};

//! Binds `tundish-shm`.
//!
//! - `segment`: segments that hold an array, and views of them; `named`: the sweep of segments with a name.
//! - `buffers`: memory that one process writes and another receives, and the arena that keeps it.
//! - `task_queue`: the queue of a pool, and the watcher that ends a worker with its parent.
//!
//! The other files hold what these share, and export no class.
//!
//! Invariants: memory of a buffer that Python has stays where it is as long as the object that exported it. The
//! registry of attachments is used with the GIL held.

pub(crate) mod buffers;
mod claimed_name;
mod descriptor;
pub(crate) mod drop_without_gil;
pub(crate) mod named;
pub(crate) mod plain_values;
pub(crate) mod segment;
pub(crate) mod task_queue;

use tundish_packing::Progress;
use tundish_shm::{SegmentAddress, ShmError};

use crate::long_work::SignalCheck;

/// A segment's address in Python: process, descriptor, identity, generation.
pub(crate) type AddressTuple = (u32, i32, u64, u64);

fn as_tuple(address: &SegmentAddress) -> AddressTuple {
    (address.process, address.descriptor, address.identity, address.generation)
}

fn as_address((process, descriptor, identity, generation): AddressTuple) -> SegmentAddress {
    SegmentAddress { process, descriptor, identity, generation }
}

/// Checks for signals in the middle of long work.
fn check_signals(signals: &mut SignalCheck) -> Result<(), ShmError> {
    signals.tick("share", 0, 0).map_err(|_| ShmError::Interrupted)
}

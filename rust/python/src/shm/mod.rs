//! Binds `tundish-shm`: one file for each kind of thing that Python holds.
//!
//! What always holds: memory that Python has a buffer of stays where it is as long as the object that exported it; what
//! touches the registry of attachments does so with the GIL held.

pub(crate) mod arena;
pub(crate) mod board;
pub(crate) mod content;
mod descriptor;
pub(crate) mod named;
mod own_name;
pub(crate) mod reach;
pub(crate) mod segment;
pub(crate) mod unheld;
pub(crate) mod votes;

use tundish_packing::Progress;
use tundish_shm::{Address, ShmError};

use crate::enter::Door;

/// A segment's address as Python has it: process, descriptor, identity, generation.
pub(crate) type AddressTuple = (u32, i32, u64, u64);

fn as_tuple(address: &Address) -> AddressTuple {
    (address.process, address.descriptor, address.identity, address.generation)
}

fn as_address((process, descriptor, identity, generation): AddressTuple) -> Address {
    Address { process, descriptor, identity, generation }
}

/// Looks for signals in the middle of long work.
fn look(door: &mut Door) -> Result<(), ShmError> {
    door.tick("share", 0, 0).map_err(|_| ShmError::Interrupted)
}

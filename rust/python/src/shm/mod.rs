//! Binds `tundish-shm`.
//!
//! - `segment`: segments that hold an array, views of them, and the sweep of those with a name.
//! - `buffers`: memory that one process writes and another receives, and the arena that keeps it.
//! - `task_queue`: the queue of a pool, and the watcher that ends a worker with its parent.
//!
//! Invariants: memory of a buffer that Python has stays where it is as long as the object that exported it. The
//! registry of attachments is used with the GIL held. Memory is freed without it: that takes milliseconds a gigabyte.
#![allow(unsafe_code)]

pub(crate) mod buffers;
pub(crate) mod segment;
pub(crate) mod task_queue;

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};

use tundish_packing::Progress;
use tundish_shm::{SegmentAddress, ShmError};

use crate::long_work::SignalCheck;
use crate::with_gil::with_gil;

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

/// A value of Python's that is dropped without the GIL.
pub(crate) struct DropWithoutGil<T: Send>(ManuallyDrop<T>);

impl<T: Send> DropWithoutGil<T> {
    pub(crate) fn new(value: T) -> Self {
        DropWithoutGil(ManuallyDrop::new(value))
    }
}

impl<T: Send> Deref for DropWithoutGil<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Send> DerefMut for DropWithoutGil<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: Send> Drop for DropWithoutGil<T> {
    fn drop(&mut self) {
        // SAFETY: taken once, and not used again.
        let value = unsafe { ManuallyDrop::take(&mut self.0) };
        if let Err(without) = with_gil(move |py| py.detach(move || drop(value))) {
            drop(without);
        }
    }
}

//! Values that are dropped without the GIL: freeing memory takes milliseconds a gigabyte.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};

use crate::with_gil::with_gil;

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

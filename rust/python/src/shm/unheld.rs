//! Values that are dropped without the GIL: to give memory back takes milliseconds a gigabyte.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};

use crate::held::held;

/// A value of Python's that is dropped without the GIL.
pub(crate) struct Unheld<T: Send>(ManuallyDrop<T>);

impl<T: Send> Unheld<T> {
    pub(crate) fn new(value: T) -> Self {
        Unheld(ManuallyDrop::new(value))
    }
}

impl<T: Send> Deref for Unheld<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Send> DerefMut for Unheld<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T: Send> Drop for Unheld<T> {
    fn drop(&mut self) {
        // SAFETY: taken once, and nobody looks at it again.
        let value = unsafe { ManuallyDrop::take(&mut self.0) };
        if let Err(without) = held(move |py| py.detach(move || drop(value))) {
            drop(without);
        }
    }
}

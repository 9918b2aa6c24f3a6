//! Keeps Python's garbage collector away from handles, which hold nothing that leads back to them.
//!
//! Invariant: the collector is as it was before when a `Pause` ends.
#![allow(unsafe_code)]

use pyo3::ffi;
use pyo3::prelude::*;

use super::handle::RTensor;

/// As long as this lives, making objects has the collector look for none. To be dropped before the GIL is let go of.
pub(super) struct Pause {
    was_enabled: bool,
}

impl Pause {
    pub(super) fn new(_: Python<'_>) -> Self {
        // SAFETY: the GIL is held.
        Pause { was_enabled: unsafe { ffi::PyGC_Disable() } == 1 }
    }
}

impl Drop for Pause {
    fn drop(&mut self) {
        if self.was_enabled {
            // SAFETY: the GIL is held, as where this was made.
            unsafe { ffi::PyGC_Enable() };
        }
    }
}

/// A handle as Python has it, which the collector never looks at.
pub(super) fn untracked(py: Python<'_>, handle: RTensor) -> PyResult<Bound<'_, RTensor>> {
    let made = Bound::new(py, handle)?;
    // SAFETY: it is an object of a type that is collected, as all that PyO3 makes, and is whole.
    unsafe { ffi::PyObject_GC_UnTrack(made.as_ptr().cast()) };
    Ok(made)
}

//! Takes the GIL in code that another library calls, at any time and in any thread.
//!
//! Invariant: Python is asked for the GIL. PyO3 counts its own calls instead, and would take the GIL for held where
//! torch releases it while it frees a tensor.
#![allow(unsafe_code)]

use pyo3::ffi;
use pyo3::prelude::*;

struct GilGuard(ffi::PyGILState_STATE);

impl Drop for GilGuard {
    fn drop(&mut self) {
        // SAFETY: it was taken in this thread, and every one taken since was released.
        unsafe { ffi::PyGILState_Release(self.0) };
    }
}

/// Whether the interpreter has ended or is ending.
pub(crate) fn is_over() -> bool {
    // SAFETY: may be called at any time.
    unsafe { ffi::Py_IsInitialized() == 0 }
}

/// Make `call` with the GIL and return its result; return the call itself if the interpreter has ended.
pub(crate) fn with_gil<T, F: FnOnce(Python<'_>) -> T>(call: F) -> Result<T, F> {
    if is_over() {
        return Err(call);
    }
    // SAFETY: there is an interpreter.
    let _guard = GilGuard(unsafe { ffi::PyGILState_Ensure() });
    Ok(Python::attach(call))
}

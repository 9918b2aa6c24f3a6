//! The GIL, for anyone who is called by another library's code, at any time and in any thread.
//!
//! What always holds: it is asked of Python. PyO3 counts its own calls instead, and takes the GIL for held in the
//! middle of one of them, though torch gives it up while it frees a tensor.
#![allow(unsafe_code)]

use pyo3::ffi;
use pyo3::prelude::*;

struct Held(ffi::PyGILState_STATE);

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: it was got in this thread, and all that was got since has been given back.
        unsafe { ffi::PyGILState_Release(self.0) };
    }
}

/// Whether there is no interpreter any more, or it is at its end.
pub(crate) fn is_over() -> bool {
    // SAFETY: may be asked at any time.
    unsafe { ffi::Py_IsInitialized() == 0 }
}

/// What `call` returns, which is made with the GIL; the call itself where there is no interpreter any more.
pub(crate) fn held<T, F: FnOnce(Python<'_>) -> T>(call: F) -> Result<T, F> {
    if is_over() {
        return Err(call);
    }
    // SAFETY: there is an interpreter.
    let _held = Held(unsafe { ffi::PyGILState_Ensure() });
    Ok(Python::attach(call))
}

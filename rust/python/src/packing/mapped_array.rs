//! Mapped columns as numpy arrays.
//!
//! Invariants: an array keeps its map alive. No array can be made writable: numpy sees a read-only buffer.
#![allow(unsafe_code)]

use std::ffi::c_int;

use numpy::PyArray1;
use pyo3::ffi;
use pyo3::prelude::*;
use tundish_packing::folder::MappedColumn;

/// The owner of a map; numpy reads it through the buffer protocol.
#[pyclass(frozen)]
struct MappedBuffer {
    column: MappedColumn,
}

#[pymethods]
impl MappedBuffer {
    /// # Safety
    /// Called by Python alone, with a `view` to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let (data, len) = slf.get().column.bytes();
        // SAFETY: `view` is Python's; the bytes are mapped as long as `slf` lives, of which the view takes a
        // reference; and it is told that they are read-only.
        let filled =
            unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), data.cast_mut().cast(), len.cast_signed(), 1, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// The values of a column, without a copy.
pub(super) fn as_numpy(py: Python<'_>, column: MappedColumn) -> PyResult<Bound<'_, PyAny>> {
    let wide = column.is_wide();
    if column.bytes().1 == 0 {
        // Versions of numpy read an empty buffer in different ways.
        return Ok(if wide {
            PyArray1::<i64>::from_vec(py, Vec::new()).into_any()
        } else {
            PyArray1::<i32>::from_vec(py, Vec::new()).into_any()
        });
    }
    let buffer = Bound::new(py, MappedBuffer { column })?;
    py.import("numpy")?.call_method1("frombuffer", (buffer, if wide { "<i8" } else { "<i4" }))
}

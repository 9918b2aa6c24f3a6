//! [`FileImage`] and the statistics of staging memory.
//!
//! Invariant: the memory of an image lives as long as Python or a writer uses it.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMemoryView, PySequence};
use tundish_commit::staging;

use super::tensor_copy::TensorCopy;
use crate::long_work::enter;
use crate::tensor_inspector::TensorInspector;

/// `size` bytes of page-aligned memory with the bytes of one file, laid out as on the disk.
///
/// It exports a writable buffer with undefined initial bytes. When Python and all writers have released the image, its
/// memory is kept for the next one. In a child made by `fork` it reads as zeros.
#[pyclass(frozen)]
pub(crate) struct FileImage {
    pub(super) image: Arc<staging::FileImage>,
}

#[pymethods]
impl FileImage {
    #[new]
    fn new(py: Python<'_>, size: usize) -> PyResult<Self> {
        // Cached memory that does not fit is returned to the system first, which takes milliseconds a gigabyte.
        enter(py, None, |_| Ok(Self { image: Arc::new(staging::FileImage::new(size)?) }))
    }

    /// Bytes.
    #[getter]
    fn size(&self) -> usize {
        self.image.size()
    }

    /// The address of the first byte; page-aligned unless the size is 0.
    #[getter]
    fn address(&self) -> usize {
        self.image.as_ptr().addr()
    }

    /// Allocate all pages, before a driver faults them one by one. Changes no byte.
    fn populate(&self, py: Python<'_>) {
        py.detach(|| self.image.populate());
    }

    /// Begin to copy `tensors`, each to its place, on up to `threads` threads. With an `inspector` this is faster.
    ///
    /// `places[i]` is a tuple that begins with the first byte, the end and the dtype of `tensors[i]`, as in
    /// `(0, 4096, torch.float32)`. Places are ascending and disjoint. The copy holds references to the image and the
    /// tensors. Do not change the tensors, or free their storages, before its `finish` or `abort` returns.
    #[pyo3(signature = (places, tensors, threads, inspector=None))]
    fn begin_copy(
        &self,
        places: &Bound<'_, PySequence>,
        tensors: &Bound<'_, PySequence>,
        threads: usize,
        inspector: Option<&TensorInspector>,
    ) -> PyResult<TensorCopy> {
        TensorCopy::begin(&self.image, places, tensors, threads, inspector)
    }

    /// Returns a `memoryview`. Python 3.12 and later have this method built in (PEP 688).
    fn __buffer__<'py>(slf: &Bound<'py, Self>, _flags: c_int) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(slf)
    }

    /// # Safety
    /// Called by Python alone, with a `view` to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let image = &slf.get().image;
        // SAFETY: `view` is Python's; the memory lives and stays where it is as long as `slf`, to which the view holds
        // a reference.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), image.as_ptr().cast(), image.size().cast_signed(), 0, flags)
        };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// Bytes of staging memory of this process: in images, cached for the next ones, and the largest sum of both.
#[pyfunction]
pub(crate) fn staging_stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let stats = staging::staging_stats();
    let dict = PyDict::new(py);
    dict.set_item("in_use", stats.in_use)?;
    dict.set_item("cached", stats.cached)?;
    dict.set_item("peak", stats.peak)?;
    Ok(dict)
}

/// Return cached staging memory to the system; returns its bytes.
#[pyfunction]
pub(crate) fn trim_staging(py: Python<'_>) -> PyResult<usize> {
    enter(py, None, |_| Ok(staging::trim_staging()))
}

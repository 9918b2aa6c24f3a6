//! `ShardView`: fetched memory, and tensors over it.
//!
//! Invariant: as long as a tensor or a buffer over its memory lives, nothing else uses that memory.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::Arc;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyMemoryView};
use tundish_store::{Dtype, FetchedTensor};

use crate::dlpack::{Geometry, TensorExchange};
use crate::shm::DropWithoutGil;

/// Views of fewer bytes are dropped with the GIL held.
const LARGE: u64 = 1 << 20;

/// Keeps the memory alive.
enum ViewedTensor {
    Small(FetchedTensor),
    Large(DropWithoutGil<FetchedTensor>),
}

impl ViewedTensor {
    fn view(&self) -> &FetchedTensor {
        match self {
            ViewedTensor::Small(view) => view,
            ViewedTensor::Large(view) => view,
        }
    }
}

/// The memory of a fetched tensor. Only its holder writes to it.
#[pyclass(frozen)]
pub(crate) struct ShardView {
    kept: Arc<ViewedTensor>,
}

impl ShardView {
    pub(super) fn new(view: FetchedTensor) -> Self {
        let kept = if view.meta().nbytes() < LARGE {
            ViewedTensor::Small(view)
        } else {
            ViewedTensor::Large(DropWithoutGil::new(view))
        };
        ShardView { kept: Arc::new(kept) }
    }
}

#[pymethods]
impl ShardView {
    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.kept.view().meta().nbytes())?)
    }

    /// Returns a `memoryview`. Python 3.12 and later have this method built in (PEP 688).
    fn __buffer__<'py>(slf: &Bound<'py, Self>, _flags: c_int) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(slf)
    }

    /// # Safety
    /// Called by Python alone, with a `view` to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let memory = slf.get().kept.view();
        let length = isize::try_from(memory.meta().nbytes())?;
        // SAFETY: `view` is Python's; the bytes are mapped as long as `slf`, of which the view takes a reference, and
        // are its holder's to write.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), memory.data().cast(), length, 0, flags) };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// A tensor over each view; None for a view without memory, or of a dtype that DLPack does not know.
#[pyfunction]
pub(crate) fn tensors_over<'py>(exchange: &TensorExchange, views: &Bound<'py, PyList>) -> PyResult<Bound<'py, PyList>> {
    let py = views.py();
    let made = PyList::empty(py);
    for view in views.iter() {
        let kept = &view.cast::<ShardView>()?.get().kept;
        let meta = kept.view().meta();
        match code_of(meta.dtype()).filter(|_| meta.nbytes() > 0) {
            Some((code, bits)) => {
                let shape = meta.shape().iter().map(|&length| i64::try_from(length)).collect::<Result<Vec<_>, _>>()?;
                let geometry = Geometry::dense(code, bits, &shape);
                // SAFETY: the memory is the view's, as large as its tensor, and to be written to.
                made.append(unsafe { exchange.over(py, kept.view().data(), geometry, Arc::clone(kept))? })?;
            }
            None => made.append(py.None())?,
        }
    }
    Ok(made)
}

/// The code and the bits of an element type in DLPack, for those that torch takes.
fn code_of(dtype: Dtype) -> Option<(u8, u8)> {
    let bits = u8::try_from(dtype.size() * 8).ok()?;
    let kinds = [("uint", 1), ("int", 0), ("float", 2), ("bfloat", 4), ("complex", 5)];
    match dtype.name() {
        "bool" => Some((6, bits)),
        "complex32" => None,
        name => kinds.into_iter().find_map(|(kind, code)| {
            let said = name.strip_prefix(kind)?.parse::<u8>().ok()?;
            (said == bits).then_some((code, bits))
        }),
    }
}

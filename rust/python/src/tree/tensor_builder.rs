//! Makes tensors over memory that torch does not own.
//!
//! Invariants:
//!
//! 1. A tensor lies within the memory that its keeper keeps, and its storage holds the keeper until it is freed.
//! 2. torch may free a storage in any thread, with the GIL or without.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::Arc;

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::dlpack::{CPU, Device, Dtype, MAJOR_VERSION, Make, Managed, Tensor, Version};
use crate::error::BindingError;
use crate::with_gil::with_gil;

/// Builds the tensors of a batch over its memory, each at its own offset.
#[pyclass(frozen)]
pub(crate) struct TensorBuilder {
    make: Make,
    /// The geometry of each tensor, and the offset of its first byte.
    places: Vec<(Arc<Geometry>, usize)>,
    /// The size that the memory has at least, in bytes.
    end: usize,
}

impl TensorBuilder {
    pub(super) fn new(make: Make, places: Vec<(u8, u8, Vec<i64>, usize)>) -> PyResult<Self> {
        let mut end = 0;
        let places = (places.into_iter().enumerate())
            .map(|(number, (code, bits, shape, start))| {
                let geometry = Geometry::dense(code, bits, &shape);
                let stop = geometry.size().and_then(|size| start.checked_add(size)).ok_or_else(|| {
                    BindingError::Value(format!("tensor {number}, of shape {shape:?}, has no bytes, or too many"))
                })?;
                end = end.max(stop);
                Ok((Arc::new(geometry), start))
            })
            .collect::<Result<Vec<_>, BindingError>>()?;
        Ok(TensorBuilder { make, places, end })
    }
}

#[pymethods]
impl TensorBuilder {
    /// The tensors over `memory`, a writable buffer of bytes. Nothing is copied.
    fn build<'py>(&self, memory: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let py = memory.py();
        let export = PyBuffer::<u8>::get(memory)?;
        if export.readonly() || !export.is_c_contiguous() || export.len_bytes() < self.end {
            let message = format!("the tensors need a writable, contiguous buffer of {} bytes", self.end);
            return Err(BindingError::Value(message).into());
        }
        let data = export.buf_ptr().cast::<u8>();
        let keeper = Arc::new(HeldBuffer(Some(export)));
        let tensors = PyList::empty(py);
        for (geometry, start) in &self.places {
            let (geometry, keeper) = (Arc::clone(geometry), Arc::clone(&keeper));
            // SAFETY: the export keeps the memory, which is long enough; the caller gives each place to one tensor.
            tensors.append(unsafe { over(py, self.make, data.wrapping_add(*start), geometry, keeper)? })?;
        }
        Ok(tensors)
    }
}

/// An exported buffer, which is released with the GIL; never, if the interpreter has ended.
struct HeldBuffer(Option<PyBuffer<u8>>);

impl Drop for HeldBuffer {
    fn drop(&mut self) {
        let export = self.0.take();
        if let Err(without_gil) = with_gil(move |_| drop(export)) {
            std::mem::forget(without_gil);
        }
    }
}

/// Dtype and shape of a dense tensor.
pub(crate) struct Geometry {
    dtype: Dtype,
    /// The shape, then the strides.
    lengths: Box<[i64]>,
}

impl Geometry {
    /// `code` and `bits` are those of DLPack's dtypes.
    pub(crate) fn dense(code: u8, bits: u8, shape: &[i64]) -> Self {
        let mut step = 1_i64;
        let mut strides = vec![0; shape.len()];
        for (stride, &length) in strides.iter_mut().zip(shape).rev() {
            *stride = step;
            step = step.saturating_mul(length);
        }
        Geometry { dtype: Dtype { code, bits, lanes: 1 }, lengths: [shape, &strides].concat().into() }
    }

    fn dimensions(&self) -> usize {
        self.lengths.len() / 2
    }

    /// The size in bytes; None for no bytes, or for more than there can be.
    fn size(&self) -> Option<usize> {
        let (width, shape) = (usize::from(self.dtype.bits / 8), &self.lengths[..self.dimensions()]);
        let size = shape.iter().try_fold(width, |size, &length| size.checked_mul(length.try_into().ok()?))?;
        (size > 0).then_some(size)
    }
}

/// The structure that torch gets, followed by all that the tensor keeps alive.
#[repr(C)]
struct Owned<K> {
    managed: Managed,
    _keeper: K,
    _geometry: Arc<Geometry>,
}

/// A tensor over the memory that begins at `data`, which `keeper` keeps.
///
/// # Safety
/// As long as the keeper lives the memory is there, as large as the tensor, and only users of the tensor use it.
pub(super) unsafe fn over<K: Send + 'static>(
    py: Python<'_>,
    make: Make,
    data: *mut u8,
    geometry: impl Into<Arc<Geometry>>,
    keeper: K,
) -> PyResult<Bound<'_, PyAny>> {
    let geometry = geometry.into();
    let dimensions = geometry.dimensions();
    let tensor = Tensor {
        data: data.cast(),
        device: Device { kind: CPU, number: 0 },
        dimensions: dimensions as i32,
        dtype: geometry.dtype,
        shape: geometry.lengths.as_ptr(),
        strides: geometry.lengths[dimensions..].as_ptr(),
        byte_offset: 0,
    };
    let managed = Managed {
        version: Version { major: MAJOR_VERSION, minor: 0 },
        context: ptr::null_mut(),
        delete: Some(free::<K>),
        flags: 0,
        tensor,
    };
    let owned = Box::into_raw(Box::new(Owned { managed, _keeper: keeper, _geometry: geometry }));
    let mut object = ptr::null_mut();
    // SAFETY: the structure is complete, and torch's from here on: it calls `delete` when it frees the storage. If
    // torch fails, how much of it is used is unknown, and it is never freed.
    if unsafe { make(owned.cast(), &raw mut object) } != 0 {
        return Err(PyErr::fetch(py));
    }
    // SAFETY: torch returned a new reference.
    unsafe { Bound::from_owned_ptr_or_err(py, object.cast()) }
}

/// # Safety
/// Called by torch alone, once for each structure that `over` made with this `K`.
unsafe extern "C" fn free<K>(managed: *mut Managed) {
    // SAFETY: it is the beginning of what `over` boxed, and nothing uses it any more.
    drop(unsafe { Box::from_raw(managed.cast::<Owned<K>>()) });
}

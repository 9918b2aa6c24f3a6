//! Tensors that torch makes over memory that is not its own.
//!
//! What always holds: each has a storage of its own, which keeps the memory, or an export of it, until it is gone
//! itself; it lies within that memory.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::Arc;
use std::{mem, ptr};

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::dlpack::{CPU, Device, Dtype, MAJOR_VERSION, Make, Managed, Tensor, Version};
use crate::error::BindingError;
use crate::held::held;

/// Where the tensors of a batch lie in its memory.
#[pyclass(frozen)]
pub(crate) struct TensorPlan {
    make: Make,
    places: Arc<[Place]>,
    /// Bytes that the memory has at least.
    end: usize,
}

struct Place {
    dtype: Dtype,
    shape: Vec<i64>,
    strides: Vec<i64>,
    start: usize,
}

/// What a tensor keeps: the memory, and what torch was told of its geometry.
struct Loan {
    _export: PyBuffer<u8>,
    places: Arc<[Place]>,
}

impl TensorPlan {
    pub(super) fn new(make: Make, places: Vec<(u8, u8, Vec<i64>, usize)>) -> PyResult<Self> {
        let mut end = 0;
        let places = (places.into_iter().enumerate())
            .map(|(number, (code, bits, shape, start))| {
                let place = Place { dtype: Dtype { code, bits, lanes: 1 }, strides: dense(&shape), shape, start };
                let stop = place.size().and_then(|size| start.checked_add(size)).ok_or_else(|| {
                    BindingError::Value(format!("place {number}, of shape {:?}, is none", place.shape))
                })?;
                end = end.max(stop);
                Ok(place)
            })
            .collect::<Result<Vec<_>, BindingError>>()?;
        Ok(TensorPlan { make, places: places.into(), end })
    }
}

#[pymethods]
impl TensorPlan {
    /// The tensors over `memory`, a writable buffer of bytes. Nothing is copied.
    fn tensors<'py>(&self, memory: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let py = memory.py();
        let export = PyBuffer::<u8>::get(memory)?;
        if export.readonly() || !export.is_c_contiguous() || export.len_bytes() < self.end {
            let message = format!("the tensors take {} bytes that can be written to, one after the other", self.end);
            return Err(BindingError::Value(message).into());
        }
        let data = export.buf_ptr().cast::<u8>();
        let loan = Arc::new(Loan { _export: export, places: Arc::clone(&self.places) });
        let tensors = PyList::empty(py);
        for number in 0..self.places.len() {
            let managed = Box::into_raw(loaned(&loan, number, data));
            // SAFETY: made just now.
            tensors.append(unsafe { hand_over(py, self.make, managed)? })?;
        }
        Ok(tensors)
    }
}

impl Place {
    /// Bytes; None where there are none, or more than there can be.
    fn size(&self) -> Option<usize> {
        let width = usize::from(self.dtype.bits / 8);
        let size = self.shape.iter().try_fold(width, |size, &length| size.checked_mul(length.try_into().ok()?))?;
        (size > 0).then_some(size)
    }
}

/// Dtype and shape of a dense tensor.
pub(crate) struct Geometry {
    dtype: Dtype,
    /// As many strides behind the lengths.
    lengths: Box<[i64]>,
}

impl Geometry {
    /// By DLPack's code of the dtype.
    pub(crate) fn dense(code: u8, bits: u8, shape: &[i64]) -> Self {
        Geometry { dtype: Dtype { code, bits, lanes: 1 }, lengths: [shape, &dense(shape)].concat().into() }
    }
}

/// A tensor that torch gets, with what keeps its memory.
#[repr(C)]
struct Handed<K> {
    managed: Managed,
    _keeper: K,
    _lengths: Box<[i64]>,
}

/// A tensor of its own over memory that begins at `data`, which `keeper` keeps.
///
/// # Safety
/// As long as the keeper lives the memory is there, as large as the tensor, and only those who have the tensor use it.
pub(super) unsafe fn over<'py, K: Send + 'static>(
    py: Python<'py>,
    make: Make,
    data: *mut u8,
    geometry: Geometry,
    keeper: K,
) -> PyResult<Bound<'py, PyAny>> {
    let Geometry { dtype, lengths } = geometry;
    let dimensions = lengths.len() / 2;
    let tensor = Tensor {
        data: data.cast(),
        device: Device { kind: CPU, number: 0 },
        dimensions: dimensions as i32,
        dtype,
        shape: lengths.as_ptr(),
        strides: lengths[dimensions..].as_ptr(),
        byte_offset: 0,
    };
    let managed = Managed {
        version: Version { major: MAJOR_VERSION, minor: 0 },
        context: ptr::null_mut(),
        delete: Some(let_go::<K>),
        flags: 0,
        tensor,
    };
    let handed = Box::into_raw(Box::new(Handed { managed, _keeper: keeper, _lengths: lengths }));
    // SAFETY: it is whole and begins with what torch knows.
    unsafe { hand_over(py, make, handed.cast()) }
}

/// # Safety
/// As of `give_back`, for what `over` made.
unsafe extern "C" fn let_go<K>(managed: *mut Managed) {
    // SAFETY: it is the beginning of what `over` made, and nobody uses it any more.
    drop(unsafe { Box::from_raw(managed.cast::<Handed<K>>()) });
}

/// # Safety
/// `managed` is whole, and torch's from here on: it calls its `delete` once it is done with the memory.
unsafe fn hand_over(py: Python<'_>, make: Make, managed: *mut Managed) -> PyResult<Bound<'_, PyAny>> {
    let mut object = ptr::null_mut();
    // SAFETY: the caller's promise. Where it fails nobody knows how far it came, and the loan goes on for ever.
    if unsafe { make(managed, &raw mut object) } != 0 {
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a new reference.
    unsafe { Bound::from_owned_ptr_or_err(py, object.cast()) }
}

fn dense(shape: &[i64]) -> Vec<i64> {
    let mut step = 1_i64;
    let mut strides = vec![0; shape.len()];
    for (stride, &length) in strides.iter_mut().zip(shape).rev() {
        *stride = step;
        step = step.saturating_mul(length);
    }
    strides
}

/// The tensor of this number, over memory that begins at `data`.
fn loaned(loan: &Arc<Loan>, number: usize, data: *mut u8) -> Box<Managed> {
    let place = &loan.places[number];
    Box::new(Managed {
        version: Version { major: MAJOR_VERSION, minor: 0 },
        context: Arc::into_raw(Arc::clone(loan)).cast_mut().cast::<c_void>(),
        delete: Some(give_back),
        flags: 0,
        tensor: Tensor {
            data: data.wrapping_add(place.start).cast(),
            device: Device { kind: CPU, number: 0 },
            dimensions: place.shape.len() as i32,
            dtype: place.dtype,
            shape: place.shape.as_ptr(),
            strides: place.strides.as_ptr(),
            byte_offset: 0,
        },
    })
}

/// # Safety
/// Called by torch alone, once for each tensor that it got; in whatever thread lets go of it, with the GIL or without.
unsafe extern "C" fn give_back(managed: *mut Managed) {
    // SAFETY: made by `loaned`, and nobody uses it any more.
    let managed = unsafe { Box::from_raw(managed) };
    // SAFETY: the reference that was put there.
    let loan = unsafe { Arc::from_raw(managed.context.cast_const().cast::<Loan>()) };
    // The last one ends the export, with the GIL; unless the interpreter is at its end: then the memory stays.
    if let Some(last) = Arc::into_inner(loan)
        && let Err(without) = held(move |_| drop(last))
    {
        mem::forget(without);
    }
}

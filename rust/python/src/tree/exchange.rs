//! What torch says of its tensors by the functions that it has for other libraries: DLPack's exchange API, which torch
//! has from 2.10 on.
//!
//! What always holds: those functions, and those behind the type's own attributes, are called with the GIL held, and
//! with objects of exactly the type that they were found at; what is read through a pointer of theirs is read before
//! anything else happens.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ptr;

use pyo3::ffi::{self, PyTypeObject};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyCapsule, PyList, PyType};

use super::dlpack::{ATTRIBUTE, CAPSULE, CPU, Dtype, Functions, MAJOR_VERSION, Make, Read, Tensor};
use super::loans::{self, Geometry, TensorPlan};
use super::spans::none_overlap;

/// The functions of torch's own type of tensors.
#[pyclass(frozen)]
pub(crate) struct TensorExchange {
    kind: Py<PyType>,
    /// What is behind the type's attributes of these names: to look them up takes longer than to call them.
    requires_grad: ffi::getter,
    is_neg: ffi::PyCFunction,
    read: Read,
    make: Make,
}

/// Dtypes and shapes of tensors, and their addresses where all are in host memory, else none.
type Facts<'py> = (Bound<'py, PyBytes>, Bound<'py, PyBytes>);

#[pymethods]
impl TensorExchange {
    /// Those of the type `kind`; None where it has none, or none that are known here.
    #[staticmethod]
    fn of(kind: &Bound<'_, PyType>) -> Option<Self> {
        let functions = functions_of(kind)?;
        Some(TensorExchange {
            kind: kind.clone().unbind(),
            requires_grad: getter_of(kind, c"requires_grad")?,
            is_neg: method_of(kind, c"is_neg")?,
            read: functions.read?,
            make: functions.make?,
        })
    }

    /// Dtypes and shapes of `tensors`, as `tundish.tree.layout` reads them, and their addresses, as native 64-bit
    /// integers, or nothing where not all are in host memory; None unless all are of the type, have memory and no
    /// gradient, are dense and not negated lazily, and no two have a byte in common.
    ///
    /// Whether complex values are conjugated lazily is not told.
    fn read<'py>(&self, tensors: &Bound<'py, PyList>) -> PyResult<Option<Facts<'py>>> {
        let py = tensors.py();
        let kind = self.kind.as_ptr().cast::<PyTypeObject>();
        let mut said = Said::default();
        let mut pieces = Vec::with_capacity(tensors.len());
        let mut are_near = true;
        for tensor in tensors.iter() {
            if tensor.get_type_ptr() != kind || self.is_more_than_values(&tensor)? {
                return Ok(None);
            }
            let mut out = MaybeUninit::<Tensor>::uninit();
            // SAFETY: the object is of the type whose function it is, and alive; `out` has room.
            if unsafe { (self.read)(tensor.as_ptr().cast(), out.as_mut_ptr()) } != 0 {
                // Of one without memory, or of a dtype or on a device that DLPack does not know.
                drop(PyErr::take(py));
                return Ok(None);
            }
            // SAFETY: it said that it filled in all of it.
            let out = unsafe { out.assume_init() };
            let Some(piece) = out.piece().filter(|_| said.add(&out)) else { return Ok(None) };
            are_near &= out.device.kind == CPU;
            pieces.push(piece);
        }
        let addresses: Vec<_> = pieces.iter().map(|(address, _)| address.to_ne_bytes()).filter(|_| are_near).collect();
        if !none_overlap(&mut pieces) {
            return Ok(None);
        }
        let words: Vec<_> = said.words.into_iter().map(u64::to_ne_bytes).collect();
        Ok(Some((PyBytes::new(py, words.as_flattened()), PyBytes::new(py, addresses.as_flattened()))))
    }

    /// Where tensors are to lie in memory of the host: for each, its dtype's code and bits, its shape, and its first
    /// byte.
    fn plan(&self, places: Vec<(u8, u8, Vec<i64>, usize)>) -> PyResult<TensorPlan> {
        TensorPlan::new(self.make, places)
    }
}

impl TensorExchange {
    /// A tensor over memory that begins at `data`, which `keeper` keeps.
    ///
    /// # Safety
    /// As long as the keeper lives the memory is there, as large as the tensor, and only those who have the tensor use
    /// it.
    pub(crate) unsafe fn over<'py, K: Send + 'static>(
        &self,
        py: Python<'py>,
        data: *mut u8,
        geometry: Geometry,
        keeper: K,
    ) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: the caller's promise.
        unsafe { loans::over(py, self.make, data, geometry, keeper) }
    }

    /// What the exchange API does not tell.
    fn is_more_than_values(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let is_false = |answer: *mut ffi::PyObject| {
            // SAFETY: what a function of Python's returned: a reference, or null where it raised.
            let answer = unsafe { Bound::from_owned_ptr_or_err(tensor.py(), answer)? };
            Ok::<_, PyErr>(answer.is(PyBool::new(tensor.py(), false)))
        };
        // SAFETY: called as Python does, with an object of their type: neither has a closure or takes an argument.
        unsafe {
            Ok(!is_false((self.requires_grad)(tensor.as_ptr(), ptr::null_mut()))?
                || !is_false((self.is_neg)(tensor.as_ptr(), ptr::null_mut()))?)
        }
    }
}

/// The exchange API of the type `kind`; None where it has none, or none that is known here.
pub(crate) fn functions_of(kind: &Bound<'_, PyType>) -> Option<&'static Functions> {
    let found = kind.getattr(ATTRIBUTE).ok()?;
    let capsule = found.cast::<PyCapsule>().ok()?;
    let functions = capsule.pointer_checked(Some(CAPSULE)).ok()?.cast::<Functions>();
    // SAFETY: what a capsule of this name has begins with a version in all versions, and lasts as long as the process.
    if unsafe { (&raw const (*functions.as_ptr()).version).read() }.major != MAJOR_VERSION {
        return None;
    }
    // SAFETY: it is of the version that is written down here.
    Some(unsafe { functions.as_ref() })
}

/// The type whose own attribute of this name, of the kind `descriptor`, the type `kind` has.
fn home_of<'py>(kind: &Bound<'py, PyType>, name: &CStr, descriptor: &str) -> Option<Bound<'py, PyType>> {
    let found = kind.getattr(name.to_str().ok()?).ok()?;
    let is_such = found.get_type().name().is_ok_and(|name| name == descriptor);
    found.getattr("__objclass__").ok()?.cast_into().ok().filter(|_| is_such)
}

/// What reads the attribute of this name; None where that is not compiled, or has a closure.
fn getter_of(kind: &Bound<'_, PyType>, name: &CStr) -> Option<ffi::getter> {
    let home = home_of(kind, name, "getset_descriptor")?;
    // SAFETY: the slot of a type is null or an array whose last name is null, and lasts as long as the type, which
    // lasts as long as the one that is made of it.
    unsafe {
        let mut found = ffi::PyType_GetSlot(home.as_type_ptr(), ffi::Py_tp_getset).cast::<ffi::PyGetSetDef>();
        while !found.is_null() && !(*found).name.is_null() {
            if CStr::from_ptr((*found).name) == name {
                return (*found).get.filter(|_| (*found).closure.is_null());
            }
            found = found.add(1);
        }
    }
    None
}

/// The method of this name; None where it is not compiled, or takes arguments.
pub(crate) fn method_of(kind: &Bound<'_, PyType>, name: &CStr) -> Option<ffi::PyCFunction> {
    let home = home_of(kind, name, "method_descriptor")?;
    // SAFETY: as above.
    unsafe {
        let mut found = ffi::PyType_GetSlot(home.as_type_ptr(), ffi::Py_tp_methods).cast::<ffi::PyMethodDef>();
        while !found.is_null() && !(*found).ml_name.is_null() {
            if CStr::from_ptr((*found).ml_name) == name {
                return ((*found).ml_flags == ffi::METH_NOARGS).then(|| (*found).ml_meth.PyCFunction);
            }
            found = found.add(1);
        }
    }
    None
}

impl Tensor {
    /// Address and bytes; None where it has no memory, or its values do not lie in it one after the other, each in
    /// whole bytes.
    pub(crate) fn piece(&self) -> Option<(u64, u64)> {
        let Dtype { bits, lanes: 1, .. } = self.dtype else { return None };
        if !bits.is_multiple_of(8) || self.data.is_null() {
            return None;
        }
        let mut step = 1_i64;
        for (&length, &stride) in self.lengths(self.shape)?.iter().zip(self.lengths(self.strides)?).rev() {
            if length != 1 {
                if stride != step {
                    return None;
                }
                step = step.checked_mul(length)?;
            }
        }
        let size = u64::from(bits / 8).checked_mul(step.try_into().ok()?)?;
        Some(((self.data.addr() as u64).checked_add(self.byte_offset)?, size))
    }

    /// As many numbers as it has dimensions.
    pub(crate) fn lengths(&self, first: *const i64) -> Option<&[i64]> {
        let dimensions = usize::try_from(self.dimensions).ok()?;
        if dimensions == 0 {
            return Some(&[]);
        }
        // SAFETY: shape and strides have as many, and are torch's own as long as nobody changes the tensor.
        (!first.is_null()).then(|| unsafe { std::slice::from_raw_parts(first, dimensions) })
    }
}

/// Dtypes and shapes in words of 64 bits: how many tensors in a row have this one (32 bits), the dtype's code (16) and
/// bits (8), how many dimensions (8); then the dimensions.
#[derive(Default)]
struct Said {
    words: Vec<u64>,
    /// Where that of the last tensor begins.
    last: usize,
}

impl Said {
    /// Whether there are words for it.
    fn add(&mut self, tensor: &Tensor) -> bool {
        let Some(shape) = tensor.lengths(tensor.shape) else { return false };
        let Ok(dimensions) = u8::try_from(shape.len()) else { return false };
        let dtype = &tensor.dtype;
        let head = u64::from(dtype.code) << 16 | u64::from(dtype.bits) << 8 | u64::from(dimensions);
        let shape = shape.iter().map(|length| length.cast_unsigned());
        if let [before, lengths @ ..] = &mut self.words[self.last..]
            && *before & u64::from(u32::MAX) == head
            && lengths.iter().copied().eq(shape.clone())
        {
            if *before >> 32 == u64::from(u32::MAX) {
                return false;
            }
            *before += 1 << 32;
            return true;
        }
        self.last = self.words.len();
        self.words.push(1 << 32 | head);
        self.words.extend(shape);
        true
    }
}

//! What torch says of each of thousands of tensors that are saved, read behind their attributes: to look those up takes
//! longer than to call what is behind them, and where a save has just pushed all out of the caches, each object that is
//! not looked at counts.
//!
//! What always holds: as of `tree::exchange`; no tensor is kept.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ptr;

use pyo3::ffi::{self, PyTypeObject};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyList, PyType};

use crate::tree::dlpack::{COMPLEX, CPU, Dtype, INT, Read, Tensor, UINT};
use crate::tree::exchange::{functions_of, method_of};

/// Functions of torch's own types of tensors.
#[pyclass(frozen)]
pub(crate) struct TensorReader {
    kinds: Vec<Py<PyType>>,
    storage: Py<PyType>,
    read: Read,
    is_neg: ffi::PyCFunction,
    storage_offset: ffi::PyCFunction,
    untyped_storage: ffi::PyCFunction,
    nbytes: ffi::PyCFunction,
}

/// All that decides whether tensors can be saved, whether two of them are one, and what a file says of them: dtypes,
/// shapes, addresses, and how much memory is there. Equal where nothing of that changed.
#[pyclass(frozen, eq)]
#[derive(PartialEq, Eq)]
pub(crate) struct TensorLook {
    words: Vec<u64>,
}

/// A dtype as torch has it, and what it is in the exchange API.
#[derive(Default)]
pub(crate) struct KnownDtypes<'py>(Vec<(Bound<'py, PyAny>, Dtype)>);

#[pymethods]
impl TensorReader {
    /// Those of the types `kinds`, which have all that the first of them has, and of their storages' type; None where
    /// they have none that are known here.
    #[staticmethod]
    fn of(kinds: Vec<Bound<'_, PyType>>, storage: &Bound<'_, PyType>) -> Option<Self> {
        let first = kinds.first()?;
        Some(TensorReader {
            read: functions_of(first)?.read?,
            is_neg: method_of(first, c"is_neg")?,
            storage_offset: method_of(first, c"storage_offset")?,
            untyped_storage: method_of(first, c"untyped_storage")?,
            nbytes: method_of(storage, c"nbytes")?,
            storage: storage.clone().unbind(),
            kinds: kinds.into_iter().map(Bound::unbind).collect(),
        })
    }

    /// What there is to see of `tensors`; None unless all are of these types and dense, and have memory.
    fn look(&self, tensors: &Bound<'_, PyList>) -> PyResult<Option<TensorLook>> {
        let py = tensors.py();
        let mut words = Vec::with_capacity(8 * tensors.len());
        for tensor in tensors.iter() {
            let Some(seen) = self.read(&tensor) else { return Ok(None) };
            let (Some((address, _)), Some(shape)) = (seen.piece(), seen.lengths(seen.shape)) else { return Ok(None) };
            let Dtype { code, bits, lanes } = seen.dtype;
            words.push(u64::from(code) << 24 | u64::from(bits) << 16 | u64::from(lanes));
            if is_ambiguous(seen.dtype) {
                // As long as torch is there, so is each of its dtypes.
                words.push(tensor.getattr(intern!(py, "dtype"))?.as_ptr().addr() as u64);
            }
            words.push(
                u64::from(seen.device.kind.cast_unsigned()) << 32 | u64::from(seen.device.number.cast_unsigned()),
            );
            words.push(address);
            words.push(shape.len() as u64);
            words.extend(shape.iter().map(|length| length.cast_unsigned()));
            // SAFETY: `read` found it to be of their type; neither takes an argument.
            let (offset, storage) =
                unsafe { (called(self.storage_offset, &tensor)?, called(self.untyped_storage, &tensor)?) };
            if storage.get_type_ptr() != self.storage.bind(py).as_type_ptr() {
                return Ok(None);
            }
            words.push(offset.extract()?);
            // SAFETY: it is of the type whose function it is, which takes no argument.
            words.push(unsafe { called(self.nbytes, &storage)? }.extract()?);
        }
        Ok(Some(TensorLook { words }))
    }
}

impl TensorReader {
    /// Address and bytes of the values of `tensor`, where they lie in host memory one after the other, as they are and
    /// as `dtype`; None where this cannot tell.
    pub(crate) fn plain<'py>(
        &self,
        tensor: &Bound<'py, PyAny>,
        dtype: &Bound<'py, PyAny>,
        known: &mut KnownDtypes<'py>,
    ) -> PyResult<Option<(usize, usize)>> {
        let Some(seen) = self.read(tensor) else { return Ok(None) };
        let Some((address, size)) = seen.piece().filter(|_| seen.device.kind == CPU && seen.dtype.code != COMPLEX)
        else {
            return Ok(None);
        };
        // SAFETY: `read` found it to be of its type; it takes no argument.
        let is_neg = unsafe { called(self.is_neg, tensor)? };
        let is_plain = is_neg.is(PyBool::new(tensor.py(), false)) && known.is(tensor, seen.dtype, dtype)?;
        Ok(is_plain.then_some((usize::try_from(address)?, usize::try_from(size)?)))
    }

    /// Nothing of another type, or where the exchange API has no word for it. Good until the tensor is changed.
    fn read(&self, tensor: &Bound<'_, PyAny>) -> Option<Tensor> {
        let kind = tensor.get_type_ptr();
        if !self.kinds.iter().any(|known| known.as_ptr().cast::<PyTypeObject>() == kind) {
            return None;
        }
        let mut out = MaybeUninit::<Tensor>::uninit();
        // SAFETY: the object is of a type whose function it is, and alive; `out` has room.
        if unsafe { (self.read)(tensor.as_ptr().cast(), out.as_mut_ptr()) } != 0 {
            drop(PyErr::take(tensor.py()));
            return None;
        }
        // SAFETY: it said that it filled in all of it.
        Some(unsafe { out.assume_init() })
    }
}

impl<'py> KnownDtypes<'py> {
    /// Whether a tensor, which the exchange API says to be of `seen`, is of `asked`.
    fn is(&mut self, tensor: &Bound<'py, PyAny>, seen: Dtype, asked: &Bound<'py, PyAny>) -> PyResult<bool> {
        if !is_ambiguous(seen) && self.0.iter().any(|(dtype, known)| *known == seen && dtype.is(asked)) {
            return Ok(true);
        }
        let is_same = tensor.getattr(intern!(tensor.py(), "dtype"))?.is(asked);
        if is_same && !is_ambiguous(seen) {
            self.0.push((asked.clone(), seen));
        }
        Ok(is_same)
    }
}

/// Whether the exchange API says the same of several dtypes: of torch's integers of fewer bits as of those of eight.
fn is_ambiguous(seen: Dtype) -> bool {
    seen.bits == 8 && [INT, UINT].contains(&seen.code)
}

/// What a method without arguments returns.
///
/// # Safety
/// It is one of the object's type.
unsafe fn called<'py>(method: ffi::PyCFunction, object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: called as Python does; it returns a reference, or null where it raised.
    unsafe { Bound::from_owned_ptr_or_err(object.py(), method(object.as_ptr(), ptr::null_mut())) }
}

//! Reads the address, size and dtype of torch tensors through the DLPack exchange API.
//!
//! Calling the functions behind the attributes is several times faster than looking the attributes up, which counts for
//! thousands of small tensors.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ptr;

use pyo3::ffi::{self, PyTypeObject};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyType};

use crate::tree::dlpack::{COMPLEX, CPU, Dtype, INT, Read, Tensor, UINT};
use crate::tree::dlpack_exchange::{functions_of, method_of};

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
}

impl TensorReader {
    /// Address and bytes of the values of `tensor`, where all of them lie in host memory one after the other, as they
    /// are and as `dtype`; None where this cannot tell.
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
        let is_plain = is_neg.is(PyBool::new(tensor.py(), false))
            && known.is(tensor, seen.dtype, dtype)?
            // SAFETY: `read` found it to be of its type.
            && unsafe { self.is_all_there(tensor, u64::from(seen.dtype.bits / 8), size)? };
        Ok(is_plain.then_some((usize::try_from(address)?, usize::try_from(size)?)))
    }

    /// Whether memory is there for all of a dense tensor, of values of so many bytes and of `size` in all.
    ///
    /// # Safety
    /// `read` found it to be of its type.
    unsafe fn is_all_there(&self, tensor: &Bound<'_, PyAny>, itemsize: u64, size: u64) -> PyResult<bool> {
        // SAFETY: the caller's promise.
        let Some(storage) = (unsafe { self.storage_of(tensor)? }) else { return Ok(false) };
        // SAFETY: each is of the type whose function it is, which takes no argument.
        let (offset, held) = unsafe { (called(self.storage_offset, tensor)?, called(self.nbytes, &storage)?) };
        let (offset, held): (u64, u64) = (offset.extract()?, held.extract()?);
        Ok(offset.saturating_mul(itemsize).saturating_add(size) <= held)
    }

    /// Nothing where it is of another type than is known here.
    ///
    /// # Safety
    /// As of `is_all_there`.
    unsafe fn storage_of<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
        // SAFETY: it is of the type whose function it is, which takes no argument.
        let storage = unsafe { called(self.untyped_storage, tensor)? };
        let is_known = storage.get_type_ptr() == self.storage.bind(tensor.py()).as_type_ptr();
        Ok(is_known.then_some(storage))
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

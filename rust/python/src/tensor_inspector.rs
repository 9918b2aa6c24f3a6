//! [`TensorInspector`]: finds the address, size and dtype of torch tensors through the DLPack exchange API.
//!
//! Calling the functions behind the attributes is several times faster than looking the attributes up, which counts for
//! thousands of small tensors.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ptr;

use pyo3::ffi::{self, PyTypeObject};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PySequence, PyType};

use tundish_commit::Checksum;

use crate::dlpack::{COMPLEX, CPU, CUDA, Dtype, INT, Read, Tensor, UINT, functions_of, method_of};

/// Inspects tensors of torch's own types.
#[pyclass(frozen)]
pub(crate) struct TensorInspector {
    kinds: Vec<Py<PyType>>,
    storage: Py<PyType>,
    read: Read,
    is_neg: ffi::PyCFunction,
    storage_offset: ffi::PyCFunction,
    untyped_storage: ffi::PyCFunction,
    nbytes: ffi::PyCFunction,
}

/// A dtype of torch, and its value in the exchange API.
#[derive(Default)]
pub(crate) struct KnownDtypes<'py>(Vec<(Bound<'py, PyAny>, Dtype)>);

#[pymethods]
impl TensorInspector {
    /// The functions of `kinds`, which inherit from the first, and of the type of their storages; None if this torch
    /// has not all of them.
    #[staticmethod]
    fn of(kinds: Vec<Bound<'_, PyType>>, storage: &Bound<'_, PyType>) -> Option<Self> {
        let first = kinds.first()?;
        Some(TensorInspector {
            read: functions_of(first)?.read?,
            is_neg: method_of(first, c"is_neg")?,
            storage_offset: method_of(first, c"storage_offset")?,
            untyped_storage: method_of(first, c"untyped_storage")?,
            nbytes: method_of(storage, c"nbytes")?,
            storage: storage.clone().unbind(),
            kinds: kinds.into_iter().map(Bound::unbind).collect(),
        })
    }

    /// The indices of tensors that are not ordinary: empty, not dense, of another type or device, or with a storage
    /// that ends before them.
    fn unusual(&self, tensors: &Bound<'_, PySequence>) -> PyResult<Vec<usize>> {
        let mut unusual = Vec::new();
        for (number, tensor) in tensors.try_iter()?.enumerate() {
            if !self.is_ordinary(&tensor?)? {
                unusual.push(number);
            }
        }
        Ok(unusual)
    }

    /// The checksum of each tensor's bytes; None if it has more than `most` bytes, or does not lie densely in host
    /// memory. Nothing else may free the memory of a tensor meanwhile.
    fn checksums(&self, tensors: &Bound<'_, PySequence>, most: u64) -> PyResult<Vec<Option<String>>> {
        tensors.try_iter()?.map(|tensor| self.checksum(&tensor?, most)).collect()
    }
}

impl TensorInspector {
    /// Address and size in bytes of a tensor whose values lie densely in host memory as `dtype`; None if this cannot
    /// tell.
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
        // SAFETY: `read` checked the type; the method takes no argument.
        let is_neg = unsafe { called(self.is_neg, tensor)? };
        let is_plain = is_neg.is(PyBool::new(tensor.py(), false))
            && known.is(tensor, seen.dtype, dtype)?
            // SAFETY: `read` checked the type.
            && unsafe { self.is_all_there(tensor, u64::from(seen.dtype.bits / 8), size)? };
        Ok(is_plain.then_some((usize::try_from(address)?, usize::try_from(size)?)))
    }

    fn checksum(&self, tensor: &Bound<'_, PyAny>, most: u64) -> PyResult<Option<String>> {
        let Some(seen) = self.read(tensor).filter(|seen| seen.device.kind == CPU) else { return Ok(None) };
        let Some((address, size)) = seen.piece().filter(|&(_, size)| size <= most) else { return Ok(None) };
        // SAFETY: `read` checked the type.
        if !unsafe { self.is_all_there(tensor, u64::from(seen.dtype.bits / 8), size)? } {
            return Ok(None);
        }
        // SAFETY: the storage holds all of these bytes, and the tensor is alive. Bytes that change meanwhile give another
        // checksum.
        let bytes = unsafe {
            std::slice::from_raw_parts(ptr::with_exposed_provenance(usize::try_from(address)?), usize::try_from(size)?)
        };
        Ok(Some(Checksum::of(bytes).to_string()))
    }

    fn is_ordinary(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Some(seen) = self.read(tensor).filter(|seen| [CPU, CUDA].contains(&seen.device.kind)) else {
            return Ok(false);
        };
        let Some((_, size)) = seen.piece().filter(|&(_, size)| size > 0) else { return Ok(false) };
        // SAFETY: `read` checked the type.
        unsafe { self.is_all_there(tensor, u64::from(seen.dtype.bits / 8), size) }
    }

    /// Whether the storage of a dense tensor contains all of its `size` bytes.
    ///
    /// # Safety
    /// `read` accepted the tensor.
    unsafe fn is_all_there(&self, tensor: &Bound<'_, PyAny>, itemsize: u64, size: u64) -> PyResult<bool> {
        // SAFETY: the caller's promise; the method takes no argument.
        let storage = unsafe { called(self.untyped_storage, tensor)? };
        if storage.get_type_ptr() != self.storage.bind(tensor.py()).as_type_ptr() {
            return Ok(false);
        }
        // SAFETY: each is of the type that has the method, which takes no argument.
        let (offset, held) = unsafe { (called(self.storage_offset, tensor)?, called(self.nbytes, &storage)?) };
        let (offset, held): (u64, u64) = (offset.extract()?, held.extract()?);
        Ok(offset.saturating_mul(itemsize).saturating_add(size) <= held)
    }

    /// Reads a tensor of the known types; None if the exchange API cannot express it. Valid until the tensor is
    /// changed.
    fn read(&self, tensor: &Bound<'_, PyAny>) -> Option<Tensor> {
        let kind = tensor.get_type_ptr();
        if !self.kinds.iter().any(|known| known.as_ptr().cast::<PyTypeObject>() == kind) {
            return None;
        }
        let mut out = MaybeUninit::<Tensor>::uninit();
        // SAFETY: the function belongs to the object's type; the object is alive, and `out` has room.
        if unsafe { (self.read)(tensor.as_ptr().cast(), out.as_mut_ptr()) } != 0 {
            drop(PyErr::take(tensor.py()));
            return None;
        }
        // SAFETY: the function reported success, so it wrote all of it.
        Some(unsafe { out.assume_init() })
    }
}

impl<'py> KnownDtypes<'py> {
    /// Whether a tensor, whose dtype in the exchange API is `seen`, has the dtype `asked`.
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

/// Whether several dtypes have this value in the exchange API: torch's integers of fewer than eight bits do.
fn is_ambiguous(seen: Dtype) -> bool {
    seen.bits == 8 && [INT, UINT].contains(&seen.code)
}

/// Calls a method without arguments.
///
/// # Safety
/// The method belongs to the object's type.
unsafe fn called<'py>(method: ffi::PyCFunction, object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: called as Python does; it returns a reference, or null after an error.
    unsafe { Bound::from_owned_ptr_or_err(object.py(), method(object.as_ptr(), ptr::null_mut())) }
}

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
use pyo3::types::{PyBool, PyDict, PyString, PyTuple, PyType};

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

/// All that decides whether tensors can be saved, whether two of them are one, and what a file says of them: names,
/// dtypes, shapes, addresses, and how much memory is there.
#[pyclass(frozen)]
pub(crate) struct TensorLook {
    names: Py<PyTuple>,
    words: Vec<u64>,
}

#[pymethods]
impl TensorLook {
    #[getter]
    fn names(&self, py: Python<'_>) -> Py<PyTuple> {
        self.names.clone_ref(py)
    }
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

    /// What there is to see of `tensors`; None unless all are of these types and dense, and have memory, and the dict
    /// is none of a type of its own, which may have another order.
    fn look(&self, tensors: &Bound<'_, PyDict>) -> PyResult<Option<TensorLook>> {
        if !tensors.is_exact_instance_of::<PyDict>() {
            return Ok(None);
        }
        let mut words = Vec::with_capacity(8 * tensors.len());
        for tensor in tensors.values() {
            if !self.add_words(&tensor, &mut words)? {
                return Ok(None);
            }
        }
        Ok(Some(TensorLook { names: tensors.keys().to_tuple().unbind(), words }))
    }

    /// Whether `tensors` have the names of those that were looked at, in the same order, and nothing of them changed.
    fn sees(&self, look: &TensorLook, tensors: &Bound<'_, PyDict>) -> PyResult<bool> {
        let py = tensors.py();
        let known = look.names.bind(py);
        let mut names = known.iter_borrowed();
        if names.len() != tensors.len() || !tensors.is_exact_instance_of::<PyDict>() {
            return Ok(false);
        }
        let (mut words, mut seen) = (look.words.as_slice(), Vec::with_capacity(16));
        let (mut at, mut name, mut tensor) = (0, ptr::null_mut(), ptr::null_mut());
        // Names that are the same objects as before are not touched, as they would be by an iterator that holds them.
        // SAFETY: it is a dict. The name is compared, and the tensor held, before anything else happens; a finaliser
        // that runs after that, and changes the dict, may have entries passed over, of which each has to be there.
        while unsafe { ffi::PyDict_Next(tensors.as_ptr(), &raw mut at, &raw mut name, &raw mut tensor) } != 0 {
            let Some(known) = names.next() else { return Ok(false) };
            // SAFETY: both are there.
            let (name, tensor) = unsafe { (Borrowed::from_ptr(py, name), Bound::from_borrowed_ptr(py, tensor)) };
            seen.clear();
            if !is_same_name(known, name) || !self.add_words(&tensor, &mut seen)? || !words.starts_with(&seen) {
                return Ok(false);
            }
            words = &words[seen.len()..];
        }
        Ok(words.is_empty())
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

    /// Adds what there is to see of `tensor`, whose words tell how many they are; false where `look` has none.
    fn add_words(&self, tensor: &Bound<'_, PyAny>, words: &mut Vec<u64>) -> PyResult<bool> {
        let py = tensor.py();
        let Some(seen) = self.read(tensor) else { return Ok(false) };
        let (Some((address, _)), Some(shape)) = (seen.piece(), seen.lengths(seen.shape)) else { return Ok(false) };
        let Dtype { code, bits, lanes } = seen.dtype;
        words.push(u64::from(code) << 24 | u64::from(bits) << 16 | u64::from(lanes));
        if is_ambiguous(seen.dtype) {
            // As long as torch is there, so is each of its dtypes.
            words.push(tensor.getattr(intern!(py, "dtype"))?.as_ptr().addr() as u64);
        }
        words.push(u64::from(seen.device.kind.cast_unsigned()) << 32 | u64::from(seen.device.number.cast_unsigned()));
        words.push(address);
        words.push(shape.len() as u64);
        words.extend(shape.iter().map(|length| length.cast_unsigned()));
        // SAFETY: `read` found it to be of their type; neither takes an argument.
        let (offset, storage) =
            unsafe { (called(self.storage_offset, tensor)?, called(self.untyped_storage, tensor)?) };
        if storage.get_type_ptr() != self.storage.bind(py).as_type_ptr() {
            return Ok(false);
        }
        words.push(offset.extract()?);
        // SAFETY: it is of the type whose function it is, which takes no argument.
        words.push(unsafe { called(self.nbytes, &storage)? }.extract()?);
        Ok(true)
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

/// Whether two names are one object, or strings of the same letters.
fn is_same_name(known: Borrowed<'_, '_, PyAny>, name: Borrowed<'_, '_, PyAny>) -> bool {
    // Strings alone: what another type finds equal, it may find by changing the dict.
    known.is(&*name)
        || (known.is_exact_instance_of::<PyString>()
            && name.is_exact_instance_of::<PyString>()
            && known.eq(&*name).unwrap_or(false))
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

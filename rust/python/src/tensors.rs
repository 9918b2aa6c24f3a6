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
/// dtypes, shapes and addresses. Whether all of a tensor is there, whoever copies it looks, as it may be gone by then.
#[pyclass(frozen)]
pub(crate) struct TensorLook {
    names: Py<PyTuple>,
    words: Vec<u64>,
    /// Of each tensor.
    whereabouts: Vec<Whereabouts>,
}

/// Where what there is to see of a tensor lay when it was looked at: its object, what that stands for, and both of its
/// storage. They say where to look first, and nothing is believed of them: all may be gone.
struct Whereabouts([usize; 4]);

#[pymethods]
impl TensorLook {
    #[getter]
    fn names(&self, py: Python<'_>) -> Py<PyTuple> {
        self.names.clone_ref(py)
    }
}

/// Tensors of which the processor fetches at a time what there is to see: with fewer it waits for memory, and it keeps
/// no more requests than those of a few under way.
const FETCHED_AHEAD: usize = 6;

/// Bytes that every object of Python begins with.
const HEADER: usize = size_of::<ffi::PyObject>();

/// Lines of a cache that torch keeps of a tensor, and of a storage.
const IMPL_LINES: usize = 3;
const STORAGE_LINES: usize = 2;

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
        if !kinds.iter().chain([storage]).all(is_large) {
            return None;
        }
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
        let mut whereabouts = Vec::with_capacity(tensors.len());
        for tensor in tensors.values() {
            if !self.add_words(&tensor, &mut words)? {
                return Ok(None);
            }
            // SAFETY: `add_words` found it to be of a type that is known here.
            let Some(storage) = (unsafe { self.storage_of(&tensor)? }) else { return Ok(None) };
            // SAFETY: as is its storage.
            whereabouts.push(unsafe { Whereabouts::of(&tensor, &storage) });
        }
        Ok(Some(TensorLook { names: tensors.keys().to_tuple().unbind(), words, whereabouts }))
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
        let mut ahead = look.whereabouts.iter();
        ahead.by_ref().take(FETCHED_AHEAD).for_each(Whereabouts::fetch);
        let (mut at, mut name, mut tensor) = (0, ptr::null_mut(), ptr::null_mut());
        // Names that are the same objects as before are not touched, as they would be by an iterator that holds them.
        // SAFETY: it is a dict. The name is compared, and the tensor held, before anything else happens; a finaliser
        // that runs after that, and changes the dict, may have entries passed over, of which each has to be there.
        while unsafe { ffi::PyDict_Next(tensors.as_ptr(), &raw mut at, &raw mut name, &raw mut tensor) } != 0 {
            let Some(known) = names.next() else { return Ok(false) };
            // SAFETY: both are there.
            let (name, tensor) = unsafe { (Borrowed::from_ptr(py, name), Bound::from_borrowed_ptr(py, tensor)) };
            seen.clear();
            if let Some(next) = ahead.next() {
                next.fetch();
            }
            if !is_same_name(known, name) || !self.add_words(&tensor, &mut seen)? || !words.starts_with(&seen) {
                return Ok(false);
            }
            words = &words[seen.len()..];
        }
        Ok(words.is_empty())
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

    /// Adds what there is to see of `tensor`, whose words tell how many they are; false where `look` has none.
    fn add_words(&self, tensor: &Bound<'_, PyAny>, words: &mut Vec<u64>) -> PyResult<bool> {
        let Some(seen) = self.read(tensor) else { return Ok(false) };
        let (Some((address, _)), Some(shape)) = (seen.piece(), seen.lengths(seen.shape)) else { return Ok(false) };
        let Dtype { code, bits, lanes } = seen.dtype;
        words.push(u64::from(code) << 24 | u64::from(bits) << 16 | u64::from(lanes));
        if is_ambiguous(seen.dtype) {
            // As long as torch is there, so is each of its dtypes.
            words.push(tensor.getattr(intern!(tensor.py(), "dtype"))?.as_ptr().addr() as u64);
        }
        words.push(u64::from(seen.device.kind.cast_unsigned()) << 32 | u64::from(seen.device.number.cast_unsigned()));
        words.push(address);
        words.push(shape.len() as u64);
        words.extend(shape.iter().map(|length| length.cast_unsigned()));
        Ok(true)
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

impl Whereabouts {
    /// # Safety
    /// The types of both are known to a reader.
    unsafe fn of(tensor: &Bound<'_, PyAny>, storage: &Bound<'_, PyAny>) -> Self {
        // SAFETY: a reader is made of large ones alone.
        let (its_own, its_memory) = unsafe { (behind(tensor), behind(storage)) };
        Whereabouts([tensor.as_ptr().addr(), its_own, storage.as_ptr().addr(), its_memory])
    }

    /// Has the processor fetch it, while this thread goes on.
    fn fetch(&self) {
        let Whereabouts([tensor, its_own, storage, its_memory]) = *self;
        fetch(tensor, 1);
        fetch(its_own, IMPL_LINES);
        fetch(storage, 1);
        fetch(its_memory, STORAGE_LINES);
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

/// The address of what an object of torch stands for, as far as it is where torch puts it: what comes first in the
/// object, after a flag in older versions.
///
/// # Safety
/// The object's type `is_large`.
unsafe fn behind(object: &Bound<'_, PyAny>) -> usize {
    // SAFETY: the object is alive, and so large; of its bytes any number can be made.
    let [first, second] = unsafe { object.as_ptr().byte_add(HEADER).cast::<[usize; 2]>().read() };
    if first > 1 { first } else { second }
}

/// Whether objects of a type have two words of their own.
fn is_large(kind: &Bound<'_, PyType>) -> bool {
    let size = kind.getattr(intern!(kind.py(), "__basicsize__")).and_then(|size| size.extract::<usize>());
    size.is_ok_and(|size| size >= HEADER + 2 * size_of::<usize>())
}

/// Has the processor fetch so many lines of its cache from `address` on, which need not be there.
fn fetch(address: usize, lines: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in 0..lines {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

        // SAFETY: nothing is read that the program sees, and nothing goes wrong where there is no memory.
        unsafe { _mm_prefetch(ptr::without_provenance::<i8>(address.wrapping_add(64 * line)), _MM_HINT_T0) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (address, lines);
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

//! Reads and makes torch's tensors through DLPack's exchange API, which torch has from 2.10 on.
//!
//! [`TensorExchange`] reads dtypes, shapes and addresses of many tensors at once. [`TensorBuilder`] and [`over`] make
//! tensors over memory that torch does not own. The structures are those of DLPack, version 1.
//!
//! Invariants:
//!
//! 1. The functions of the API and of the type's attributes are called with the GIL, and with objects of exactly the
//!    type that they were found at.
//! 2. Memory behind a pointer that they return is read before any other call.
//! 3. A tensor that is made lies within the memory that its keeper keeps, and its storage holds the keeper until it is
//!    freed.
//! 4. torch may free a storage in any thread, with the GIL or without.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;

use pyo3::buffer::PyBuffer;
use pyo3::ffi::{self, PyTypeObject};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyCapsule, PyList, PyType};

use crate::error::BindingError;
use crate::with_gil::with_gil;

/// The attribute of a tensor type that holds the exchange API, and the name of its capsule.
pub(crate) const ATTRIBUTE: &str = "__dlpack_c_exchange_api__";
pub(crate) const CAPSULE: &CStr = c"dlpack_exchange_api";

/// A library with another version may have other structures.
pub(crate) const MAJOR_VERSION: u32 = 1;

// `DLDataTypeCode`.
pub(crate) const INT: u8 = 0;
pub(crate) const UINT: u8 = 1;
pub(crate) const COMPLEX: u8 = 5;

/// Host memory, and memory of a CUDA device.
pub(crate) const CPU: i32 = 1;
pub(crate) const CUDA: i32 = 2;

/// `DLPackVersion`.
#[repr(C)]
pub(crate) struct Version {
    pub(crate) major: u32,
    pub(crate) minor: u32,
}

/// `DLDevice`.
#[repr(C)]
pub(crate) struct Device {
    pub(crate) kind: i32,
    pub(crate) number: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dtype {
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
pub(crate) struct Tensor {
    pub(crate) data: *mut c_void,
    pub(crate) device: Device,
    pub(crate) dimensions: i32,
    pub(crate) dtype: Dtype,
    pub(crate) shape: *const i64,
    pub(crate) strides: *const i64,
    pub(crate) byte_offset: u64,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
pub(crate) struct Managed {
    pub(crate) version: Version,
    pub(crate) context: *mut c_void,
    pub(crate) delete: Option<unsafe extern "C" fn(*mut Managed)>,
    pub(crate) flags: u64,
    pub(crate) tensor: Tensor,
}

/// Fills in a tensor that is valid until the object changes; returns 0 unless it raised.
pub(crate) type Read = unsafe extern "C" fn(object: *mut c_void, out: *mut Tensor) -> c_int;

/// Makes an object of a tensor, which it takes over; returns 0 unless it raised.
pub(crate) type Make = unsafe extern "C" fn(tensor: *mut Managed, out: *mut *mut c_void) -> c_int;

/// `DLPackExchangeAPI`. Functions that are not called here are plain pointers.
#[repr(C)]
pub(crate) struct Functions {
    pub(crate) version: Version,
    _previous: *const c_void,
    _allocate: *const c_void,
    _export: *const c_void,
    pub(crate) make: Option<Make>,
    pub(crate) read: Option<Read>,
    _current_stream: *const c_void,
}

/// The functions of the type `torch.Tensor`.
#[pyclass(frozen)]
pub(crate) struct TensorExchange {
    kind: Py<PyType>,
    /// The functions of the attributes of these names. A lookup would take longer than the call.
    requires_grad: ffi::getter,
    is_neg: ffi::PyCFunction,
    read: Read,
    make: Make,
}

/// Dtypes and shapes of tensors; their addresses if all are in host memory, else none.
type Description<'py> = (Bound<'py, PyBytes>, Bound<'py, PyBytes>);

#[pymethods]
impl TensorExchange {
    /// The functions of the type `kind`; None if it has none, or those of another version.
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

    /// Dtypes and shapes of `tensors`, as `tundish.tree.layout` reads them, and their addresses as native 64-bit
    /// integers; no addresses unless all are in host memory.
    ///
    /// None unless all tensors are of the type, have memory and no gradient, are dense and not negated lazily, and no
    /// two overlap. Complex values may be conjugated lazily.
    fn read<'py>(&self, tensors: &Bound<'py, PyList>) -> PyResult<Option<Description<'py>>> {
        let py = tensors.py();
        let kind = self.kind.as_ptr().cast::<PyTypeObject>();
        let mut words = LayoutWords::default();
        let mut pieces = Vec::with_capacity(tensors.len());
        let mut are_on_host = true;
        for tensor in tensors.iter() {
            if tensor.get_type_ptr() != kind || self.is_more_than_values(&tensor)? {
                return Ok(None);
            }
            let mut out = MaybeUninit::<Tensor>::uninit();
            // SAFETY: the object is of the type whose function it is, and alive; `out` has room.
            if unsafe { (self.read)(tensor.as_ptr().cast(), out.as_mut_ptr()) } != 0 {
                // It has no memory, or a dtype or device that DLPack lacks.
                drop(PyErr::take(py));
                return Ok(None);
            }
            // SAFETY: the function reported that it filled it in.
            let out = unsafe { out.assume_init() };
            let Some(piece) = out.piece().filter(|_| words.add(&out)) else { return Ok(None) };
            are_on_host &= out.device.kind == CPU;
            pieces.push(piece);
        }
        let addresses: Vec<_> =
            pieces.iter().map(|(address, _)| address.to_ne_bytes()).filter(|_| are_on_host).collect();
        if !none_overlap(&mut pieces) {
            return Ok(None);
        }
        let words: Vec<_> = words.words.into_iter().map(u64::to_ne_bytes).collect();
        Ok(Some((PyBytes::new(py, words.as_flattened()), PyBytes::new(py, addresses.as_flattened()))))
    }

    /// A builder of tensors over host memory; of each, the code and bits of its dtype, its shape, and its first byte.
    fn builder(&self, places: Vec<(u8, u8, Vec<i64>, usize)>) -> PyResult<TensorBuilder> {
        TensorBuilder::new(self.make, places)
    }
}

impl TensorExchange {
    /// A tensor over the memory that begins at `data`, which `keeper` keeps.
    ///
    /// # Safety
    /// As of [`over`].
    pub(crate) unsafe fn over<'py, K: Send + 'static>(
        &self,
        py: Python<'py>,
        data: *mut u8,
        geometry: impl Into<Arc<Geometry>>,
        keeper: K,
    ) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: the caller's promise.
        unsafe { over(py, self.make, data, geometry, keeper) }
    }

    /// Whether it has a gradient or is negated lazily, which the exchange API does not tell.
    fn is_more_than_values(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let is_false = |answer: *mut ffi::PyObject| {
            // SAFETY: a function of Python returned it: a reference, or null where it raised.
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

/// The exchange API of the type `kind`; None if it has none, or one of another version.
pub(crate) fn functions_of(kind: &Bound<'_, PyType>) -> Option<&'static Functions> {
    let found = kind.getattr(ATTRIBUTE).ok()?;
    let capsule = found.cast::<PyCapsule>().ok()?;
    let functions = capsule.pointer_checked(Some(CAPSULE)).ok()?.cast::<Functions>();
    // SAFETY: in all versions the structure begins with its version, and lasts as long as the process.
    if unsafe { (&raw const (*functions.as_ptr()).version).read() }.major != MAJOR_VERSION {
        return None;
    }
    // SAFETY: it has the version that is declared here.
    Some(unsafe { functions.as_ref() })
}

/// The base of `kind` that defines its attribute of this name, which is of the kind `descriptor`.
fn home_of<'py>(kind: &Bound<'py, PyType>, name: &CStr, descriptor: &str) -> Option<Bound<'py, PyType>> {
    let found = kind.getattr(name.to_str().ok()?).ok()?;
    let is_such = found.get_type().name().is_ok_and(|name| name == descriptor);
    found.getattr("__objclass__").ok()?.cast_into().ok().filter(|_| is_such)
}

/// The function that reads the attribute of this name; None if it is not compiled, or has a closure.
fn getter_of(kind: &Bound<'_, PyType>, name: &CStr) -> Option<ffi::getter> {
    let home = home_of(kind, name, "getset_descriptor")?;
    // SAFETY: the slot of a type is null or an array whose last name is null. It lasts as long as the type, which its
    // subclasses keep.
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

/// The function of the method of this name; None if it is not compiled, or takes arguments.
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
    /// Address and size in bytes; None unless it has memory, is contiguous, and each value takes whole bytes.
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

    /// One number for each dimension.
    pub(crate) fn lengths(&self, first: *const i64) -> Option<&[i64]> {
        let dimensions = usize::try_from(self.dimensions).ok()?;
        if dimensions == 0 {
            return Some(&[]);
        }
        // SAFETY: shape and strides have so many, and are torch's own until the tensor changes.
        (!first.is_null()).then(|| unsafe { std::slice::from_raw_parts(first, dimensions) })
    }
}

/// Whether no two pieces of memory, as address and length, overlap. An address that is there twice overlaps, whatever
/// the lengths.
fn none_overlap(pieces: &mut [(u64, u64)]) -> bool {
    pieces.sort_unstable();
    pieces.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[1].0 - pair[0].0 >= pair[0].1)
}

/// Dtypes and shapes in words of 64 bits.
///
/// The first word: how many successive tensors share what follows (32 bits), the dtype's code (16) and bits (8), the
/// number of dimensions (8). A word for each dimension comes behind it.
#[derive(Default)]
struct LayoutWords {
    words: Vec<u64>,
    /// The index of the last tensor's first word.
    last: usize,
}

impl LayoutWords {
    /// Add a tensor. Returns false if it cannot be described.
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
    fn new(make: Make, places: Vec<(u8, u8, Vec<i64>, usize)>) -> PyResult<Self> {
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
unsafe fn over<K: Send + 'static>(
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

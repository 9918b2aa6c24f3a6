//! numpy arrays of integers, read without a copy.
//!
//! Invariants: an `IntegerArray` keeps its numpy array alive, and with it the memory that its view reads.
#![allow(unsafe_code)]

use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use tundish_packing::Integers;
use tundish_packing::integers::IntegerKind;
use tundish_packing::plan::{AsIntegers, PlanView};

use crate::error::BindingError;

/// A one-dimensional numpy array of integers.
pub(super) struct IntegerArray {
    array: Py<PyUntypedArray>,
    data: *const u8,
    len: usize,
    stride: isize,
    kind: IntegerKind,
}

// SAFETY: the pointer is only read through, and the memory belongs to `array`, which is kept.
unsafe impl Send for IntegerArray {}
// SAFETY: as above.
unsafe impl Sync for IntegerArray {}

impl IntegerArray {
    /// # Errors
    /// Another dtype than a native integer of 1 to 8 bytes, or other than one dimension.
    pub(super) fn new(array: &Bound<'_, PyUntypedArray>) -> Result<Self, BindingError> {
        let dtype = array.dtype();
        let kind = match (dtype.kind(), dtype.itemsize()) {
            (b'i', 1) => IntegerKind::I8,
            (b'i', 2) => IntegerKind::I16,
            (b'i', 4) => IntegerKind::I32,
            (b'i', 8) => IntegerKind::I64,
            (b'u', 1) => IntegerKind::U8,
            (b'u', 2) => IntegerKind::U16,
            (b'u', 4) => IntegerKind::U32,
            (b'u', 8) => IntegerKind::U64,
            _ => return Err(BindingError::Type(format!("an array of integers is needed, not of {dtype}"))),
        };
        if dtype.is_native_byteorder() == Some(false) {
            return Err(BindingError::Type(format!("an array in this machine's byte order is needed, not {dtype}")));
        }
        let &[len] = array.shape() else {
            return Err(BindingError::Type(format!("an array of one dimension is needed, not of {}", array.ndim())));
        };
        // SAFETY: `array` is a live array object; reading its data pointer needs no more.
        let data = unsafe { (*array.as_array_ptr()).fields.data }.cast::<u8>().cast_const();
        Ok(Self { data, len, stride: array.strides()[0], kind, array: array.clone().unbind() })
    }

    /// Several arrays.
    pub(super) fn all(arrays: &[Bound<'_, PyUntypedArray>]) -> Result<Vec<Self>, BindingError> {
        arrays.iter().map(Self::new).collect()
    }

    /// The integers.
    pub(super) fn view(&self) -> Integers<'_> {
        let _kept = &self.array;
        // SAFETY: numpy guarantees shape and strides to lie within the array's memory, and the array
        // is kept alive for as long as `self` is borrowed.
        unsafe { Integers::from_raw(self.data, self.len, self.stride, self.kind) }
    }
}

impl AsIntegers for IntegerArray {
    fn as_integers(&self) -> Integers<'_> {
        self.view()
    }
}

/// The plan whose six or eight columns are given.
pub(super) fn view(columns: &[IntegerArray]) -> Result<PlanView<'_>, BindingError> {
    let columns: Vec<Integers<'_>> = columns.iter().map(IntegerArray::view).collect();
    Ok(PlanView::new(&columns)?)
}

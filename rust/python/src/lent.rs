//! Columns that the core has computed, as numpy arrays.
//!
//! What always holds: an array keeps its memory alive, with that of arrays that lie beside it, and alone uses its own.
#![allow(unsafe_code)]

use std::any::Any;

use numpy::ndarray::ArrayView1;
use numpy::{Element, PyArray1};
use pyo3::prelude::*;
use tundish_packing::Array;
use tundish_packing::plan::Column;

/// The values of a column, without a copy.
pub(crate) fn as_numpy(py: Python<'_>, column: Column) -> PyResult<Bound<'_, PyAny>> {
    Ok(match column {
        Column::I32(array) => values(py, array)?.into_any(),
        Column::I64(array) => values(py, array)?.into_any(),
    })
}

/// Keeps the memory of an array of numpy, as its `base`.
#[pyclass(frozen, module = "tundish._native")]
struct Memory {
    _array: Box<dyn Any + Send + Sync>,
}

/// As `as_numpy`, for whoever knows the width.
pub(crate) fn values<T: Element + Sync + 'static>(py: Python<'_>, array: Array<T>) -> PyResult<Bound<'_, PyArray1<T>>> {
    let mut array = Box::new(array);
    // SAFETY: the memory stays where it is when its owner is moved, and nobody else uses it as long as that lives.
    let view = unsafe { ArrayView1::from_shape_ptr(array.len(), array.as_mut_ptr()) };
    let owner = Bound::new(py, Memory { _array: array })?;
    // SAFETY: the owner of the memory is what keeps it.
    Ok(unsafe { PyArray1::borrow_from_array(&view, owner.into_any()) })
}

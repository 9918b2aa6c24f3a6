//! Python lists of integers as arrays.

use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList};

/// The integers of a list as int64, shape (integers,). None if an entry is of another type than `int` itself, as `True`
/// is, or does not fit.
#[pyfunction]
pub(crate) fn integers_of_list<'py>(integers: &Bound<'py, PyList>) -> Option<Bound<'py, PyArray1<i64>>> {
    let mut values = Vec::with_capacity(integers.len());
    for entry in integers {
        if !entry.is_exact_instance_of::<PyInt>() {
            return None;
        }
        values.push(entry.extract().ok()?);
    }
    Some(PyArray1::from_vec(integers.py(), values))
}

//! Saves a plan to a folder, and maps it again.

use std::path::PathBuf;

use numpy::PyUntypedArray;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tundish_packing::folder;

use super::integer_array::{IntegerArray, view};
use super::{from_json, mapped_array, to_json};
use crate::long_work::enter;

/// Write a plan to a folder.
#[pyfunction]
#[pyo3(signature = (columns, metadata, target, progress=None))]
pub(crate) fn save_plan(
    py: Python<'_>,
    columns: Vec<Bound<'_, PyUntypedArray>>,
    metadata: &str,
    target: PathBuf,
    progress: Option<Py<PyAny>>,
) -> PyResult<()> {
    let columns = IntegerArray::all(&columns)?;
    let metadata = from_json(metadata)?;
    enter(py, progress, move |signals| Ok(folder::save(&view(&columns)?, &metadata, &target, signals)?))
}

/// Check a plan folder and map it: the metadata as JSON, and the six or eight columns.
#[pyfunction]
#[pyo3(signature = (path, progress=None))]
pub(crate) fn open_plan<'py>(
    py: Python<'py>,
    path: PathBuf,
    progress: Option<Py<PyAny>>,
) -> PyResult<(String, Bound<'py, PyTuple>)> {
    let (metadata, columns) = enter(py, progress, move |signals| Ok(folder::open(&path, signals)?))?;
    let columns: Vec<_> =
        columns.into_iter().map(|column| mapped_array::as_numpy(py, column)).collect::<PyResult<_>>()?;
    Ok((to_json(&metadata)?, PyTuple::new(py, columns)?))
}

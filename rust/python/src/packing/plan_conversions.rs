//! Verifies a plan, and converts it to Megatron's `sample_index`.

use numpy::{PyArray1, PyArrayMethods, PyUntypedArray};
use pyo3::prelude::*;
use tundish_packing::megatron_sample_index::{PlanInputs, sample_index};
use tundish_packing::plan::Column;
use tundish_packing::{Integers, verify};

use super::integer_array::{IntegerArray, view};
use super::{available_threads, from_json};
use crate::long_work::enter;

/// Check a plan against lengths, and the order and the costs that were given.
#[pyfunction]
#[pyo3(signature = (columns, metadata, lengths, order=None, costs=None, threads=None, progress=None))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn verify_plan(
    py: Python<'_>,
    columns: Vec<Bound<'_, PyUntypedArray>>,
    metadata: &str,
    lengths: Vec<Bound<'_, PyUntypedArray>>,
    order: Option<Bound<'_, PyUntypedArray>>,
    costs: Option<Vec<Bound<'_, PyUntypedArray>>>,
    threads: Option<usize>,
    progress: Option<Py<PyAny>>,
) -> PyResult<()> {
    let columns = IntegerArray::all(&columns)?;
    let lengths = IntegerArray::all(&lengths)?;
    let order = order.as_ref().map(IntegerArray::new).transpose()?;
    let costs = costs.as_deref().map(IntegerArray::all).transpose()?;
    let metadata = from_json(metadata)?;
    enter(py, progress, move |signals| {
        let threads = threads.unwrap_or_else(available_threads);
        let lengths: Vec<Integers<'_>> = lengths.iter().map(IntegerArray::view).collect();
        let order = order.as_ref().map(IntegerArray::view);
        let costs: Option<Vec<Integers<'_>>> =
            costs.as_ref().map(|columns| columns.iter().map(IntegerArray::view).collect());
        Ok(verify::verify(&view(&columns)?, &metadata, &lengths, order, costs.as_deref(), threads, signals)?)
    })
}

/// Megatron's `sample_index` of a plan, a row of two integers a pack.
#[pyfunction]
#[pyo3(signature = (columns, metadata, lengths=None, order=None, progress=None))]
pub(crate) fn plan_sample_index<'py>(
    py: Python<'py>,
    columns: Vec<Bound<'py, PyUntypedArray>>,
    metadata: &str,
    lengths: Option<Vec<Bound<'py, PyUntypedArray>>>,
    order: Option<Bound<'py, PyUntypedArray>>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let columns = IntegerArray::all(&columns)?;
    let lengths = lengths.as_deref().map(IntegerArray::all).transpose()?;
    let order = order.as_ref().map(IntegerArray::new).transpose()?;
    let metadata = from_json(metadata)?;
    let rows = enter(py, progress, move |signals| {
        let lengths: Option<Vec<Integers<'_>>> =
            lengths.as_ref().map(|columns| columns.iter().map(IntegerArray::view).collect());
        let order = order.as_ref().map(IntegerArray::view);
        let inputs = PlanInputs { lengths: lengths.as_deref(), order, threads: available_threads() };
        Ok(sample_index(&view(&columns)?, &metadata, &inputs, signals)?)
    })?;
    let shape = [rows.len() / 2, 2];
    Ok(match rows {
        Column::I32(values) => PyArray1::from_vec(py, values).reshape(shape)?.into_any(),
        Column::I64(values) => PyArray1::from_vec(py, values).reshape(shape)?.into_any(),
    })
}

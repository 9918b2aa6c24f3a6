//! Mixes the packs of several plans.

use numpy::PyUntypedArray;
use pyo3::prelude::*;
use tundish_packing::mix::{self, Exhausted, MixRequest};

use super::as_numpy;
use super::integer_array::IntegerArray;
use crate::error::BindingError;
use crate::long_work::enter;

/// The arguments of a mix, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct MixDict<'py> {
    packs: Vec<u64>,
    weights: Vec<f64>,
    seed: u32,
    exhausted: String,
    epochs: Option<u64>,
    num_packs: Option<u64>,
    beginning: Bound<'py, PyUntypedArray>,
}

/// The packs of a mix, numbered through all plans, in their order.
#[pyfunction]
#[pyo3(signature = (request, progress=None))]
pub(crate) fn mix_packs<'py>(
    py: Python<'py>,
    request: MixDict<'_>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let MixDict { packs, weights, seed, exhausted, epochs, num_packs, beginning } = request;
    let exhausted = Exhausted::from_name(&exhausted).ok_or_else(|| {
        BindingError::Value(format!("exhausted is '{exhausted}'; it is one of 'repeat', 'stop', 'drop'"))
    })?;
    let beginning = IntegerArray::new(&beginning)?;
    let order = enter(py, progress, move |signals| {
        let beginning = beginning.view();
        let request = MixRequest { packs: &packs, weights: &weights, seed, exhausted, epochs, num_packs, beginning };
        Ok(mix::mix(&request, signals)?)
    })?;
    Ok(as_numpy(py, order))
}

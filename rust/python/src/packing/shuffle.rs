//! Draws random orders as numpy does.

use pyo3::prelude::*;
use tundish_packing::plan::Column;
use tundish_packing::shuffle::RandomState;

use super::as_numpy;
use crate::long_work::enter;

/// The order that numpy's `RandomState(seed).shuffle(arange(samples))` gives, or, with an epoch, that of
/// `RandomState([seed, epoch])`.
#[pyfunction]
#[pyo3(signature = (samples, seed, epoch=None, progress=None))]
pub(crate) fn shuffled_indices<'py>(
    py: Python<'py>,
    samples: usize,
    seed: u32,
    epoch: Option<u32>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let column = enter(py, progress, move |signals| {
        let mut random = match epoch {
            None => RandomState::new(seed),
            Some(epoch) => RandomState::of_words(&[seed, epoch]),
        };
        Ok(Column::shuffled(&mut random, samples, signals)?)
    })?;
    Ok(as_numpy(py, column))
}

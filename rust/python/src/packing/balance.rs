//! Splits the samples of one training step, and draws orders of samples.

use numpy::{PyArray1, PyUntypedArray};
use pyo3::prelude::*;
use tundish_packing::balance::{self, Cost};
use tundish_packing::plan::Column;
use tundish_packing::shuffle::RandomState;

use super::as_numpy;
use super::integer_array::IntegerArray;
use crate::long_work::enter;

type Groups<'py> = Vec<Bound<'py, PyArray1<i64>>>;

/// Split the samples into `parts` parts of nearly equal cost: `costs` if they are given, else that of attention, else
/// that of tokens.
#[pyfunction]
#[pyo3(signature = (lengths, parts, costs=None, attention=false, equal_counts=false))]
pub(crate) fn balanced_parts<'py>(
    py: Python<'py>,
    lengths: &Bound<'_, PyUntypedArray>,
    parts: usize,
    costs: Option<&Bound<'_, PyUntypedArray>>,
    attention: bool,
    equal_counts: bool,
) -> PyResult<Groups<'py>> {
    let lengths = IntegerArray::new(lengths)?;
    let costs = costs.map(IntegerArray::new).transpose()?;
    let groups = enter(py, None, move |signals| {
        let cost = match &costs {
            Some(costs) => Cost::Given(costs.view()),
            None if attention => Cost::Attention,
            None => Cost::Tokens,
        };
        Ok(balance::balanced_parts(lengths.view(), parts, cost, equal_counts, signals)?)
    })?;
    Ok(as_arrays(py, groups))
}

/// Split the samples into batches of at most `max_tokens` tokens: few of them, or `count`.
#[pyfunction]
#[pyo3(signature = (lengths, max_tokens, count=None))]
pub(crate) fn micro_batches<'py>(
    py: Python<'py>,
    lengths: &Bound<'_, PyUntypedArray>,
    max_tokens: u64,
    count: Option<usize>,
) -> PyResult<Groups<'py>> {
    let lengths = IntegerArray::new(lengths)?;
    let groups =
        enter(py, None, move |signals| Ok(balance::micro_batches(lengths.view(), max_tokens, count, signals)?))?;
    Ok(as_arrays(py, groups))
}

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

fn as_arrays(py: Python<'_>, groups: Vec<Vec<i64>>) -> Groups<'_> {
    groups.into_iter().map(|group| PyArray1::from_vec(py, group)).collect()
}

//! [`TensorSpans`].

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PySequence, PyTuple};

/// Byte ranges and dtypes of tensors in a file image. Keep it from one save to the next: reading thousands of Python
/// objects again is slow.
///
/// The argument is a sequence of tuples that begin with the first byte, the end, and the dtype, ascending and disjoint.
#[pyclass(frozen)]
pub(crate) struct TensorSpans {
    pub(super) spans: Vec<Span>,
    pub(super) dtypes: Vec<Py<PyAny>>,
}

pub(super) struct Span {
    pub(super) start: usize,
    pub(super) stop: usize,
    /// An index into the dtypes.
    pub(super) dtype: usize,
}

#[pymethods]
impl TensorSpans {
    #[new]
    fn new(ranges: &Bound<'_, PySequence>) -> PyResult<Self> {
        let mut spans = Vec::with_capacity(ranges.len()?);
        let mut dtypes: Vec<Py<PyAny>> = Vec::new();
        let mut end = 0;
        for (number, range) in ranges.try_iter()?.enumerate() {
            let range = range?.cast_into::<PyTuple>()?;
            let (start, stop): (usize, usize) = (range.get_item(0)?.extract()?, range.get_item(1)?.extract()?);
            if start < end || stop < start {
                return Err(PyValueError::new_err(format!("range {number} is {start}..{stop}, after {end}")));
            }
            end = stop;
            let dtype = range.get_item(2)?;
            let known = dtypes.iter().position(|known| known.is(&dtype));
            spans.push(Span { start, stop, dtype: known.unwrap_or(dtypes.len()) });
            if known.is_none() {
                dtypes.push(dtype.unbind());
            }
        }
        Ok(Self { spans, dtypes })
    }
}

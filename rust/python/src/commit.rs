//! Binds `tundish-commit`.

use std::path::PathBuf;

use pyo3::prelude::*;

use crate::enter::enter;

/// Write `contents` as the file `target`, whole and durable, in the place of what was there.
#[pyfunction]
pub(crate) fn replace_file(py: Python<'_>, target: PathBuf, contents: &[u8]) -> PyResult<()> {
    enter(py, None, |_| Ok(tundish_commit::replace_file(&target, contents)?))
}

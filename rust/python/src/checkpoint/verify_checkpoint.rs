//! `verify_checkpoint`: compares every file of a checkpoint with its manifest.

use std::path::PathBuf;

use pyo3::prelude::*;

use super::callbacks::tick;
use crate::long_work::enter;

/// Read every file of the checkpoint in `folder` and compare it with the manifest.
///
/// Raises `CorruptCheckpointError`, whose `paths` are all files that are missing, changed, cut off or in no manifest.
#[pyfunction]
#[pyo3(signature = (folder, *, progress=None))]
pub(crate) fn verify_checkpoint(py: Python<'_>, folder: PathBuf, progress: Option<Py<PyAny>>) -> PyResult<Vec<String>> {
    enter(py, progress, move |signals| {
        let mut on_progress = |read, total| tick(signals, "verify", read, total);
        Ok(tundish_commit::root::verify_checkpoint(folder, &mut on_progress)?)
    })
}

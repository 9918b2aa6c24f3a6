//! Binds the list of this user's named segments, and their sweep.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use tundish_shm::named::SegmentFolder;
use tundish_shm::named::sweep::{NamedSegment, sweep};

use super::check_signals;
use crate::long_work::enter;

/// Lists the named segments of this user, and removes the dead ones unless `dry_run`.
#[pyfunction]
#[pyo3(signature = (*, dry_run))]
pub(crate) fn sweep_segments(py: Python<'_>, dry_run: bool) -> PyResult<Bound<'_, PyDict>> {
    let found = enter(py, None, |signals| {
        let folder = SegmentFolder::standard()?;
        Ok(sweep(&folder, dry_run, &mut || check_signals(signals))?)
    })?;
    let described = |segments: &[NamedSegment]| -> PyResult<Vec<_>> {
        segments.iter().map(|segment| describe(py, segment)).collect()
    };
    let report = PyDict::new(py);
    report.set_item("dead", described(&found.dead)?)?;
    report.set_item("live", described(&found.live)?)?;
    report.set_item("failed", found.failed.iter().map(ToString::to_string).collect::<Vec<_>>())?;
    Ok(report)
}

fn describe<'py>(py: Python<'py>, segment: &NamedSegment) -> PyResult<Bound<'py, PyDict>> {
    let entry = PyDict::new(py);
    entry.set_item("name", segment.name.as_str())?;
    entry.set_item("path", &segment.path)?;
    entry.set_item("size", segment.bytes)?;
    entry.set_item("made_by", segment.maker)?;
    Ok(entry)
}

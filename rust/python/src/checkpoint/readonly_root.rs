//! [`ReadonlyCheckpointRoot`].

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tundish_commit::RealDisk;
use tundish_commit::root::{ReadonlyRoot, RootListing};

use super::descriptions::{checkpoint_dicts, parse_kind};
use super::read_lock::CheckpointReadLock;
use crate::long_work::enter;

/// A root opened for reading, without a lock and without changes.
#[pyclass(frozen)]
pub(crate) struct ReadonlyCheckpointRoot {
    root: ReadonlyRoot<RealDisk>,
}

#[pymethods]
impl ReadonlyCheckpointRoot {
    /// The absolute path.
    #[getter]
    fn path(&self) -> PathBuf {
        self.root.path().to_path_buf()
    }

    /// The random text that the owner of this root wrote there; None where nobody ever owned it.
    fn owner(&self, py: Python<'_>) -> PyResult<Option<String>> {
        enter(py, None, |_| Ok(self.root.owner()?))
    }

    /// The whole checkpoints: by kind, steps ascending.
    fn list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        checkpoint_dicts(py, &enter(py, None, |_| Ok(self.root.list()?))?)
    }

    /// Everything named like a checkpoint: the whole ones as `list` returns them, and the others with the reason.
    fn survey<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyList>, Bound<'py, PyList>)> {
        let RootListing { whole, damaged } = enter(py, None, |_| Ok(self.root.survey()?))?;
        let reasons = PyList::empty(py);
        for one in damaged {
            let entry = PyDict::new(py);
            entry.set_item("kind", one.kind.to_string())?;
            entry.set_item("step", one.step)?;
            entry.set_item("path", one.path)?;
            entry.set_item("reason", one.reason)?;
            reasons.append(entry)?;
        }
        Ok((checkpoint_dicts(py, &whole)?, reasons))
    }

    /// The newest whole checkpoint of a kind.
    fn latest(&self, py: Python<'_>, kind: &str) -> PyResult<Option<PathBuf>> {
        let kind = parse_kind(kind)?;
        enter(py, None, |_| Ok(self.root.latest(kind)?))
    }

    /// Keep a checkpoint from being removed or replaced until the lock is closed.
    fn read_lock(&self, py: Python<'_>, kind: &str, step: u64) -> PyResult<CheckpointReadLock> {
        let kind = parse_kind(kind)?;
        enter(py, None, |_| Ok(CheckpointReadLock::from_lock(self.root.read_lock(kind, step)?)))
    }
}

/// The name of the folder in a root in which a checkpoint is written.
#[pyfunction]
pub(crate) fn unfinished_name(kind: &str, step: u64) -> PyResult<String> {
    Ok(tundish_commit::root::unfinished_name(parse_kind(kind)?, step))
}

/// Open a root for reading.
#[pyfunction]
pub(crate) fn open_checkpoints_readonly(py: Python<'_>, path: PathBuf) -> PyResult<ReadonlyCheckpointRoot> {
    enter(py, None, |_| Ok(ReadonlyCheckpointRoot { root: ReadonlyRoot::open(RealDisk, &path)? }))
}

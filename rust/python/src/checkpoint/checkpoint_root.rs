//! [`CheckpointRoot`], and [`ReadonlyCheckpointRoot`] for those who do not own it.

use std::path::PathBuf;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tundish_commit::disk::Room;
use tundish_commit::root::{self, OpenOptions, ReadonlyRoot, RecoveryReport, Root, RootListing};
use tundish_commit::{CommitError, RealDisk};
use tundish_packing::Progress;

use super::descriptions::{checkpoint_dicts, parse_kind};
use super::read_lock::CheckpointReadLock;
use crate::error::BindingError;
use crate::long_work::enter;

/// The folder of all checkpoints, owned by this process.
#[pyclass(frozen)]
pub(crate) struct CheckpointRoot {
    root: Root<RealDisk>,
}

#[pymethods]
impl CheckpointRoot {
    #[new]
    #[pyo3(signature = (path, *, wait_seconds))]
    fn new(py: Python<'_>, path: PathBuf, wait_seconds: f64) -> PyResult<Self> {
        let wait = Duration::try_from_secs_f64(wait_seconds)
            .map_err(|error| BindingError::Value(format!("wait_seconds is {wait_seconds}: {error}")))?;
        enter(py, None, move |signals| {
            let mut on_wait =
                || signals.tick("wait", 0, 0).map_err(|_| CommitError::Interrupted { path: path.clone() });
            Ok(Self { root: Root::open(RealDisk, &path, OpenOptions::new(wait), &mut on_wait)? })
        })
    }

    /// The absolute path.
    #[getter]
    fn path(&self) -> PathBuf {
        self.root.path().to_path_buf()
    }

    /// The random text of this ownership.
    #[getter]
    fn owner(&self) -> Result<String, BindingError> {
        Ok(self.root.owner()?)
    }

    /// The results of opening.
    #[getter]
    fn recovered<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let RecoveryReport { removed, live, set_aside, repaired, ignored, failed } = self.root.recovered();
        let report = PyDict::new(py);
        for (name, entries) in
            [("removed", removed), ("live", live), ("set_aside", set_aside), ("repaired", repaired), ("failed", failed)]
        {
            report.set_item(name, entries)?;
        }
        report.set_item("ignored", ignored)?;
        Ok(report)
    }

    /// Check that a step may be saved, and reserve `size` bytes and `files` for it. Returns the free bytes and files beside
    /// those of the checkpoints that are being written.
    #[pyo3(signature = (kind, step, *, overwrite, size, files))]
    fn reserve(
        &self,
        py: Python<'_>,
        kind: &str,
        step: u64,
        overwrite: bool,
        size: u64,
        files: u64,
    ) -> PyResult<(u64, u64)> {
        let kind = parse_kind(kind)?;
        let free = enter(py, None, |_| Ok(self.root.reserve(kind, step, overwrite, Room { bytes: size, files })?))?;
        Ok((free.bytes, free.files))
    }

    /// Begin a checkpoint: make its hidden folder and return the path.
    #[pyo3(signature = (kind, step, *, overwrite))]
    fn begin(&self, py: Python<'_>, kind: &str, step: u64, overwrite: bool) -> PyResult<PathBuf> {
        let kind = parse_kind(kind)?;
        enter(py, None, |_| Ok(self.root.begin(kind, step, overwrite)?))
    }

    /// Publish a written checkpoint: make it durable, rename it, record it. Returns its path.
    #[pyo3(signature = (kind, step, manifest_json, *, overwrite))]
    fn publish(
        &self,
        py: Python<'_>,
        kind: &str,
        step: u64,
        manifest_json: &str,
        overwrite: bool,
    ) -> PyResult<PathBuf> {
        let kind = parse_kind(kind)?;
        enter(py, None, |_| Ok(self.root.publish(kind, step, manifest_json, overwrite)?))
    }

    /// Abandon a checkpoint: remove what was written.
    fn abandon(&self, py: Python<'_>, kind: &str, step: u64) -> PyResult<()> {
        let kind = parse_kind(kind)?;
        enter(py, None, |_| Ok(self.root.abandon(kind, step)?))
    }

    /// The published checkpoints: by kind, steps ascending.
    fn list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        checkpoint_dicts(py, &enter(py, None, |_| Ok(self.root.list()?))?)
    }

    /// Keep the checkpoints of a step from being removed as long as the root is open. Returns at once.
    fn protect(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        enter(py, None, |_| Ok(self.root.protect(step)?))
    }

    /// Remove a checkpoint. Refuses the newest of its kind, and one that is being read or protected.
    fn remove(&self, py: Python<'_>, kind: &str, step: u64) -> PyResult<()> {
        let kind = parse_kind(kind)?;
        enter(py, None, |_| Ok(self.root.remove(kind, step)?))
    }

    /// Set the checkpoints above a step aside; returns their new paths.
    fn discard_after(&self, py: Python<'_>, step: u64) -> PyResult<Vec<PathBuf>> {
        enter(py, None, |_| Ok(self.root.discard_after(step)?))
    }

    /// Release the root.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, None, |_| {
            self.root.close();
            Ok(())
        })
    }
}

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
    Ok(root::unfinished_name(parse_kind(kind)?, step))
}

/// Open a root for reading.
#[pyfunction]
pub(crate) fn open_checkpoints_readonly(py: Python<'_>, path: PathBuf) -> PyResult<ReadonlyCheckpointRoot> {
    enter(py, None, |_| Ok(ReadonlyCheckpointRoot { root: ReadonlyRoot::open(RealDisk, &path)? }))
}

//! [`CheckpointRoot`].

use std::path::PathBuf;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tundish_commit::CommitError;
use tundish_commit::RealDisk;
use tundish_commit::disk::Room;
use tundish_commit::root::{OpenOptions, RecoveryReport, Root};
use tundish_packing::Progress;

use super::descriptions::{checkpoint_dicts, parse_kind};
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

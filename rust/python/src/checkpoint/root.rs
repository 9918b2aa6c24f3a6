//! Binds the root of checkpoints of `tundish-commit`.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::exceptions::{PyRecursionError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString};
use tundish_commit::disk::RealDisk;
use tundish_commit::root::{
    Checkpoint, Damage, Opening, Part, ReadLock, ReadonlyRoot, Recovery, Root, Survey, read_lock_at,
};
use tundish_commit::{Checksum, CommitError, Kind, NotAChecksum};
use tundish_packing::Watch;

use crate::enter::{Door, enter};
use crate::error::BindingError;

/// A root that this process owns: the folder of all checkpoints, and what decides which of them exist.
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
        enter(py, None, move |door| {
            let mut patience = || look(door, &path);
            Ok(Self { root: Root::open(RealDisk, &path, Opening::new(wait), &mut patience)? })
        })
    }

    /// The absolute path.
    #[getter]
    fn path(&self) -> PathBuf {
        self.root.path().to_path_buf()
    }

    /// What opening found and mended.
    #[getter]
    fn recovered<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let Recovery { removed, live, set_aside, repaired, ignored, failed } = self.root.recovered();
        let report = PyDict::new(py);
        for (name, entries) in
            [("removed", removed), ("live", live), ("set_aside", set_aside), ("repaired", repaired), ("failed", failed)]
        {
            report.set_item(name, entries)?;
        }
        report.set_item("ignored", ignored)?;
        Ok(report)
    }

    /// Make the hidden folder of a checkpoint that is to be written; its path.
    #[pyo3(signature = (kind, step, *, overwrite))]
    fn begin(&self, py: Python<'_>, kind: &str, step: u64, overwrite: bool) -> PyResult<PathBuf> {
        let kind = parse(kind)?;
        enter(py, None, |_| Ok(self.root.begin(kind, step, overwrite)?))
    }

    /// Make a written checkpoint durable, give it its name, and record it; its path.
    #[pyo3(signature = (kind, step, manifest_json, *, overwrite))]
    fn publish(
        &self,
        py: Python<'_>,
        kind: &str,
        step: u64,
        manifest_json: &str,
        overwrite: bool,
    ) -> PyResult<PathBuf> {
        let kind = parse(kind)?;
        enter(py, None, |_| Ok(self.root.publish(kind, step, manifest_json, overwrite)?))
    }

    /// Remove what was written of a checkpoint that is not to be published.
    fn abandon(&self, py: Python<'_>, kind: &str, step: u64) -> PyResult<()> {
        let kind = parse(kind)?;
        enter(py, None, |_| Ok(self.root.abandon(kind, step)?))
    }

    /// The published checkpoints: by kind, steps ascending.
    fn list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        described(py, &enter(py, None, |_| Ok(self.root.list()?))?)
    }

    /// The newest published checkpoint of a kind.
    fn latest(&self, py: Python<'_>, kind: &str) -> PyResult<Option<PathBuf>> {
        let kind = parse(kind)?;
        enter(py, None, |_| Ok(self.root.latest(kind)?))
    }

    /// Keep the checkpoints of a step from being removed, as long as the root is open; waits for no removal.
    fn protect(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        enter(py, None, |_| Ok(self.root.protect(step)?))
    }

    /// Remove a checkpoint; never the newest of its kind, nor one that is being read, nor one that is protected.
    fn remove(&self, py: Python<'_>, kind: &str, step: u64) -> PyResult<()> {
        let kind = parse(kind)?;
        enter(py, None, |_| Ok(self.root.remove(kind, step)?))
    }

    /// Set the checkpoints above a step aside; where they are now.
    fn discard_after(&self, py: Python<'_>, step: u64) -> PyResult<Vec<PathBuf>> {
        enter(py, None, |_| Ok(self.root.discard_after(step)?))
    }

    /// Keep a checkpoint from being removed or replaced until the lock is closed.
    fn read_lock(&self, py: Python<'_>, kind: &str, step: u64) -> PyResult<CheckpointReadLock> {
        let kind = parse(kind)?;
        enter(py, None, |_| Ok(CheckpointReadLock::holding(self.root.read_lock(kind, step)?)))
    }

    /// Let go of the root.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, None, |_| {
            self.root.close();
            Ok(())
        })
    }
}

/// A root as anybody may look at it, without a lock and without changing it.
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

    /// The whole checkpoints of now: by kind, steps ascending.
    fn list<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        described(py, &enter(py, None, |_| Ok(self.root.list()?))?)
    }

    /// What of now has the name of a checkpoint: those that are whole as `list` has them, and of the others what their
    /// names say and why they are none.
    fn survey<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyList>, Bound<'py, PyList>)> {
        let Survey { whole, damaged } = enter(py, None, |_| Ok(self.root.survey()?))?;
        let reasons = PyList::empty(py);
        for one in damaged {
            let entry = PyDict::new(py);
            entry.set_item("kind", one.kind.to_string())?;
            entry.set_item("step", one.step)?;
            entry.set_item("path", one.path)?;
            entry.set_item("reason", one.reason)?;
            reasons.append(entry)?;
        }
        Ok((described(py, &whole)?, reasons))
    }

    /// The newest whole checkpoint of a kind.
    fn latest(&self, py: Python<'_>, kind: &str) -> PyResult<Option<PathBuf>> {
        let kind = parse(kind)?;
        enter(py, None, |_| Ok(self.root.latest(kind)?))
    }

    /// Keep a checkpoint from being removed or replaced until the lock is closed.
    fn read_lock(&self, py: Python<'_>, kind: &str, step: u64) -> PyResult<CheckpointReadLock> {
        let kind = parse(kind)?;
        enter(py, None, |_| Ok(CheckpointReadLock::holding(self.root.read_lock(kind, step)?)))
    }
}

/// Open a root to look at it.
#[pyfunction]
pub(crate) fn open_checkpoints_readonly(py: Python<'_>, path: PathBuf) -> PyResult<ReadonlyCheckpointRoot> {
    enter(py, None, |_| Ok(ReadonlyCheckpointRoot { root: ReadonlyRoot::open(RealDisk, &path)? }))
}

/// Keeps the checkpoint in `folder`, wherever that lies, from being removed or replaced until it is closed.
#[pyclass(frozen)]
pub(crate) struct CheckpointReadLock {
    path: PathBuf,
    is_locked: bool,
    /// Shared with the calls under way, which a close does not wait for.
    lock: Mutex<Option<Arc<ReadLock<RealDisk>>>>,
}

/// Name, size and checksum, as a manifest has them.
type RecordedFile = (String, u64, Option<String>);

/// What is damaged: the name of a file, what is wrong with it, and whether that are its bytes.
type Told = (String, String, bool);

fn told(damage: Damage) -> Told {
    (damage.name, damage.what, damage.is_changed)
}

impl CheckpointReadLock {
    fn holding(lock: ReadLock<RealDisk>) -> Self {
        Self { path: lock.path().to_path_buf(), is_locked: lock.is_locked(), lock: Mutex::new(Some(Arc::new(lock))) }
    }

    fn held(&self) -> Result<Arc<ReadLock<RealDisk>>, BindingError> {
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        lock.clone().ok_or_else(|| BindingError::Value("the lock is closed".to_owned()))
    }
}

#[pymethods]
impl CheckpointReadLock {
    #[new]
    fn new(py: Python<'_>, folder: PathBuf) -> PyResult<Self> {
        enter(py, None, |_| Ok(Self::holding(read_lock_at(&RealDisk, &folder)?)))
    }

    /// The checkpoint's folder.
    #[getter]
    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// Whether anything keeps the checkpoint: there are file systems without locks.
    #[getter]
    fn is_locked(&self) -> bool {
        self.is_locked
    }

    /// What the checkpoint says of itself, its files by name with size and checksum, and the checksum of its manifest.
    /// No file is looked at.
    ///
    /// Raises `CorruptCheckpointError`.
    fn describe<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyDict>, Vec<RecordedFile>, String)> {
        let (checkpoint, files, checksum) = enter(py, None, |_| Ok(self.held()?.describe()?))?;
        let files = files.into_iter().map(|file| (file.name, file.size, file.checksum)).collect();
        Ok((described_one(py, &checkpoint)?, files, checksum.to_string()))
    }

    /// What is damaged of some files: missing, of another size or, with `every_byte`, of other bytes. Of each its name,
    /// what is wrong with it, and whether that are its bytes: if not, it may look otherwise from elsewhere.
    #[pyo3(signature = (names, *, every_byte))]
    fn verify_files(&self, py: Python<'_>, names: BTreeSet<String>, every_byte: bool) -> PyResult<Vec<Told>> {
        let damaged = enter(py, None, |door| {
            let mut go_on = |read, total| match door.tick("verify", read, total) {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            };
            Ok(self.held()?.verify_files(&names, every_byte, &mut go_on)?)
        })?;
        Ok(damaged.into_iter().map(told).collect())
    }

    /// The checksums of parts of files, each given by the file's name, its first byte and its size; None of one of a
    /// file that is damaged as far as a part shows it, of which the second list tells as `verify_files` does.
    fn sum_parts(&self, py: Python<'_>, parts: Vec<(String, u64, u64)>) -> PyResult<(Vec<Option<String>>, Vec<Told>)> {
        let parts: Vec<Part> = parts.into_iter().map(|(name, start, size)| Part { name, start, size }).collect();
        let (sums, damaged) = enter(py, None, |door| {
            let mut go_on = |read, total| match door.tick("verify", read, total) {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            };
            Ok(self.held()?.sum_parts(&parts, &mut go_on)?)
        })?;
        let sums = sums.into_iter().map(|sum| sum.map(|sum| sum.to_string())).collect();
        Ok((sums, damaged.into_iter().map(told).collect()))
    }

    /// What is wrong with the file `name`, whose parts, one after the other, have these checksums and sizes.
    fn compare_sums(&self, py: Python<'_>, name: &str, sums: Vec<(String, u64)>) -> PyResult<Option<Told>> {
        let sums = sums
            .into_iter()
            .map(|(sum, size)| {
                Ok((sum.parse().map_err(|error: NotAChecksum| PyValueError::new_err(error.to_string()))?, size))
            })
            .collect::<PyResult<Vec<(Checksum, u64)>>>()?;
        let damage = enter(py, None, |_| Ok(self.held()?.compare_sums(name, &sums)?))?;
        Ok(damage.map(told))
    }

    /// The files that the manifest does not list.
    fn foreign_files(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        enter(py, None, |_| Ok(self.held()?.foreign_files()?))
    }

    /// The bytes of a small file.
    ///
    /// Raises `CorruptCheckpointError` where it has another size or another checksum than it should.
    fn read_file<'py>(
        &self,
        py: Python<'py>,
        name: String,
        size: u64,
        checksum: Option<String>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = enter(py, None, |_| Ok(self.held()?.read_file(&name, size, checksum.as_deref())?))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Let go of the checkpoint. The second call does nothing.
    fn close(&self) {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

fn parse(kind: &str) -> Result<Kind, BindingError> {
    kind.parse().map_err(|_| BindingError::Value(format!("kind is {kind:?}: give 'hf' or 'dcp'")))
}

fn look(door: &mut Door, path: &Path) -> Result<(), CommitError> {
    door.tick("wait", 0, 0).map_err(|_| CommitError::Interrupted { path: path.to_path_buf() })
}

fn described<'py>(py: Python<'py>, checkpoints: &[Checkpoint]) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for checkpoint in checkpoints {
        list.append(described_one(py, checkpoint)?)?;
    }
    Ok(list)
}

fn described_one<'py>(py: Python<'py>, checkpoint: &Checkpoint) -> PyResult<Bound<'py, PyDict>> {
    let entry = PyDict::new(py);
    entry.set_item("kind", checkpoint.kind.to_string())?;
    entry.set_item("step", checkpoint.step)?;
    entry.set_item("path", &checkpoint.path)?;
    entry.set_item("tag", &checkpoint.tag)?;
    entry.set_item("bytes", checkpoint.bytes)?;
    entry.set_item("world_size", checkpoint.world_size)?;
    entry.set_item("extra", checkpoint.extra.as_ref().map(|extra| read(py, extra.get())).transpose()?)?;
    Ok(entry)
}

/// JSON as Python has it; as text where Python cannot read it, nested without end or with numbers of thousands of
/// digits.
fn read<'py>(py: Python<'py>, json: &str) -> PyResult<Bound<'py, PyAny>> {
    let is_unreadable =
        |error: &PyErr| error.is_instance_of::<PyValueError>(py) || error.is_instance_of::<PyRecursionError>(py);
    match py.import("json")?.getattr("loads")?.call1((json,)) {
        Err(error) if is_unreadable(&error) => Ok(PyString::new(py, json).into_any()),
        outcome => outcome,
    }
}

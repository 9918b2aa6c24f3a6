//! [`CheckpointReadLock`], and `verify_checkpoint`.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use tundish_commit::RealDisk;
use tundish_commit::root::{self, ReadLock, read_lock_at};

use super::descriptions::{FileDamage, checkpoint_dict, file_damage};
use super::tick;
use crate::error::BindingError;
use crate::long_work::enter;

/// Keeps the checkpoint in `folder` from being removed or replaced until it is closed.
#[pyclass(frozen)]
pub(crate) struct CheckpointReadLock {
    path: PathBuf,
    is_locked: bool,
    /// Shared with running calls, for which `close` does not wait.
    lock: Mutex<Option<Arc<ReadLock<RealDisk>>>>,
}

/// Name, size and checksum of a file in a manifest.
type RecordedFile = (String, u64, Option<String>);

impl CheckpointReadLock {
    pub(crate) fn from_lock(lock: ReadLock<RealDisk>) -> Self {
        Self { path: lock.path().to_path_buf(), is_locked: lock.is_locked(), lock: Mutex::new(Some(Arc::new(lock))) }
    }

    fn open_lock(&self) -> Result<Arc<ReadLock<RealDisk>>, BindingError> {
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        lock.clone().ok_or_else(|| BindingError::Value("the lock is closed".to_owned()))
    }
}

#[pymethods]
impl CheckpointReadLock {
    #[new]
    fn new(py: Python<'_>, folder: PathBuf) -> PyResult<Self> {
        enter(py, None, |_| Ok(Self::from_lock(read_lock_at(&RealDisk, &folder)?)))
    }

    /// The checkpoint's folder.
    #[getter]
    fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// Whether a lock is held; false on file systems without locks.
    #[getter]
    fn is_locked(&self) -> bool {
        self.is_locked
    }

    /// The checkpoint, its files (name, size, checksum), and the checksum of its manifest. Reads only the manifest.
    ///
    /// Raises `CorruptCheckpointError`.
    fn describe<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyDict>, Vec<RecordedFile>, String)> {
        let (checkpoint, files, checksum) = enter(py, None, |_| Ok(self.open_lock()?.describe()?))?;
        let files = files.into_iter().map(|file| (file.name, file.size, file.checksum)).collect();
        Ok((checkpoint_dict(py, &checkpoint)?, files, checksum.to_string()))
    }

    /// The damage of some files: missing, of another size or, with `every_byte`, of other bytes. Each entry is the
    /// name, the problem, and whether bytes differ; if not, another machine may see the file intact.
    #[pyo3(signature = (names, *, every_byte))]
    fn verify_files(&self, py: Python<'_>, names: BTreeSet<String>, every_byte: bool) -> PyResult<Vec<FileDamage>> {
        let damaged = enter(py, None, |signals| {
            let mut on_progress = |read, total| tick(signals, "verify", read, total);
            Ok(self.open_lock()?.verify_files(&names, every_byte, &mut on_progress)?)
        })?;
        Ok(damaged.into_iter().map(file_damage).collect())
    }

    /// The files that the manifest does not list.
    fn foreign_files(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        enter(py, None, |_| Ok(self.open_lock()?.foreign_files()?))
    }

    /// The bytes of a small file.
    ///
    /// Raises `CorruptCheckpointError` where its size or checksum differs.
    fn read_file<'py>(
        &self,
        py: Python<'py>,
        name: String,
        size: u64,
        checksum: Option<String>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = enter(py, None, |_| Ok(self.open_lock()?.read_file(&name, size, checksum.as_deref())?))?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// Release the checkpoint. A second call does nothing.
    fn close(&self) {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// Read every file of the checkpoint in `folder` and compare it with the manifest.
///
/// Raises `CorruptCheckpointError`, whose `paths` are all files that are missing, changed, cut off or in no manifest.
#[pyfunction]
#[pyo3(signature = (folder, *, progress=None))]
pub(crate) fn verify_checkpoint(py: Python<'_>, folder: PathBuf, progress: Option<Py<PyAny>>) -> PyResult<Vec<String>> {
    enter(py, progress, move |signals| {
        let mut on_progress = |read, total| tick(signals, "verify", read, total);
        Ok(root::verify_checkpoint(folder, &mut on_progress)?)
    })
}

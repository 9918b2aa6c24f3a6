//! [`AtomicFolder`] and [`replace_file`]: durable folders and files.
//!
//! Invariant: only the system reads the bytes of a buffer, within the call that passes them. Another thread that writes
//! to them meanwhile changes the file and nothing else.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use tundish_commit::FolderFile;
use tundish_packing::Progress;

use crate::error::BindingError;
use crate::long_work::enter;

/// Bytes that are written between two checks of signals.
const CHUNK: usize = 8 << 20;

/// Write `contents` as the file `target`, whole and durable, in the place of what was there.
#[pyfunction]
pub(crate) fn replace_file(py: Python<'_>, target: PathBuf, contents: &[u8]) -> PyResult<()> {
    enter(py, None, |_| Ok(tundish_commit::replace_file(&target, contents)?))
}

/// A folder that is written file by file and appears as `target`, whole and durable, when it is published.
///
/// A folder that is abandoned, dropped, or left by a killed process never appears.
#[pyclass(frozen)]
pub(crate) struct AtomicFolder {
    /// The hidden folder.
    #[pyo3(get)]
    path: PathBuf,
    writing: Mutex<Option<Writing>>,
}

struct Writing {
    // Before the folder, which removes what it wrote when it is dropped.
    files: HashMap<String, FolderFile>,
    folder: tundish_commit::AtomicFolder,
}

#[pymethods]
impl AtomicFolder {
    #[new]
    fn new(py: Python<'_>, target: PathBuf) -> PyResult<Self> {
        enter(py, None, |_| {
            let folder = tundish_commit::AtomicFolder::create(&target)?;
            let path = folder.path().to_path_buf();
            Ok(Self { path, writing: Mutex::new(Some(Writing { files: HashMap::new(), folder })) })
        })
    }

    /// Append the bytes of a contiguous buffer to the file `name`.
    fn append(&self, py: Python<'_>, name: &str, contents: PyBuffer<u8>) -> PyResult<()> {
        if !contents.is_c_contiguous() {
            return Err(BindingError::Value(format!("the bytes for {name} do not lie one after the other")).into());
        }
        let bytes = Bytes { data: contents.buf_ptr().cast(), len: contents.len_bytes() };
        enter(py, None, move |signals| {
            let bytes = bytes;
            let mut guard = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
            let Writing { files, folder } = guard.as_mut().ok_or_else(closed)?;
            let file = match files.entry(name.to_owned()) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => entry.insert(folder.create_file(name)?),
            };
            for start in (0..bytes.len).step_by(CHUNK) {
                // SAFETY: `contents` keeps the memory for the whole call, and nothing here reads it but the system,
                // in `pwrite`.
                let chunk = unsafe { std::slice::from_raw_parts(bytes.data.add(start), CHUNK.min(bytes.len - start)) };
                file.append(chunk)?;
                signals.tick("write", start as u64, bytes.len as u64)?;
            }
            Ok(())
        })
    }

    /// Make all of it durable and give it its name.
    fn publish(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, None, |_| {
            let Writing { files, folder } = self.take().ok_or_else(closed)?;
            for file in files.into_values() {
                file.finish()?;
            }
            Ok(folder.publish()?)
        })
    }

    /// Remove what was written; does nothing to a folder that is published.
    fn abandon(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, None, |_| {
            drop(self.take());
            Ok(())
        })
    }
}

impl AtomicFolder {
    fn take(&self) -> Option<Writing> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

fn closed() -> BindingError {
    BindingError::Value("this folder is published or abandoned already".to_owned())
}

/// Where the bytes of a buffer lie.
struct Bytes {
    data: *const u8,
    len: usize,
}

// SAFETY: the pointer is only handed to the system, by one thread, while the buffer's owner keeps the memory.
unsafe impl Send for Bytes {}

//! `FileMetadata`, and the functions that make a file durable and return it.

use std::path::PathBuf;

use pyo3::prelude::*;
use tundish_commit::Checksum;

use super::tick;
use crate::error::BindingError;
use crate::long_work::enter;

/// A file of a checkpoint: its name relative to the folder, its size in bytes, and its checksum
/// (`crc64nvme:0123456789abcdef`) or None.
#[pyclass(frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct FileMetadata {
    pub(super) metadata: tundish_commit::FileMetadata,
}

#[pymethods]
impl FileMetadata {
    #[new]
    fn new(name: String, size: u64, checksum: Option<&str>) -> PyResult<Self> {
        let checksum = checksum
            .map(|text| text.parse::<Checksum>().map_err(|error| BindingError::Value(format!("{text:?} is {error}"))));
        Ok(Self { metadata: tundish_commit::FileMetadata { name, size, checksum: checksum.transpose()? } })
    }

    #[getter]
    fn name(&self) -> &str {
        &self.metadata.name
    }

    #[getter]
    fn size(&self) -> u64 {
        self.metadata.size
    }

    #[getter]
    fn checksum(&self) -> Option<String> {
        self.metadata.checksum.map(|checksum| checksum.to_string())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let name = self.metadata.name.as_str().into_pyobject(py)?.repr()?;
        let checksum = self.checksum().map_or_else(|| "None".to_owned(), |text| format!("'{text}'"));
        Ok(format!("FileMetadata({name}, {}, {checksum})", self.metadata.size))
    }
}

/// Write `contents` as the new file `name`, relative to `folder`, and make it and the folders it lies in durable.
#[pyfunction]
pub(crate) fn write_small_file(
    py: Python<'_>,
    folder: PathBuf,
    name: String,
    contents: &[u8],
) -> PyResult<FileMetadata> {
    enter(py, None, move |_| Ok(FileMetadata { metadata: tundish_commit::write_small_file(folder, &name, contents)? }))
}

/// Make a file that another program wrote durable, and compute its checksum. Its name is the last part of `path`.
#[pyfunction]
pub(crate) fn checksum_file(py: Python<'_>, path: PathBuf) -> PyResult<FileMetadata> {
    enter(py, None, move |signals| {
        let mut on_progress = |read, total| tick(signals, "checksum", read, total);
        Ok(FileMetadata { metadata: tundish_commit::checksum_file(path, &mut on_progress)? })
    })
}

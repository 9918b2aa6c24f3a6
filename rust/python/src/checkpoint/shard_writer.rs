//! [`ShardWriter`], and the sweep of the slots of killed writers.
//!
//! Invariant: no writer is joined with the GIL held.
#![allow(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use tundish_commit::WriterOptions;
use tundish_commit::staging::Memory;
use tundish_packing::Progress;

use super::callbacks::tick;
use super::file_image::FileImage;
use super::file_metadata::FileMetadata;
use crate::error::BindingError;
use crate::long_work::enter;

/// Between two checks of signals while a writer works.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(30);

/// Writes the files of one rank with threads of its own.
///
/// When the constructor returns, all files are created and preallocated. Names are relative to `folder`, sizes in
/// bytes. At most `writers_per_node` writers under the same root write at once on a node. `checksum` computes the
/// CRC-64/NVME of each file.
#[pyclass(frozen)]
pub(crate) struct ShardWriter {
    writer: tundish_commit::ShardWriter,
}

#[pymethods]
impl ShardWriter {
    #[new]
    #[pyo3(signature = (folder, files, *, checksum, writers_per_node))]
    fn new(
        py: Python<'_>,
        folder: PathBuf,
        files: Vec<(String, u64)>,
        checksum: bool,
        writers_per_node: usize,
    ) -> PyResult<Self> {
        enter(py, None, move |signals| {
            let files: Vec<_> = files.iter().map(|(name, size)| (name.as_str(), *size)).collect();
            let options = WriterOptions { checksum, writers_per_node };
            let mut check_cancelled = || tick(signals, "preallocate", 0, 0);
            Ok(Self { writer: tundish_commit::ShardWriter::create(folder, &files, options, &mut check_cancelled)? })
        })
    }

    /// Submit `length` bytes of a file image, or of a contiguous buffer, from `start` on, to be written at `offset` of
    /// the file `name`. The memory is kept until it is written; do not change it before.
    fn write(&self, name: &str, offset: u64, source: &Bound<'_, PyAny>, start: usize, length: usize) -> PyResult<()> {
        let submitted = if let Ok(image) = source.cast::<FileImage>() {
            self.writer.write(name, offset, &image.get().image, start, length)
        } else {
            let buffer = PyBuffer::<u8>::get(source)?;
            if !buffer.is_c_contiguous() {
                return Err(BindingError::Value(format!("the bytes for {name} do not lie one after the other")).into());
            }
            self.writer.write(name, offset, &Arc::new(BufferMemory { buffer }), start, length)
        };
        Ok(submitted.map_err(BindingError::from)?)
    }

    /// Bytes that are written (and summed), whose memory may be reused; and bytes of all files.
    fn progress(&self) -> (u64, u64) {
        self.writer.progress()
    }

    /// Block until every file and its folders are durable. Returns the metadata of the files, in the given order.
    ///
    /// Ctrl-C ends the wait, not the writing: wait again, or abort.
    fn finish(&self, py: Python<'_>) -> PyResult<Vec<FileMetadata>> {
        let metadata = enter(py, None, |signals| {
            loop {
                if let Some(metadata) = self.writer.finish(SIGNAL_INTERVAL)? {
                    return Ok(metadata);
                }
                let (written, total) = self.writer.progress();
                signals.tick("write", written, total)?;
            }
        })?;
        Ok(metadata.into_iter().map(|metadata| FileMetadata { metadata }).collect())
    }

    /// Stop writing. When this returns, no thread runs and no image is held. The files stay.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, None, |_| {
            self.writer.abort();
            Ok(())
        })
    }
}

/// The memory of a Python buffer, such as that of a tensor.
struct BufferMemory {
    buffer: PyBuffer<u8>,
}

impl Memory for BufferMemory {
    fn bytes(&self) -> &[u8] {
        let length = self.buffer.len_bytes();
        if length == 0 {
            return &[];
        }
        // SAFETY: the buffer is contiguous, and keeps its memory where it is as long as it lives.
        unsafe { std::slice::from_raw_parts(self.buffer.buf_ptr().cast(), length) }
    }
}

impl Drop for ShardWriter {
    fn drop(&mut self) {
        // Wait for the threads without the GIL.
        Python::try_attach(|py| py.detach(|| self.writer.abort()));
    }
}

/// Remove the slot files that killed writers of this user left, unless `dry_run`; returns their paths. `root` restricts
/// it to writers under that folder.
#[pyfunction]
#[pyo3(signature = (root = None, *, dry_run = false))]
pub(crate) fn sweep_writer_slots(py: Python<'_>, root: Option<PathBuf>, dry_run: bool) -> PyResult<Vec<PathBuf>> {
    enter(py, None, |_| Ok(tundish_commit::sweep_slots(root.as_deref(), dry_run)))
}

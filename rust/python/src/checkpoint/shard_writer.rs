//! [`ShardWriter`].
//!
//! Invariant: no writer is joined with the GIL held.
#![allow(unsafe_code)]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use tundish_commit::staging::Memory;
use tundish_packing::Progress;

use super::file_image::FileImage;
use super::file_metadata::FileMetadata;
use super::tick;
use crate::error::BindingError;
use crate::long_work::enter;

/// Between two checks of signals while a writer works.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(30);

/// Writes the files of one rank with threads of its own.
///
/// When the constructor returns, all files are created and preallocated. Names are relative to `folder`, sizes in
/// bytes. `checksum` computes the CRC-64/NVME of each file.
#[pyclass(frozen)]
pub(crate) struct ShardWriter {
    writer: tundish_commit::ShardWriter,
}

#[pymethods]
impl ShardWriter {
    #[new]
    #[pyo3(signature = (folder, files, *, checksum))]
    fn new(py: Python<'_>, folder: PathBuf, files: Vec<(String, u64)>, checksum: bool) -> PyResult<Self> {
        enter(py, None, move |signals| {
            let files: Vec<_> = files.iter().map(|(name, size)| (name.as_str(), *size)).collect();
            let mut check_cancelled = || tick(signals, "preallocate", 0, 0);
            Ok(Self { writer: tundish_commit::ShardWriter::create(folder, &files, checksum, &mut check_cancelled)? })
        })
    }

    /// Submit `length` bytes of a contiguous buffer, such as a file image, from `start` on, to be written at `offset` of
    /// the file `name`; without a `length` all from there on. The memory is kept until it is written; do not change it
    /// before.
    #[pyo3(signature = (name, offset, source, start = 0, length = None))]
    fn write(
        &self,
        name: &str,
        offset: u64,
        source: &Bound<'_, PyAny>,
        start: usize,
        length: Option<usize>,
    ) -> PyResult<()> {
        // Threads that release an image do not wait for the GIL.
        if let Ok(image) = source.cast::<FileImage>() {
            return self.submit(name, offset, &image.get().image, start, length);
        }
        let buffer = PyUntypedBuffer::get(source)?;
        if !buffer.is_c_contiguous() {
            return Err(BindingError::Value(format!("the bytes for {name} do not lie one after the other")).into());
        }
        self.submit(name, offset, &Arc::new(BufferMemory { buffer }), start, length)
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

impl ShardWriter {
    fn submit(
        &self,
        name: &str,
        offset: u64,
        memory: &Arc<impl Memory + 'static>,
        start: usize,
        length: Option<usize>,
    ) -> PyResult<()> {
        let length = length.unwrap_or_else(|| memory.bytes().len().saturating_sub(start));
        Ok(self.writer.write(name, offset, memory, start, length).map_err(BindingError::from)?)
    }
}

/// The memory of a Python buffer, such as that of a tensor.
struct BufferMemory {
    buffer: PyUntypedBuffer,
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

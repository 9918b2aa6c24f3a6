//! Binds the staging memory and the shard writer of `tundish-commit`.
//!
//! What always holds: an image's memory lives as long as Python or a writer needs it, and whoever exports it to Python
//! keeps the `FileImage` alive; no writer, and no thread that copies, is joined with the GIL held.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMemoryView, PySequence, PyTuple};
use tundish_commit::Checksum;
use tundish_commit::shards::{self, WriterOptions};
use tundish_commit::staging;
use tundish_copying::{self as copying, Copying};
use tundish_packing::Watch;

use crate::enter::{Door, enter};
use crate::error::BindingError;
use crate::tensors::{KnownDtypes, TensorReader};

/// Between two looks at signals while a writer is waited for.
const PATIENCE: Duration = Duration::from_millis(30);

/// `size` bytes of page-aligned memory that a file is staged in, exactly as it will lie on the disk.
///
/// It exports a writable buffer. What it holds at first is not defined. The memory is kept for the next image when
/// Python and all writers have let go of this one. In a child made by `fork` it reads as zeros.
#[pyclass(frozen)]
pub(crate) struct FileImage {
    image: Arc<staging::FileImage>,
}

#[pymethods]
impl FileImage {
    #[new]
    fn new(py: Python<'_>, size: usize) -> PyResult<Self> {
        // What is kept and of no use goes back to the system first, which takes milliseconds a gigabyte.
        enter(py, None, |_| Ok(Self { image: Arc::new(staging::FileImage::new(size)?) }))
    }

    /// Bytes.
    #[getter]
    fn size(&self) -> usize {
        self.image.size()
    }

    /// Where the first byte is; a multiple of the page size, unless there is none.
    #[getter]
    fn address(&self) -> usize {
        self.image.as_ptr().addr()
    }

    /// Have all of its memory there, before somebody asks for it page by page. No byte changes.
    fn populate(&self, py: Python<'_>) {
        py.detach(|| self.image.populate());
    }

    /// Begin to copy `tensors`, each to its span, on up to `threads` threads. `reader`: asked first.
    #[pyo3(signature = (spans, tensors, threads, reader=None))]
    fn fill(
        &self,
        py: Python<'_>,
        spans: &TensorSpans,
        tensors: &Bound<'_, PySequence>,
        threads: usize,
        reader: Option<&TensorReader>,
    ) -> PyResult<TensorCopy> {
        if spans.spans.len() != tensors.len()? || spans.spans.last().is_some_and(|last| last.stop > self.image.size()) {
            return Err(PyValueError::new_err("the spans are not those of the tensors, or end after the image"));
        }
        let mut finder = Finder {
            image: &self.image,
            spans,
            reader,
            tensors: tensors.try_iter()?.zip(&spans.spans).enumerate(),
            known: KnownDtypes::default(),
            left: Vec::new(),
        };
        let mut copying = Copying::new(threads);
        // SAFETY: the filling holds the image and the tensors as long as anything is copied; whoever frees the memory of
        // a tensor meanwhile would have torch's own copy read it, too.
        if let Err(error) = unsafe { finder.hand_in_all(&mut copying) } {
            py.detach(|| drop(copying));
            return Err(error);
        }
        let under_way = UnderWay { copying, _image: Arc::clone(&self.image), _tensors: tensors.clone().unbind() };
        Ok(TensorCopy { left: finder.left, under_way: Mutex::new(Some(under_way)) })
    }

    /// What Python has of itself from 3.12 on (PEP 688).
    fn __buffer__<'py>(slf: &Bound<'py, Self>, _flags: c_int) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(slf)
    }

    /// # Safety
    /// Called by Python alone, with a `view` to be filled.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let image = &slf.get().image;
        // SAFETY: `view` is Python's; the memory lives and stays where it is as long as `slf`, of which the view takes
        // a reference, and may be written by whoever has it.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), image.as_ptr().cast(), image.size().cast_signed(), 0, flags)
        };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// The copies of tensors into an image. Other threads make them, as far as they are worth them; whoever waits for their
/// end takes part.
#[pyclass(frozen)]
pub(crate) struct TensorCopy {
    left: Vec<usize>,
    /// Until somebody waits for its end, or gives it up.
    under_way: Mutex<Option<UnderWay>>,
}

struct UnderWay {
    copying: Copying,
    // Which is copied into, and out of: dropped after it.
    _image: Arc<staging::FileImage>,
    _tensors: Py<PySequence>,
}

#[pymethods]
impl TensorCopy {
    /// The numbers of the tensors that are not copied, because one is of another dtype, or its values do not lie in host
    /// memory, all of them, as they will lie on the disk.
    #[getter]
    fn left(&self) -> Vec<usize> {
        self.left.clone()
    }

    /// Block until all is copied. Once.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let Some(under_way) = self.taken() else {
            return Err(PyValueError::new_err("it was finished or given up before"));
        };
        enter(py, None, |door| under_way.copying.finish(|begun| Ok(door.tick("stage", begun as u64, 0)?)))
    }

    /// Begin no more; when this returns, nothing is copied, unless another thread waits for its end.
    fn give_up(&self, py: Python<'_>) {
        if let Some(under_way) = self.taken() {
            py.detach(|| drop(under_way.copying));
        }
    }
}

impl TensorCopy {
    fn taken(&self) -> Option<UnderWay> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for TensorCopy {
    fn drop(&mut self) {
        // Waiting for the threads holds up nobody but whoever drops it.
        Python::try_attach(|py| self.give_up(py));
    }
}

/// Where tensors lie in an image. To be kept from one save to the next: thousands of Python's objects are not in the
/// caches any more then, and take longer to read.
///
/// Made of tuples that begin with the first byte, the one past the last, and the dtype; in order, and without overlap.
#[pyclass(frozen)]
pub(crate) struct TensorSpans {
    spans: Vec<Span>,
    dtypes: Vec<Py<PyAny>>,
}

struct Span {
    start: usize,
    stop: usize,
    /// Its number among the dtypes.
    dtype: usize,
}

/// Finds what a `TensorCopy` is to copy.
struct Finder<'a, 'py, T> {
    image: &'a staging::FileImage,
    spans: &'a TensorSpans,
    reader: Option<&'a TensorReader>,
    /// Those that are not found yet, with their spans and numbers.
    tensors: T,
    known: KnownDtypes<'py>,
    /// The numbers of those that are not to be copied.
    left: Vec<usize>,
}

impl<'a, 'py, T> Finder<'a, 'py, T>
where
    T: Iterator<Item = (usize, (PyResult<Bound<'py, PyAny>>, &'a Span))>,
{
    /// Hands in the copies of all tensors, as soon as there is something for another thread to do.
    ///
    /// # Safety
    /// The image and the tensors are there until `copying` is finished or dropped.
    unsafe fn hand_in_all(&mut self, copying: &mut Copying) -> PyResult<()> {
        loop {
            let found = self.copies(copying::WORTH_A_THREAD)?;
            if found.is_empty() {
                return Ok(());
            }
            // SAFETY: the spans lie in the image, one after the other, and sources in the memory of dense tensors.
            unsafe { copying.hand_in(&found) };
        }
    }

    /// The copies of the next tensors, until they have `enough` bytes.
    fn copies(&mut self, enough: usize) -> PyResult<Vec<copying::Copy>> {
        let (mut copies, mut found) = (Vec::new(), 0);
        while found < enough
            && let Some((number, (tensor, span))) = self.tensors.next()
        {
            let tensor = tensor?;
            let dtype = self.spans.dtypes[span.dtype].bind(tensor.py());
            let read = self.reader.map(|reader| reader.plain(&tensor, dtype, &mut self.known)).transpose()?.flatten();
            let Some((address, length)) = read.map_or_else(|| plain(&tensor, dtype), |read| Ok(Some(read)))? else {
                self.left.push(number);
                continue;
            };
            if length != span.stop - span.start {
                return Err(PyValueError::new_err(format!("span {number} is not as large as its tensor")));
            }
            found += length;
            copies.push(copying::Copy {
                source: ptr::with_exposed_provenance(address),
                target: self.image.as_ptr().wrapping_add(span.start),
                length,
            });
        }
        Ok(copies)
    }
}

#[pymethods]
impl TensorSpans {
    #[new]
    fn new(places: &Bound<'_, PySequence>) -> PyResult<Self> {
        let mut spans = Vec::with_capacity(places.len()?);
        let mut dtypes: Vec<Py<PyAny>> = Vec::new();
        let mut end = 0;
        for (number, place) in places.try_iter()?.enumerate() {
            let place = place?.cast_into::<PyTuple>()?;
            let (start, stop): (usize, usize) = (place.get_item(0)?.extract()?, place.get_item(1)?.extract()?);
            if start < end || stop < start {
                return Err(PyValueError::new_err(format!("place {number} is {start}..{stop}, after {end}")));
            }
            end = stop;
            let dtype = place.get_item(2)?;
            let known = dtypes.iter().position(|known| known.is(&dtype));
            spans.push(Span { start, stop, dtype: known.unwrap_or(dtypes.len()) });
            if known.is_none() {
                dtypes.push(dtype.unbind());
            }
        }
        Ok(Self { spans, dtypes })
    }
}

/// Address and bytes of the values of a tensor of torch, where all of them lie in host memory one after the other, as
/// they are and as `dtype`.
fn plain(tensor: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<Option<(usize, usize)>> {
    let py = tensor.py();
    let says = |method| tensor.call_method0(method)?.is_truthy();
    let is_plain = tensor.getattr(intern!(py, "dtype"))?.is(dtype)
        && tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()?
        && says(intern!(py, "is_contiguous"))?
        // Values that torch negates or conjugates when they are looked at.
        && !says(intern!(py, "is_neg"))?
        && !says(intern!(py, "is_conj"))?;
    if !is_plain {
        return Ok(None);
    }
    let address: usize = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
    let size: usize = tensor.getattr(intern!(py, "nbytes"))?.extract()?;
    let itemsize: usize = tensor.getattr(intern!(py, "itemsize"))?.extract()?;
    let offset: usize = tensor.call_method0(intern!(py, "storage_offset"))?.extract()?;
    let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
    let held: usize = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
    if offset.saturating_mul(itemsize).saturating_add(size) > held {
        return Ok(None);
    }
    // Zeros may be what torch keeps no memory for.
    Ok((address > 0 || size == 0).then_some((address, size)))
}

/// Bytes of staging memory of this process: in images, kept for the next ones, and the most that both ever were
/// together.
#[pyfunction]
pub(crate) fn staging_stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let stats = staging::staging_stats();
    let dict = PyDict::new(py);
    dict.set_item("in_use", stats.in_use)?;
    dict.set_item("cached", stats.cached)?;
    dict.set_item("peak", stats.peak)?;
    Ok(dict)
}

/// Give the memory that no image uses back to the system; how many bytes.
#[pyfunction]
pub(crate) fn trim_staging(py: Python<'_>) -> PyResult<usize> {
    enter(py, None, |_| Ok(staging::trim_staging()))
}

/// A file of a checkpoint: its name relative to the folder, its size in bytes, and its checksum, such as
/// `crc64nvme:0123456789abcdef`, or None.
#[pyclass(frozen, eq, hash)]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct FileMetadata {
    facts: tundish_commit::FileMetadata,
}

#[pymethods]
impl FileMetadata {
    #[new]
    fn new(name: String, size: u64, checksum: Option<&str>) -> PyResult<Self> {
        let checksum = checksum
            .map(|text| text.parse::<Checksum>().map_err(|error| BindingError::Value(format!("{text:?} is {error}"))));
        Ok(Self { facts: tundish_commit::FileMetadata { name, size, checksum: checksum.transpose()? } })
    }

    #[getter]
    fn name(&self) -> &str {
        &self.facts.name
    }

    #[getter]
    fn size(&self) -> u64 {
        self.facts.size
    }

    #[getter]
    fn checksum(&self) -> Option<String> {
        self.facts.checksum.map(|checksum| checksum.to_string())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let name = self.facts.name.as_str().into_pyobject(py)?.repr()?;
        let checksum = self.checksum().map_or_else(|| "None".to_owned(), |text| format!("'{text}'"));
        Ok(format!("FileMetadata({name}, {}, {checksum})", self.facts.size))
    }
}

/// Writes the files of one rank, by threads of its own.
///
/// All files, names relative to `folder` and sizes in bytes, are made and preallocated when this returns. At most
/// `writers_per_node` writers to folders beside this one write at once on a node. With `checksum` the CRC-64/NVME of
/// each file is computed on the way.
#[pyclass(frozen)]
pub(crate) struct ShardWriter {
    writer: shards::ShardWriter,
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
        enter(py, None, move |door| {
            let files: Vec<_> = files.iter().map(|(name, size)| (name.as_str(), *size)).collect();
            let options = WriterOptions { checksum, writers_per_node };
            let mut go_on = || look(door, "preallocate", 0, 0);
            Ok(Self { writer: shards::ShardWriter::create(folder, &files, options, &mut go_on)? })
        })
    }

    /// Queue `length` bytes of `image` from `start` on, to be written at `offset` of the file `name`.
    fn write(&self, name: &str, offset: u64, image: &FileImage, start: usize, length: usize) -> PyResult<()> {
        Ok(self.writer.write(name, offset, &image.image, start, length).map_err(BindingError::from)?)
    }

    /// Bytes that are through (written, and summed if they are to be, so that their memory may be used again), and bytes
    /// of all files.
    fn progress(&self) -> (u64, u64) {
        self.writer.progress()
    }

    /// Block until every file and the folders they lie in are durable; what is known of each file, in the order given.
    ///
    /// Ctrl-C ends the waiting and not the writing: wait again, or abort.
    fn finish(&self, py: Python<'_>) -> PyResult<Vec<FileMetadata>> {
        let facts = enter(py, None, |door| {
            loop {
                if let Some(facts) = self.writer.finish(PATIENCE)? {
                    return Ok(facts);
                }
                let (written, total) = self.writer.progress();
                door.tick("write", written, total)?;
            }
        })?;
        Ok(facts.into_iter().map(|facts| FileMetadata { facts }).collect())
    }

    /// Stop writing; when this returns no thread runs and no image is held. The files stay.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, None, |_| {
            self.writer.abort();
            Ok(())
        })
    }
}

impl Drop for ShardWriter {
    fn drop(&mut self) {
        // Waiting for the threads holds up nobody but whoever drops it.
        Python::try_attach(|py| py.detach(|| self.writer.abort()));
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
    enter(py, None, move |_| Ok(FileMetadata { facts: tundish_commit::write_small_file(folder, &name, contents)? }))
}

/// Make a file that another wrote durable, and sum it; its name in the facts is the last part of `path`.
#[pyfunction]
pub(crate) fn checksum_file(py: Python<'_>, path: PathBuf) -> PyResult<FileMetadata> {
    enter(py, None, move |door| {
        let mut go_on = |read, total| look(door, "checksum", read, total);
        Ok(FileMetadata { facts: tundish_commit::checksum_file(path, &mut go_on)? })
    })
}

/// Read every file of the checkpoint in `folder` and compare it with the manifest.
///
/// Raises `CorruptCheckpointError`, whose `paths` are all files that are missing, changed, cut off or in no manifest.
#[pyfunction]
#[pyo3(signature = (folder, *, progress=None))]
pub(crate) fn verify_checkpoint(py: Python<'_>, folder: PathBuf, progress: Option<Py<PyAny>>) -> PyResult<Vec<String>> {
    enter(py, progress, move |door| {
        let mut go_on = |read, total| look(door, "verify", read, total);
        Ok(tundish_commit::root::verify_checkpoint(folder, &mut go_on)?)
    })
}

/// Remove what killed writers of this user left of their turns to write, unless `dry_run`; what it was. `root`: only of
/// those who wrote under that folder.
#[pyfunction]
#[pyo3(signature = (root = None, *, dry_run = false))]
pub(crate) fn sweep_writer_slots(py: Python<'_>, root: Option<PathBuf>, dry_run: bool) -> PyResult<Vec<PathBuf>> {
    enter(py, None, |_| Ok(shards::sweep_slots(root.as_deref(), dry_run)))
}

/// A manifest with the checksum of itself, as it is published; `manifest` is a JSON object.
#[pyfunction]
pub(crate) fn add_manifest_checksum(manifest: &str) -> PyResult<String> {
    let sealed = tundish_commit::seal(manifest);
    Ok(sealed.ok_or_else(|| BindingError::Value("a manifest is a JSON object".to_owned()))?)
}

/// Whether to go on after a look at signals.
fn look(door: &mut Door, phase: &'static str, done: u64, total: u64) -> ControlFlow<()> {
    if door.tick(phase, done, total).is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
}

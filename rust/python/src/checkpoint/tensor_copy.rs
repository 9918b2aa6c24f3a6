//! [`TensorCopy`]: copies tensors into a file image.
//!
//! Invariant: no thread that copies is joined with the GIL held.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PySequence, PyTuple};
use tundish_commit::staging;
use tundish_copying::{self as copying, BackgroundCopy};
use tundish_packing::Progress;

use crate::long_work::enter;
use crate::tensor_inspector::{KnownDtypes, TensorInspector};

/// Copies of tensors into a file image, made by other threads where that pays off. A thread that waits for them helps.
#[pyclass(frozen)]
pub(crate) struct TensorCopy {
    left: Vec<usize>,
    /// `None` after `finish` or `abort`.
    running: Mutex<Option<Running>>,
}

struct Running {
    copying: BackgroundCopy,
    // The target and the sources: dropped after the copying.
    _image: Arc<staging::FileImage>,
    _tensors: Py<PySequence>,
}

#[pymethods]
impl TensorCopy {
    /// The indices of tensors that are not copied: of another dtype, or not dense in host memory.
    #[getter]
    fn left(&self) -> Vec<usize> {
        self.left.clone()
    }

    /// Block until all is copied. Call it once.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let Some(running) = self.take_running() else {
            return Err(PyValueError::new_err("it was finished or aborted before"));
        };
        enter(py, None, |signals| running.copying.finish(|begun| Ok(signals.tick("stage", begun as u64, 0)?)))
    }

    /// Stop. When this returns, nothing is copied, unless another thread is in `finish`.
    fn abort(&self, py: Python<'_>) {
        if let Some(running) = self.take_running() {
            py.detach(|| drop(running.copying));
        }
    }
}

impl TensorCopy {
    pub(super) fn begin(
        image: &Arc<staging::FileImage>,
        places: &Bound<'_, PySequence>,
        tensors: &Bound<'_, PySequence>,
        threads: usize,
        inspector: Option<&TensorInspector>,
    ) -> PyResult<Self> {
        let (copies, left) = find_copies(image, places, tensors, inspector)?;
        // SAFETY: the result holds the image and the tensors as long as anything is copied. Places are disjoint.
        // Freeing the memory of a tensor meanwhile would break torch's own copy too.
        let copying = unsafe { BackgroundCopy::start(copies, threads) };
        let running = Running { copying, _image: Arc::clone(image), _tensors: tensors.clone().unbind() };
        Ok(TensorCopy { left, running: Mutex::new(Some(running)) })
    }

    fn take_running(&self) -> Option<Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for TensorCopy {
    fn drop(&mut self) {
        // Wait for the threads without the GIL.
        Python::try_attach(|py| self.abort(py));
    }
}

/// The copies of the tensors, which lie in the image and do not overlap, and the indices of tensors that cannot be
/// copied here.
fn find_copies(
    image: &staging::FileImage,
    places: &Bound<'_, PySequence>,
    tensors: &Bound<'_, PySequence>,
    inspector: Option<&TensorInspector>,
) -> PyResult<(Vec<copying::CopyRange>, Vec<usize>)> {
    let count = tensors.len()?;
    if places.len()? != count {
        return Err(PyValueError::new_err(format!("there are {} places for {count} tensors", places.len()?)));
    }
    let mut known = KnownDtypes::default();
    let (mut copies, mut left) = (Vec::with_capacity(count), Vec::new());
    let mut end = 0;
    for (number, (tensor, place)) in tensors.try_iter()?.zip(places.try_iter()?).enumerate() {
        let (tensor, place) = (tensor?, place?.cast_into::<PyTuple>()?);
        let (start, stop): (usize, usize) = (place.get_item(0)?.extract()?, place.get_item(1)?.extract()?);
        if start < end || stop < start {
            return Err(PyValueError::new_err(format!("place {number} is {start}..{stop}, after {end}")));
        }
        if stop > image.size() {
            return Err(PyValueError::new_err(format!("place {number} ends at {stop}, after the image")));
        }
        end = stop;
        let dtype = &place.get_item(2)?;
        let seen = inspector.map(|inspector| inspector.plain(&tensor, dtype, &mut known)).transpose()?.flatten();
        let Some((address, length)) = seen.map_or_else(|| plain(&tensor, dtype), |seen| Ok(Some(seen)))? else {
            left.push(number);
            continue;
        };
        if length != stop - start {
            return Err(PyValueError::new_err(format!("place {number} is not as large as its tensor")));
        }
        copies.push(copying::CopyRange {
            source: ptr::with_exposed_provenance(address),
            target: image.as_ptr().wrapping_add(start),
            length,
        });
    }
    Ok((copies, left))
}

/// Address and size in bytes of a torch tensor whose values lie densely in host memory as `dtype`.
fn plain(tensor: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<Option<(usize, usize)>> {
    let py = tensor.py();
    let says = |method| tensor.call_method0(method)?.is_truthy();
    let is_plain = tensor.getattr(intern!(py, "dtype"))?.is(dtype)
        && tensor.getattr(intern!(py, "is_cpu"))?.is_truthy()?
        && says(intern!(py, "is_contiguous"))?
        // Torch negates or conjugates the values of such tensors lazily.
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
    let storage_bytes: usize = storage.call_method0(intern!(py, "nbytes"))?.extract()?;
    if offset.saturating_mul(itemsize).saturating_add(size) > storage_bytes {
        return Ok(None);
    }
    // Torch may keep no memory for zeros.
    Ok((address > 0 || size == 0).then_some((address, size)))
}

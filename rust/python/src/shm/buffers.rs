//! Binds buffers: memory that one process writes and another receives without a copy.
//!
//! Invariants: a buffer is given back only when no export of it is in use in its sender. A received buffer stays as
//! long as the object that exported it.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyMemoryView};
use tundish_copying as copying;
use tundish_shm::arena::{Arena, ArenaPurpose, default_limit};
use tundish_shm::{self as shm, BufferReference};

use super::{DropWithoutGil, as_address, as_tuple, check_signals};
use crate::error::BindingError;
use crate::long_work::enter;
use crate::with_gil::is_over;

/// Copying fewer bytes takes less time than releasing the GIL does.
const MIN_BYTES_WITHOUT_GIL: usize = 128 << 10;

/// A buffer's reference as Python has it: process, descriptor, identity, generation, bytes.
type ReferenceTuple = (u32, i32, u64, u64, usize);

/// Memory for sent buffers. It keeps up to `limit_bytes` for the next ones; by default a sixteenth of the memory.
#[pyclass(frozen)]
pub(crate) struct SegmentArena {
    arena: DropWithoutGil<Arc<Arena>>,
}

#[pymethods]
impl SegmentArena {
    #[new]
    #[pyo3(signature = (limit_bytes=None))]
    fn new(limit_bytes: Option<usize>) -> Self {
        let limit = limit_bytes.unwrap_or_else(default_limit);
        SegmentArena { arena: DropWithoutGil::new(Arc::new(Arena::new(ArenaPurpose::Messages, limit))) }
    }

    /// Returns a writable buffer of `nbytes`, whose contents are not defined.
    fn take(&self, py: Python<'_>, nbytes: usize) -> PyResult<SendBuffer> {
        let arena = &*self.arena;
        let buffer =
            enter(py, None, move |signals| Ok(shm::SendBuffer::take(arena, nbytes, &mut || check_signals(signals))?))?;
        let state = State { buffer: Some(DropWithoutGil::new(buffer)), exports: 0, end: None };
        Ok(SendBuffer { state: Mutex::new(state) })
    }

    /// Returns the bytes in use, kept idle, kept while their receiver still has them, and their peak.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.arena.stats());
        stats.record().into_py_dict(py)
    }
}

/// Returns the default limit of an arena: a sixteenth of the memory that this process can have.
#[pyfunction]
pub(crate) fn default_arena_limit() -> usize {
    default_limit()
}

/// How a buffer is given back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReleasedOrRevoked {
    Released,
    Revoked,
}

struct State {
    /// Until it is given back.
    buffer: Option<DropWithoutGil<shm::SendBuffer>>,
    exports: usize,
    end: Option<ReleasedOrRevoked>,
}

/// A writable buffer that is to be sent.
#[pyclass(frozen)]
pub(crate) struct SendBuffer {
    state: Mutex<State>,
}

impl SendBuffer {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, end: ReleasedOrRevoked) {
        let mut state = self.lock();
        state.end = Some(end);
        let ended = state.take_if_over();
        drop(state);
        drop(ended);
    }
}

impl State {
    /// Returns the buffer if it is given back and no export is in use. Drop it without the lock.
    fn take_if_over(&mut self) -> Option<DropWithoutGil<shm::SendBuffer>> {
        let end = self.end.filter(|_| self.exports == 0)?;
        let mut buffer = self.buffer.take()?;
        if end == ReleasedOrRevoked::Revoked {
            buffer.revoke();
        }
        Some(buffer)
    }

    fn buffer(&mut self) -> PyResult<&mut DropWithoutGil<shm::SendBuffer>> {
        self.buffer
            .as_mut()
            .filter(|_| self.end.is_none())
            .ok_or_else(|| BindingError::Value("the buffer was given back already".to_owned()).into())
    }
}

#[pymethods]
impl SendBuffer {
    /// Returns the reference for `BufferReceiver.open` of the one receiver. From here on the buffer counts as sent.
    fn reference(&self) -> Result<ReferenceTuple, BindingError> {
        let reference = self.lock().buffer()?.reference()?;
        let (process, descriptor, identity, generation) = as_tuple(&reference.address);
        Ok((process, descriptor, identity, generation, reference.len))
    }

    /// The descriptor of its memory. A receiver that has a copy can open the buffer after this process's death.
    #[getter]
    fn descriptor(&self) -> PyResult<i32> {
        Ok(self.lock().buffer()?.descriptor())
    }

    /// Gives the buffer back. It is used again when its receiver has opened and dropped it, and its exports in this
    /// process have ended. The receiver of a buffer that was not sent is not waited for. A second call does nothing.
    fn release(&self) {
        self.end(ReleasedOrRevoked::Released);
    }

    /// Gives the buffer back and revokes it: a receiver that opens it later is refused.
    fn revoke(&self) {
        self.end(ReleasedOrRevoked::Revoked);
    }

    /// Copies `sizes[i]` bytes at `addresses[i]` to offset `offsets[i]` of the buffer, on up to `threads` threads.
    ///
    /// All of them are native 64-bit integers. Places are in order and do not overlap. The caller keeps the memory at
    /// the addresses until this returns.
    fn fill(slf: &Bound<'_, Self>, addresses: &[u8], sizes: &[u8], offsets: &[u8], threads: usize) -> PyResult<()> {
        // An export, so that the buffer is not given back meanwhile.
        let target = PyBuffer::<u8>::get(slf.as_any())?;
        let (addresses, sizes, offsets) = (words(addresses), words(sizes), words(offsets));
        if addresses.len() != sizes.len() || addresses.len() != offsets.len() {
            return Err(BindingError::Value("addresses, sizes and offsets are as many".to_owned()).into());
        }
        let to = target.buf_ptr().cast::<u8>();
        let mut copies = Vec::with_capacity(sizes.len());
        let (mut end, mut total) = (0, 0);
        for ((address, length), offset) in addresses.zip(sizes).zip(offsets).filter(|((_, size), _)| *size > 0) {
            let next = offset.checked_add(length).filter(|&next| offset >= end && next <= target.len_bytes());
            end = next.ok_or_else(|| {
                let room = target.len_bytes();
                BindingError::Value(format!("{length} bytes at {offset}, after {end}, do not fit into {room}"))
            })?;
            total += length;
            let source = std::ptr::with_exposed_provenance(address);
            copies.push(copying::CopyRange { source, target: to.wrapping_add(end - length), length });
        }
        if total < MIN_BYTES_WITHOUT_GIL {
            for copy in copies {
                // SAFETY: as below.
                unsafe { copy.source.copy_to_nonoverlapping(copy.target, copy.length) };
            }
            return Ok(());
        }
        enter(slf.py(), None, move |signals| {
            // SAFETY: targets lie in the buffer, which is exported and therefore stays, one after the other; sources
            // in memory that the caller keeps.
            Ok(unsafe { copying::copy(&copies, threads, |_| check_signals(signals)) }?)
        })
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.lock().buffer()?.len())
    }

    /// Returns a `memoryview`. Python 3.12 and later have this method built in (PEP 688).
    fn __buffer__<'py>(slf: &Bound<'py, Self>, _flags: c_int) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(slf)
    }

    /// # Safety
    /// Called by Python alone, with a `view` to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let mut state = slf.get().lock();
        let (data, len) = match state.buffer() {
            Ok(buffer) => (buffer.data(), buffer.len()),
            Err(error) => return Err(PyBufferError::new_err(error.to_string())),
        };
        // SAFETY: `view` is Python's; the bytes are mapped until the last export ends.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), data.cast(), len.cast_signed(), 0, flags) };
        if filled != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        state.exports += 1;
        Ok(())
    }

    /// # Safety
    /// Called by Python alone, once for each export.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        let mut state = self.lock();
        state.exports -= 1;
        let ended = state.take_if_over();
        drop(state);
        drop(ended);
    }
}

/// A lease of a buffer that was sent. Keep it until the receivers have opened the buffer, or never will. When it is
/// dropped, the buffer is revoked. The buffer is used again when no view of it is left.
///
/// It is written in Rust since Ctrl-C would be lost in a `__del__` of Python.
#[pyclass(frozen)]
pub(crate) struct SentBuffer {
    #[pyo3(get)]
    buffer: Py<SendBuffer>,
    #[pyo3(get)]
    reference: ReferenceTuple,
}

#[pymethods]
impl SentBuffer {
    /// Marks `buffer` as sent.
    #[new]
    fn new(buffer: Bound<'_, SendBuffer>) -> PyResult<Self> {
        let reference = buffer.get().reference()?;
        Ok(SentBuffer { buffer: buffer.unbind(), reference })
    }
}

impl Drop for SentBuffer {
    fn drop(&mut self) {
        // At the end of the interpreter, receivers may still open the buffer.
        if !is_over() {
            self.buffer.get().revoke();
        }
    }
}

/// Reads native 64-bit integers; an incomplete one at the end is left out.
fn words(bytes: &[u8]) -> impl ExactSizeIterator<Item = usize> {
    bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word) as usize)
}

/// Receives buffers. It keeps mappings for the next ones, bounded in bytes and number.
#[pyclass(frozen)]
pub(crate) struct BufferReceiver {
    buffers: DropWithoutGil<shm::BufferReceiver>,
}

#[pymethods]
impl BufferReceiver {
    #[new]
    fn new() -> Self {
        BufferReceiver { buffers: DropWithoutGil::new(shm::BufferReceiver::default()) }
    }

    /// Opens the buffer of `reference`, once, and acknowledges it to its sender.
    fn open(&self, py: Python<'_>, reference: ReferenceTuple) -> PyResult<ReceivedBuffer> {
        let (process, descriptor, identity, generation, len) = reference;
        let reference = BufferReference { address: as_address((process, descriptor, identity, generation)), len };
        let view = enter(py, None, |_| Ok(self.buffers.open(&reference)?))?;
        Ok(ReceivedBuffer { view: DropWithoutGil::new(view) })
    }

    /// The number of opened buffers that are still in use.
    #[getter]
    fn views(&self) -> usize {
        self.buffers.views()
    }

    /// Takes over `descriptor`, which `sender` sent for its buffers' memory: they can be opened even if that has died.
    fn adopt(&self, py: Python<'_>, descriptor: i32, sender: u32) -> PyResult<()> {
        if descriptor < 0 {
            return Err(BindingError::Value(format!("{descriptor} is no descriptor")).into());
        }
        // SAFETY: the caller hands the descriptor over.
        let file = unsafe { OwnedFd::from_raw_fd(descriptor) };
        enter(py, None, move |_| Ok(self.buffers.adopt(file, sender)?))
    }

    /// Drops the mappings that are kept for `sender`, which has died. Open buffers stay.
    fn forget(&self, py: Python<'_>, sender: u32) {
        py.detach(|| self.buffers.forget(sender));
    }
}

/// A buffer that was received, as a writable buffer.
#[pyclass(frozen)]
pub(crate) struct ReceivedBuffer {
    view: DropWithoutGil<shm::ReceivedBuffer>,
}

#[pymethods]
impl ReceivedBuffer {
    fn __len__(&self) -> usize {
        self.view.len()
    }

    /// Returns a `memoryview`. Python 3.12 and later have this method built in (PEP 688).
    fn __buffer__<'py>(slf: &Bound<'py, Self>, _flags: c_int) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(slf)
    }

    /// # Safety
    /// Called by Python alone, with a `view` to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let buffer = &slf.get().view;
        // SAFETY: `view` is Python's; the bytes are mapped as long as `slf` lives, of which the view takes a reference,
        // and only their receiver writes them.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), buffer.data().cast(), buffer.len().cast_signed(), 0, flags)
        };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

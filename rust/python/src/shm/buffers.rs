//! Binds buffers: memory that one process writes and another receives without a copy.
//!
//! Invariants: a buffer is given back only when no export of it is in use in its sender. A received one is its
//! receiver's as long as the object that exported it.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyMemoryView};
use tundish_copying::{self as copying, AdaptiveCopy};
use tundish_shm::arena::{Arena, Use, default_limit};
use tundish_shm::{self as shm, Reference};

use super::drop_without_gil::DropWithoutGil;
use super::{as_address, as_tuple, descriptor, look};
use crate::enter::enter;
use crate::error::BindingError;
use crate::held::is_over;

/// Less is copied sooner than the GIL is let go of and taken again.
const WORTH_LETTING_GO: usize = 128 << 10;

/// A buffer's reference as Python has it: process, descriptor, identity, generation, bytes.
type ReferenceTuple = (u32, i32, u64, u64, usize);

/// Memory that buffers are sent in, kept for the next ones up to `limit_bytes`; by default a sixteenth of the memory.
#[pyclass(frozen)]
pub(crate) struct SegmentArena {
    arena: DropWithoutGil<Arc<Arena>>,
    /// Of all its buffers: their receivers are alike.
    copier: Arc<AdaptiveCopy>,
}

#[pymethods]
impl SegmentArena {
    #[new]
    #[pyo3(signature = (limit_bytes=None))]
    fn new(limit_bytes: Option<usize>) -> Self {
        let limit = limit_bytes.unwrap_or_else(default_limit);
        SegmentArena { arena: DropWithoutGil::new(Arc::new(Arena::new(Use::Messages, limit))), copier: Arc::default() }
    }

    /// A buffer of `nbytes`, to be written. What lies in it is not defined.
    fn take(&self, py: Python<'_>, nbytes: usize) -> PyResult<SendBuffer> {
        let arena = &*self.arena;
        let buffer = enter(py, None, move |door| Ok(shm::SendBuffer::take(arena, nbytes, &mut || look(door))?))?;
        let state = State { buffer: Some(DropWithoutGil::new(buffer)), exports: 0, end: None };
        Ok(SendBuffer { state: Mutex::new(state), copier: Arc::clone(&self.copier) })
    }

    /// Bytes in use or on their way, kept idle, kept while their receiver still has them, and the most there ever were.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.arena.stats());
        let dict = PyDict::new(py);
        dict.set_item("in_use", stats.in_use)?;
        dict.set_item("cached", stats.cached)?;
        dict.set_item("escaped", stats.escaped)?;
        dict.set_item("peak", stats.peak)?;
        Ok(dict)
    }
}

/// What an arena keeps where nobody says another number: a sixteenth of the memory that this process can have.
#[pyfunction]
pub(crate) fn default_arena_limit() -> usize {
    default_limit()
}

/// Whether the owner of the segment behind `fd` will send nothing in it any more, nor is anything of it on its way.
#[pyfunction]
pub(crate) fn is_segment_retired(fd: RawFd) -> PyResult<bool> {
    Ok(shm::is_retired_behind(descriptor::borrow(fd)?).map_err(BindingError::from)?)
}

/// How a buffer is given back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Released,
    Revoked,
}

struct State {
    /// Until it is given back.
    buffer: Option<DropWithoutGil<shm::SendBuffer>>,
    exports: usize,
    end: Option<End>,
}

/// Bytes to be sent, as a writable buffer.
#[pyclass(frozen)]
pub(crate) struct SendBuffer {
    state: Mutex<State>,
    copier: Arc<AdaptiveCopy>,
}

impl SendBuffer {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, end: End) {
        let mut state = self.lock();
        state.end = Some(end);
        let ended = state.take_if_over();
        drop(state);
        drop(ended);
    }
}

impl State {
    /// What is to be dropped now that nobody uses it; without the lock.
    fn take_if_over(&mut self) -> Option<DropWithoutGil<shm::SendBuffer>> {
        let end = self.end.filter(|_| self.exports == 0)?;
        let mut buffer = self.buffer.take()?;
        if end == End::Revoked {
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
    /// What `BufferReceiver.open` of the one receiver takes. From here on the buffer counts as sent.
    fn reference(&self) -> PyResult<ReferenceTuple> {
        let reference = self.lock().buffer()?.reference().map_err(BindingError::from)?;
        let (process, descriptor, identity, generation) = as_tuple(&reference.address);
        Ok((process, descriptor, identity, generation, reference.len))
    }

    /// The descriptor of its memory, for anyone who sends that along so that the buffer outlives this process.
    #[getter]
    fn descriptor(&self) -> PyResult<i32> {
        Ok(self.lock().buffer()?.descriptor())
    }

    /// Done with it: used again when the receiver came and let go of it, or at once if it was not sent. While buffers
    /// of it are in use here, that waits for them. Done twice is done once.
    fn release(&self) {
        self.end(End::Released);
    }

    /// Done with it, and no receiver is to come: who comes later is refused.
    fn revoke(&self) {
        self.end(End::Revoked);
    }

    /// Copies pieces of memory into the buffer, on up to `threads` threads: `sizes[i]` bytes at `addresses[i]` to where
    /// `offsets[i] + shift` is, all of them native 64-bit integers. Places are in order and do not overlap; the memory
    /// at the addresses is the caller's, who holds it until this returns.
    fn fill(
        slf: &Bound<'_, Self>,
        addresses: &[u8],
        sizes: &[u8],
        offsets: &[u8],
        shift: isize,
        threads: usize,
    ) -> PyResult<()> {
        // An export, so that nobody gives the buffer back meanwhile.
        let target = PyBuffer::<u8>::get(slf.as_any())?;
        let (addresses, sizes, offsets) = (words(addresses), words(sizes), words(offsets));
        if addresses.len() != sizes.len() || addresses.len() != offsets.len() {
            return Err(BindingError::Value("addresses, sizes and offsets are as many".to_owned()).into());
        }
        let to = target.buf_ptr().cast::<u8>();
        let mut copies = Vec::with_capacity(sizes.len());
        let (mut end, mut total) = (0, 0);
        for ((address, length), offset) in addresses.zip(sizes).zip(offsets).filter(|((_, size), _)| *size > 0) {
            let place = offset.checked_add_signed(shift).filter(|&place| place >= end);
            let next = place.and_then(|place| place.checked_add(length)).filter(|&next| next <= target.len_bytes());
            end = next.ok_or_else(|| {
                let room = target.len_bytes();
                BindingError::Value(format!(
                    "{length} bytes at {offset}, moved by {shift}, after {end}, do not fit into {room}"
                ))
            })?;
            total += length;
            let source = std::ptr::with_exposed_provenance(address);
            copies.push(copying::Copy { source, target: to.wrapping_add(end - length), length });
        }
        if total < WORTH_LETTING_GO {
            for copy in copies {
                // SAFETY: as below.
                unsafe { copy.source.copy_to_nonoverlapping(copy.target, copy.length) };
            }
            return Ok(());
        }
        let copier = &slf.get().copier;
        enter(slf.py(), None, move |door| {
            // SAFETY: targets lie in the buffer, which is exported and therefore stays, one after the other; sources
            // in memory that the caller holds. Anyone who frees that meanwhile would have torch's own copy read it, too.
            Ok(unsafe { copier.copy(&copies, threads, |_| look(door)) }?)
        })
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.lock().buffer()?.len())
    }

    /// What Python has of itself from 3.12 on (PEP 688).
    fn __buffer__<'py>(slf: &Bound<'py, Self>, _flags: c_int) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(slf)
    }

    /// # Safety
    /// Called by Python alone, with a `view` to be filled.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let mut state = slf.get().lock();
        let (data, len) = match state.buffer() {
            Ok(buffer) => (buffer.data(), buffer.len()),
            Err(error) => return Err(PyBufferError::new_err(error.to_string())),
        };
        // SAFETY: `view` is Python's; the bytes are mapped until the last export ends, and may be written by anyone who
        // has one.
        let filled = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), data.cast(), len.cast_signed(), 0, flags) };
        if filled != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        state.exports += 1;
        Ok(())
    }

    /// # Safety
    /// Called by Python alone, once for each buffer that it got.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        let mut state = self.lock();
        state.exports -= 1;
        let ended = state.take_if_over();
        drop(state);
        drop(ended);
    }
}

/// A buffer that was sent, to one receiver or to several, each with pages of its own as soon as it writes.
///
/// Anyone who gives it to one of them holds on to it until that one has looked at the message: it has it by then, or never
/// will. When nobody does any more the buffer is used again, as soon as nothing of it is left.
///
/// Not in Python, where Ctrl-C may come as it is freed, and is lost.
#[pyclass(frozen)]
pub(crate) struct BufferLease {
    #[pyo3(get)]
    buffer: Py<SendBuffer>,
    #[pyo3(get)]
    reference: ReferenceTuple,
}

#[pymethods]
impl BufferLease {
    /// From here on `buffer` counts as sent.
    #[new]
    fn new(buffer: Bound<'_, SendBuffer>) -> PyResult<Self> {
        let reference = buffer.get().reference()?;
        Ok(BufferLease { buffer: buffer.unbind(), reference })
    }
}

impl Drop for BufferLease {
    fn drop(&mut self) {
        // What was given is there for its receivers though the interpreter comes to its end.
        if !is_over() {
            self.buffer.get().revoke();
        }
    }
}

/// Native 64-bit integers; a rest that is none is left out.
fn words(bytes: &[u8]) -> impl ExactSizeIterator<Item = usize> {
    bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word) as usize)
}

/// Where a process receives buffers. Mappings are kept for the next ones, bounded in bytes and number.
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

    /// Receive the buffer that `reference` leads to, once; its sender is told that it came.
    fn open(&self, py: Python<'_>, reference: ReferenceTuple) -> PyResult<ReceivedBuffer> {
        let (process, descriptor, identity, generation, len) = reference;
        let reference = Reference { address: as_address((process, descriptor, identity, generation)), len };
        let view = enter(py, None, |_| Ok(self.buffers.open(&reference)?))?;
        Ok(ReceivedBuffer { view: DropWithoutGil::new(view) })
    }

    /// How many buffers were opened and are still in use.
    #[getter]
    fn views(&self) -> usize {
        self.buffers.views()
    }

    /// Take over `descriptor`, which `sender` sent for its buffers' memory: they are found even when that has died.
    fn adopt(&self, py: Python<'_>, descriptor: i32, sender: u32) -> PyResult<()> {
        if descriptor < 0 {
            return Err(BindingError::Value(format!("{descriptor} is no descriptor")).into());
        }
        // SAFETY: the caller's, who hands it over.
        let file = unsafe { OwnedFd::from_raw_fd(descriptor) };
        enter(py, None, move |_| Ok(self.buffers.adopt(file, sender)?))
    }

    /// Let go of what is kept for buffers of `sender`, which has died. What is open stays.
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

    /// What Python has of itself from 3.12 on (PEP 688).
    fn __buffer__<'py>(slf: &Bound<'py, Self>, _flags: c_int) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(slf)
    }

    /// # Safety
    /// Called by Python alone, with a `view` to be filled.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let buffer = &slf.get().view;
        // SAFETY: `view` is Python's; the bytes are mapped as long as `slf`, of which the view takes a reference, and
        // are its receiver's to write.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), buffer.data().cast(), buffer.len().cast_signed(), 0, flags)
        };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

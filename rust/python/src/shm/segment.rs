//! Segments that hold an array, and views of them.
//!
//! What always holds: a view keeps its memory and a lease; a segment goes back to its arena when neither Python's
//! object nor a view of this process has it any more.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::Arc;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCFunction, PyDict, PyMemoryView};
use tundish_shm::arena::{Arena, Counted};
use tundish_shm::lend::Copied;
use tundish_shm::registry::{self, Attachment, PrivateCopy};
use tundish_shm::{Lease, Segment};

use super::own_name::{OwnName, take};
use super::reach::{find_named, reach};
use super::unheld::Unheld;
use super::{AddressTuple, as_address, as_tuple, look};
use crate::enter::enter;
use crate::error::BindingError;

/// A segment of this process. Without a name, it goes back to the arena of arrays.
pub(super) struct Own {
    segment: Option<Segment>,
    len: usize,
    layout: Vec<u8>,
    /// Let go of after the segment.
    name: Option<OwnName>,
    /// Of one with a name.
    _counted: Option<Counted>,
}

impl Drop for Own {
    fn drop(&mut self) {
        match self.segment.take() {
            Some(segment) if self.name.is_none() => Arena::of_arrays().give_back(segment),
            segment => drop(segment),
        }
    }
}

impl Own {
    fn new(segment: Segment, len: usize, layout: Vec<u8>, name: Option<OwnName>) -> Self {
        let counted = name.is_some().then(|| Counted::new(segment.size()));
        Own { segment: Some(segment), len, layout, name, _counted: counted }
    }

    fn segment(&self) -> PyResult<&Segment> {
        self.segment.as_ref().ok_or_else(|| PyValueError::new_err("the segment was given back"))
    }
}

/// Who this process is to a segment.
pub(super) enum Role {
    Owner(Arc<Own>),
    Reader(Arc<Attachment>),
    /// It could neither be mapped nor inherited.
    Copied(Arc<Copied>),
}

/// A segment that holds an array: one's own, or one that this process is attached to.
#[pyclass(frozen)]
pub(crate) struct SharedSegment {
    role: Unheld<Role>,
}

/// The memory of an array, as a buffer.
#[pyclass(frozen)]
pub(crate) struct SegmentView {
    memory: Unheld<ViewedMemory>,
    /// Let go of after the memory, so that the segment can be used again at once.
    _owner: Unheld<Option<Arc<Own>>>,
    len: usize,
}

/// What a view keeps.
enum ViewedMemory {
    /// To be read.
    Shared(Arc<Attachment>),
    /// The owner's mapping, with a lease of the view's own.
    Written { data: *mut u8, _lease: Lease },
    /// To be written by this process alone.
    Private(PrivateCopy),
    /// To be read, and this process's alone.
    Copied(Arc<Copied>),
    /// As above, and to be written.
    Own(Copied),
}

// SAFETY: the pointer is an address, which the view's owner keeps mapped; who uses it answers for what is there.
unsafe impl Send for ViewedMemory {}
// SAFETY: as above.
unsafe impl Sync for ViewedMemory {}

/// Bytes that are read while the GIL is released.
struct Source(*const u8);

// SAFETY: only an address; who reads from it answers for what is there.
unsafe impl Send for Source {}

#[pymethods]
impl SharedSegment {
    /// A segment that holds a copy of `data`, whose bytes lie one after the other; under a name, if one is given.
    #[staticmethod]
    #[pyo3(signature = (data, layout, huge_pages, name=None))]
    fn copy_of(
        py: Python<'_>,
        data: PyBuffer<u8>,
        layout: Vec<u8>,
        huge_pages: bool,
        name: Option<&str>,
    ) -> PyResult<Self> {
        if !data.is_c_contiguous() {
            return Err(PyValueError::new_err("the bytes do not lie one after the other"));
        }
        let len = data.len_bytes();
        let source = Source(data.buf_ptr().cast());
        let own = enter(py, None, move |door| {
            let source = source;
            let (mut segment, name) = take(len, huge_pages, name, door)?;
            // SAFETY: the caller holds the buffer until this returns.
            let filled = unsafe { segment.fill(source.0, len, &mut || look(door)) };
            let published = filled.and_then(|()| segment.publish(len, &layout));
            let named = published.and_then(|()| match &name {
                Some(name) => name.appear(&segment, &mut || look(door)),
                None => Ok(()),
            });
            let own = Own::new(segment, len, layout, name);
            Ok(named.map(|()| own)?)
        })?;
        drop(data);
        Ok(SharedSegment { role: Unheld::new(Role::Owner(Arc::new(own))) })
    }

    /// A segment for `size` bytes that its owner is to write: zeros, or where not `clear` whatever an earlier use left.
    /// It gets `name` with `appear` only.
    #[staticmethod]
    #[pyo3(signature = (size, layout, huge_pages, clear, name=None))]
    fn make(
        py: Python<'_>,
        size: usize,
        layout: Vec<u8>,
        huge_pages: bool,
        clear: bool,
        name: Option<&str>,
    ) -> PyResult<Self> {
        let own = enter(py, None, move |door| {
            let (mut segment, name) = take(size, huge_pages, name, door)?;
            let cleared = if clear { segment.clear(size, &mut || look(door)) } else { Ok(()) };
            let done = cleared.and_then(|()| segment.publish(size, &layout));
            let own = Own::new(segment, size, layout, name);
            Ok(done.map(|()| own)?)
        })?;
        Ok(SharedSegment { role: Unheld::new(Role::Owner(Arc::new(own))) })
    }

    /// Take the name that the segment was made for: from here on others find it. Without one nothing happens.
    fn appear(&self, py: Python<'_>) -> PyResult<()> {
        let Role::Owner(own) = &*self.role else { return Ok(()) };
        let Some(name) = &own.name else { return Ok(()) };
        let segment = own.segment()?;
        enter(py, None, |door| Ok(name.appear(segment, &mut || look(door))?))
    }

    /// The segment at `address`, through `inherited`, a descriptor of this process, where there is one, or by its
    /// `name`, or over the socket that is called `socket_name`.
    #[staticmethod]
    #[pyo3(signature = (address, inherited=None, name=None, socket_name=None))]
    fn attach(
        py: Python<'_>,
        address: AddressTuple,
        inherited: Option<i32>,
        name: Option<&str>,
        socket_name: Option<&str>,
    ) -> PyResult<Self> {
        let address = as_address(address);
        Ok(SharedSegment { role: Unheld::new(reach(py, &address, inherited, name, socket_name)?) })
    }

    /// The segment of this name.
    #[staticmethod]
    fn attach_named(py: Python<'_>, name: &str) -> PyResult<Self> {
        let role = find_named(py, name, None)?.map_err(BindingError::from)?;
        Ok(SharedSegment { role: Unheld::new(role) })
    }

    /// Whether it is a copy that this process alone has, for want of a way to share it.
    #[getter]
    fn is_copy(&self) -> bool {
        matches!(*self.role, Role::Copied(_))
    }

    /// Bytes of data.
    #[getter]
    fn nbytes(&self) -> usize {
        match &*self.role {
            Role::Owner(own) => own.len,
            Role::Reader(attachment) => attachment.facts().data_len,
            Role::Copied(copied) => copied.facts().data_len,
        }
    }

    /// What the maker said of the data.
    #[getter]
    fn layout<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(
            py,
            match &*self.role {
                Role::Owner(own) => &own.layout,
                Role::Reader(attachment) => &attachment.facts().layout,
                Role::Copied(copied) => &copied.facts().layout,
            },
        )
    }

    /// Whether this process made it, or inherited it from the one that did.
    #[getter]
    fn is_owner(&self) -> bool {
        matches!(*self.role, Role::Owner(_))
    }

    /// Where others find it: process, descriptor, identity, generation.
    #[getter]
    fn address(&self) -> PyResult<AddressTuple> {
        Ok(match &*self.role {
            Role::Owner(own) => as_tuple(&own.segment()?.address()),
            Role::Reader(attachment) => as_tuple(&attachment.address()),
            Role::Copied(_) => {
                let reason = "this process has a private copy of it only; pass on the handle that it was attached by";
                return Err(BindingError::Value(format!("the segment has no handle here: {reason}")).into());
            }
        })
    }

    /// The data, to be read.
    fn readonly(&self) -> PyResult<SegmentView> {
        Ok(self.view(match &*self.role {
            Role::Copied(copied) => ViewedMemory::Copied(Arc::clone(copied)),
            _ => ViewedMemory::Shared(self.attachment()?),
        }))
    }

    /// The data, to be read and to be written by this process alone; nobody else sees what it writes.
    fn private(&self, py: Python<'_>) -> PyResult<SegmentView> {
        if let Role::Copied(copied) = &*self.role {
            let again = enter(py, None, |_| Ok(copied.again()?))?;
            return Ok(self.view(ViewedMemory::Own(again)));
        }
        let copy = self.attachment()?.private().map_err(BindingError::from)?;
        Ok(self.view(ViewedMemory::Private(copy)))
    }

    /// The data, to be written for all to see; for the owner.
    fn writable(&self) -> PyResult<SegmentView> {
        let Role::Owner(own) = &*self.role else {
            return Err(PyValueError::new_err("only the owner of a segment writes to it"));
        };
        let segment = own.segment()?;
        let lease = segment.lease().map_err(BindingError::from)?;
        Ok(self.view(ViewedMemory::Written { data: segment.data(), _lease: lease }))
    }
}

impl SharedSegment {
    fn attachment(&self) -> PyResult<Arc<Attachment>> {
        let attached = match &*self.role {
            Role::Owner(own) => match &own.name {
                Some(name) => registry::attach_own(own.segment()?, name.keeper()),
                None => registry::attach(&own.segment()?.address(), None),
            },
            Role::Reader(attachment) => Ok(Arc::clone(attachment)),
            Role::Copied(_) => return Err(PyValueError::new_err("a private copy is not attached to anything")),
        };
        Ok(attached.map_err(BindingError::from)?)
    }

    fn view(&self, memory: ViewedMemory) -> SegmentView {
        let owner = match &*self.role {
            Role::Owner(own) => Some(Arc::clone(own)),
            Role::Reader(_) | Role::Copied(_) => None,
        };
        SegmentView { memory: Unheld::new(memory), _owner: Unheld::new(owner), len: self.nbytes() }
    }
}

#[pymethods]
impl SegmentView {
    /// What Python has of itself from 3.12 on (PEP 688).
    fn __buffer__<'py>(slf: &Bound<'py, Self>, _flags: c_int) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(slf)
    }

    /// # Safety
    /// Called by Python alone, with a `view` to be filled.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let (data, is_readonly) = match &*slf.get().memory {
            ViewedMemory::Shared(attachment) => (attachment.data().cast_mut(), 1),
            ViewedMemory::Written { data, .. } => (*data, 0),
            ViewedMemory::Private(copy) => (copy.data(), 0),
            ViewedMemory::Copied(copied) => (copied.data(), 1),
            ViewedMemory::Own(copied) => (copied.data(), 0),
        };
        // SAFETY: `view` is Python's; the bytes are mapped as long as `slf` lives, of which the view takes a reference,
        // and what is mapped for reading only is told to be so.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), data.cast(), slf.get().len.cast_signed(), is_readonly, flags)
        };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// A descriptor of this process that is open on the segment at `address`.
#[pyfunction]
pub(crate) fn held_descriptor(address: AddressTuple) -> Option<i32> {
    registry::held_descriptor(&as_address(address))
}

/// Bytes of shared memory of this process.
#[pyfunction]
pub(crate) fn shared_stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let attached = registry::attached_bytes();
    let stats = py.detach(|| Arena::of_arrays().stats());
    let dict = PyDict::new(py);
    dict.set_item("mapped", stats.in_use + attached)?;
    dict.set_item("cached", stats.cached)?;
    dict.set_item("escaped", stats.escaped)?;
    dict.set_item("peak", stats.peak)?;
    Ok(dict)
}

/// Keep up to `limit_bytes` of segments for the next arrays.
#[pyfunction]
pub(crate) fn set_shared_cache_limit(py: Python<'_>, limit_bytes: usize) {
    py.detach(|| Arena::of_arrays().set_limit(limit_bytes));
}

/// A child made by `fork` would otherwise keep alive what its parent gives back to the system.
pub(crate) fn forget_in_children(py: Python<'_>) -> PyResult<()> {
    let forget = PyCFunction::new_closure(py, None, None, |_, _| {
        Arena::forget_inherited();
        tundish_store::Node::forget_inherited();
    })?;
    let when = PyDict::new(py);
    when.set_item("after_in_child", forget)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&when))?;
    Ok(())
}

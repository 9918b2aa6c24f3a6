//! Binds segments that hold an array, views of them, and the list and the sweep of those with a name.
//!
//! Invariants: a view keeps its memory and a lease. A segment goes back to its arena when neither Python's object nor a
//! view of this process has it any more. The name of a segment is claimed first, and given to it when it is whole.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes, PyCFunction, PyDict, PyMemoryView};
use tundish_shm::arena::{self, Arena, CountedBytes};
use tundish_shm::attachment::{self, Attachment, Keeper};
use tundish_shm::named::{self, NameClaim, NameHold, NamedSegment, SegmentFolder, SegmentName, sweep};
use tundish_shm::{CheckCancelled, Lease, PrivateMapping, Segment, SegmentAddress, ShmError};

use super::{AddressTuple, DropWithoutGil, as_address, as_tuple, check_signals};
use crate::error::BindingError;
use crate::long_work::{SignalCheck, enter};

/// A segment that this process made. Without a name, it goes back to the arena of arrays.
pub(super) struct OwnedSegment {
    segment: Option<Segment>,
    len: usize,
    layout: Vec<u8>,
    /// Dropped after the segment.
    name: Option<ClaimedName>,
    /// Only for a segment with a name.
    _counted: Option<CountedBytes>,
}

impl Drop for OwnedSegment {
    fn drop(&mut self) {
        match self.segment.take() {
            Some(segment) if self.name.is_none() => Arena::of_arrays().give_back(segment),
            segment => drop(segment),
        }
    }
}

impl OwnedSegment {
    fn new(segment: Segment, len: usize, layout: Vec<u8>, name: Option<ClaimedName>) -> Self {
        let counted = name.is_some().then(|| CountedBytes::new(segment.size()));
        OwnedSegment { segment: Some(segment), len, layout, name, _counted: counted }
    }

    fn segment(&self) -> PyResult<&Segment> {
        self.segment.as_ref().ok_or_else(|| PyValueError::new_err("the segment was given back"))
    }
}

/// The role of this process for a segment.
pub(super) enum SegmentRole {
    Owner(Arc<OwnedSegment>),
    Reader(Arc<Attachment>),
}

/// A segment that holds an array: made by this process, or attached to.
#[pyclass(frozen)]
pub(crate) struct SharedSegment {
    role: DropWithoutGil<SegmentRole>,
}

/// The memory of an array, as a buffer.
#[pyclass(frozen)]
pub(crate) struct SegmentView {
    memory: DropWithoutGil<ViewedMemory>,
    /// Dropped after the memory, so that the segment can be used again at once.
    _owner: DropWithoutGil<Option<Arc<OwnedSegment>>>,
    len: usize,
}

/// The memory of a view.
enum ViewedMemory {
    /// Read-only.
    Shared(Arc<Attachment>),
    /// The owner's mapping, with a lease of the view's own.
    Written { data: *mut u8, _lease: Lease },
    /// Writable; other processes do not see the changes.
    Private(PrivateMapping),
}

// SAFETY: the pointer is an address, which the view's owner keeps mapped; the user of the buffer orders its accesses.
unsafe impl Send for ViewedMemory {}
// SAFETY: as above.
unsafe impl Sync for ViewedMemory {}

/// Bytes that are read while the GIL is released.
struct SourcePointer(*const u8);

// SAFETY: only an address; the reader answers for the bytes there.
unsafe impl Send for SourcePointer {}

#[pymethods]
impl SharedSegment {
    /// Creates a segment with a copy of `data`, which is contiguous; under `name`, if one is given.
    #[staticmethod]
    #[pyo3(signature = (data, layout, name=None))]
    fn copy_of(py: Python<'_>, data: PyBuffer<u8>, layout: Vec<u8>, name: Option<&str>) -> PyResult<Self> {
        if !data.is_c_contiguous() {
            return Err(PyValueError::new_err("the bytes do not lie one after the other"));
        }
        let len = data.len_bytes();
        let source = SourcePointer(data.buf_ptr().cast());
        let own = enter(py, None, move |signals| {
            let source = source;
            let (mut segment, name) = make_segment(len, name, signals)?;
            // SAFETY: the caller holds the buffer until this returns.
            let filled = unsafe { segment.fill(source.0, len, &mut || check_signals(signals)) };
            let published = filled.and_then(|()| segment.publish(len, &layout));
            let named = published.and_then(|()| match &name {
                Some(name) => name.publish_name(&segment, &mut || check_signals(signals)),
                None => Ok(()),
            });
            let own = OwnedSegment::new(segment, len, layout, name);
            Ok(named.map(|()| own)?)
        })?;
        drop(data);
        Ok(SharedSegment { role: DropWithoutGil::new(SegmentRole::Owner(Arc::new(own))) })
    }

    /// Creates a segment for `size` bytes that its owner writes: zeros, or without `clear` any bytes. It gets `name` by
    /// `publish_name`.
    #[staticmethod]
    #[pyo3(signature = (size, layout, clear, name=None))]
    fn make(py: Python<'_>, size: usize, layout: Vec<u8>, clear: bool, name: Option<&str>) -> PyResult<Self> {
        let own = enter(py, None, move |signals| {
            let (mut segment, name) = make_segment(size, name, signals)?;
            let cleared = if clear { segment.clear(size, &mut || check_signals(signals)) } else { Ok(()) };
            let done = cleared.and_then(|()| segment.publish(size, &layout));
            let own = OwnedSegment::new(segment, size, layout, name);
            Ok(done.map(|()| own)?)
        })?;
        Ok(SharedSegment { role: DropWithoutGil::new(SegmentRole::Owner(Arc::new(own))) })
    }

    /// Gives the segment its name, if it was made for one: from here on others find it.
    fn publish_name(&self, py: Python<'_>) -> PyResult<()> {
        let SegmentRole::Owner(own) = &*self.role else { return Ok(()) };
        let Some(name) = &own.name else { return Ok(()) };
        let segment = own.segment()?;
        enter(py, None, |signals| Ok(name.publish_name(segment, &mut || check_signals(signals))?))
    }

    /// Attaches to the segment at `address`: through the descriptor of its process, or by its `name`.
    #[staticmethod]
    #[pyo3(signature = (address, name=None))]
    fn attach(py: Python<'_>, address: AddressTuple, name: Option<&str>) -> Result<Self, BindingError> {
        let address = as_address(address);
        let (segment, mut tried) = match attachment::attach(&address) {
            Err(ShmError::Unreached { segment, tried }) => (segment, tried),
            outcome => return Ok(Self::read_by(outcome?)),
        };
        if let Some(name) = name {
            match find_named(py, name, Some(&address))? {
                Ok(attachment) => return Ok(Self::read_by(attachment)),
                Err(gone @ ShmError::Gone { .. }) => return Err(gone.into()),
                Err(error) => tried.push(error.to_string()),
            }
        }
        Err(ShmError::Unreached { segment, tried }.into())
    }

    /// Attaches to the segment of this name.
    #[staticmethod]
    fn attach_named(py: Python<'_>, name: &str) -> Result<Self, BindingError> {
        Ok(Self::read_by(find_named(py, name, None)??))
    }

    /// Bytes of data.
    #[getter]
    fn nbytes(&self) -> usize {
        match &*self.role {
            SegmentRole::Owner(own) => own.len,
            SegmentRole::Reader(attachment) => attachment.header().data_len,
        }
    }

    /// The maker's description of the data.
    #[getter]
    fn layout<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(
            py,
            match &*self.role {
                SegmentRole::Owner(own) => &own.layout,
                SegmentRole::Reader(attachment) => &attachment.header().layout,
            },
        )
    }

    /// Whether this process made it, or inherited it from the one that did.
    #[getter]
    fn is_owner(&self) -> bool {
        matches!(*self.role, SegmentRole::Owner(_))
    }

    /// The address for other processes: process, descriptor, identity, generation.
    #[getter]
    fn address(&self) -> PyResult<AddressTuple> {
        Ok(match &*self.role {
            SegmentRole::Owner(own) => as_tuple(&own.segment()?.address()),
            SegmentRole::Reader(attachment) => as_tuple(&attachment.address()),
        })
    }

    /// The data, read-only.
    fn readonly(&self) -> PyResult<SegmentView> {
        Ok(self.view(ViewedMemory::Shared(self.attachment()?)))
    }

    /// The data, writable; other processes do not see the changes.
    fn private(&self) -> Result<SegmentView, BindingError> {
        let copy = self.attachment()?.private(0..self.nbytes())?;
        Ok(self.view(ViewedMemory::Private(copy)))
    }

    /// The data, writable for all processes; for the owner.
    fn writable(&self) -> Result<SegmentView, BindingError> {
        let SegmentRole::Owner(own) = &*self.role else {
            return Err(PyValueError::new_err("only the owner of a segment writes to it").into());
        };
        let segment = own.segment()?;
        let lease = segment.lease()?;
        Ok(self.view(ViewedMemory::Written { data: segment.data(), _lease: lease }))
    }
}

impl SharedSegment {
    fn read_by(attachment: Arc<Attachment>) -> Self {
        arena::count_attached();
        SharedSegment { role: DropWithoutGil::new(SegmentRole::Reader(attachment)) }
    }

    fn attachment(&self) -> Result<Arc<Attachment>, BindingError> {
        let attached = match &*self.role {
            SegmentRole::Owner(own) => match &own.name {
                Some(name) => attachment::attach_own(own.segment()?, name.keeper()),
                None => attachment::attach(&own.segment()?.address()),
            },
            SegmentRole::Reader(attachment) => Ok(Arc::clone(attachment)),
        };
        Ok(attached?)
    }

    fn view(&self, memory: ViewedMemory) -> SegmentView {
        let owner = match &*self.role {
            SegmentRole::Owner(own) => Some(Arc::clone(own)),
            SegmentRole::Reader(_) => None,
        };
        SegmentView { memory: DropWithoutGil::new(memory), _owner: DropWithoutGil::new(owner), len: self.nbytes() }
    }
}

#[pymethods]
impl SegmentView {
    /// Returns a `memoryview`. Python 3.12 and later have this method built in (PEP 688).
    fn __buffer__<'py>(slf: &Bound<'py, Self>, _flags: c_int) -> PyResult<Bound<'py, PyMemoryView>> {
        PyMemoryView::from(slf)
    }

    /// # Safety
    /// Called by Python alone, with a `view` to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let (data, is_readonly) = match &*slf.get().memory {
            ViewedMemory::Shared(attachment) => (attachment.data().cast_mut(), 1),
            ViewedMemory::Written { data, .. } => (*data, 0),
            ViewedMemory::Private(copy) => (copy.data(), 0),
        };
        // SAFETY: `view` is Python's; the bytes are mapped as long as `slf` lives, of which the view takes a reference,
        // and read-only memory is marked as such.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), data.cast(), slf.get().len.cast_signed(), is_readonly, flags)
        };
        if filled == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}

/// Attaches to the segment of this name, if it is the one that was `expected`: without the GIL, and registers it with
/// it.
fn find_named(
    py: Python<'_>,
    name: &str,
    expected: Option<&SegmentAddress>,
) -> PyResult<Result<Arc<Attachment>, ShmError>> {
    let found = enter(py, None, |signals| {
        let mut find = || {
            named::attach(Arc::new(SegmentFolder::standard()?), SegmentName::new(name)?, &mut || check_signals(signals))
        };
        match find() {
            Err(ShmError::Interrupted) => Err(ShmError::Interrupted.into()),
            outcome => Ok(outcome),
        }
    })?;
    Ok(found.and_then(|found| found.into_attachment(expected)))
}

/// Bytes of shared memory of this process.
#[pyfunction]
pub(crate) fn shared_stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    py.detach(arena::array_stats).into_py_dict(py)
}

/// Keeps up to `limit_bytes` of segments for the next arrays.
#[pyfunction]
pub(crate) fn set_shared_cache_limit(py: Python<'_>, limit_bytes: usize) {
    py.detach(|| Arena::of_arrays().set_limit(limit_bytes));
}

/// Lets children made by `fork` drop the memory that is kept for the parent's next arrays.
pub(crate) fn forget_in_children(py: Python<'_>) -> PyResult<()> {
    let forget = PyCFunction::new_closure(py, None, None, |_, _| Arena::forget_inherited())?;
    let when = PyDict::new(py);
    when.set_item("after_in_child", forget)?;
    py.import("os")?.call_method("register_at_fork", (), Some(&when))?;
    Ok(())
}

/// A segment's name, before and after the segment has it.
pub(super) struct ClaimedName(Mutex<State>);

enum State {
    Claimed(NameClaim),
    /// Also kept by every view of this process: the last one removes the name.
    Held(Arc<NameHold>),
    /// The name went to another segment.
    Lost,
}

/// Makes a segment for `len` bytes: from the arena, or a new one for `name`.
pub(super) fn make_segment(
    len: usize,
    name: Option<&str>,
    signals: &mut SignalCheck,
) -> Result<(Segment, Option<ClaimedName>), ShmError> {
    let mut check_cancelled = || check_signals(signals);
    let Some(name) = name else {
        return Ok((Arena::of_arrays().take(len, &mut check_cancelled)?, None));
    };
    let folder = Arc::new(SegmentFolder::standard()?);
    let claim = NameClaim::new(folder, SegmentName::new(name)?, &mut check_cancelled)?;
    let segment = claim.make_segment(len, &mut check_cancelled)?;
    Ok((segment, Some(ClaimedName(Mutex::new(State::Claimed(claim))))))
}

impl ClaimedName {
    /// Gives the name to the segment. A second call does nothing.
    pub(super) fn publish_name(&self, segment: &Segment, check_cancelled: CheckCancelled<'_>) -> Result<(), ShmError> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, State::Lost) {
            State::Claimed(claim) => *state = State::Held(Arc::new(claim.publish(segment.file(), check_cancelled)?)),
            other => *state = other,
        }
        Ok(())
    }

    /// The value that views of this process keep.
    pub(super) fn keeper(&self) -> Option<Keeper> {
        match &*self.lock() {
            State::Held(hold) => Some(Arc::clone(hold) as Keeper),
            State::Claimed(_) | State::Lost => None,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lists the named segments of this user, and removes the dead ones unless `dry_run`.
#[pyfunction]
#[pyo3(signature = (*, dry_run))]
pub(crate) fn sweep_segments(py: Python<'_>, dry_run: bool) -> PyResult<Bound<'_, PyDict>> {
    let found = enter(py, None, |signals| {
        let folder = SegmentFolder::standard()?;
        Ok(sweep(&folder, dry_run, &mut || check_signals(signals))?)
    })?;
    let described = |segments: &[NamedSegment]| -> PyResult<Vec<_>> {
        segments.iter().map(|segment| describe(py, segment)).collect()
    };
    let report = PyDict::new(py);
    report.set_item("dead", described(&found.dead)?)?;
    report.set_item("live", described(&found.live)?)?;
    report.set_item("failed", found.failed.iter().map(ToString::to_string).collect::<Vec<_>>())?;
    Ok(report)
}

fn describe<'py>(py: Python<'py>, segment: &NamedSegment) -> PyResult<Bound<'py, PyDict>> {
    let entry = PyDict::new(py);
    entry.set_item("name", segment.name.as_str())?;
    entry.set_item("path", &segment.path)?;
    entry.set_item("size", segment.bytes)?;
    entry.set_item("made_by", segment.maker)?;
    Ok(entry)
}

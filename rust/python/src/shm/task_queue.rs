//! Binds the task queue, the content of its messages, and the watcher that ends a process with its parent.
//!
//! The content of a message is bytes, or a plain value that needs no pickle. Plain are `None`, `bool`, `int` of 64 bits,
//! `float`, `complex` and `str`, of exactly these types. The highest byte of a message's kind has the form, so a kind is
//! a number below 2²⁴.
//!
//! Invariants: a thread waits without the GIL and reacts to signals. A task or result that is there already is returned
//! without releasing the GIL. A plain value arrives as an equal one of the same type. Bytes arrive as bytes; so do bytes
//! that are marked as a value but cannot be one.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyComplex, PyFloat, PyInt, PyList, PyString};
use tundish_shm::ShmError;
use tundish_shm::task_queue::{
    MAX_WORKERS, ParentQueue, TakeOutcome, TaskId, TimeLimit, WaitOutcome, WaiterRole, WorkerQueue,
};

use crate::error::BindingError;
use crate::long_work::enter;

/// The time between two checks of signals. A signal ends a sleep, but not if it comes a few instructions before.
const CALLER_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// The time between two checks of signals in a worker. It is long: a watcher ends workers, and they may sleep for
/// hours.
const WORKER_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A task id, a kind and a content.
type Message<'py> = (u64, u32, Bound<'py, PyAny>);

enum Side {
    Parent(ParentQueue),
    Worker(WorkerQueue),
}

/// A queue on which a parent puts tasks for its workers, and the workers their results.
///
/// The parent makes `TaskQueue(slots, slot_bytes)`; a worker opens `TaskQueue.open(fd)`, and only takes and finishes. A
/// message has a kind, a number below 2²⁴, and a content: at most `capacity` bytes, or a value that `is_plain`, which
/// arrives as such. A task id, a positive number, names a task until its result is collected or it is revoked.
#[pyclass(frozen, module = "tundish._native")]
pub(crate) struct TaskQueue {
    side: Side,
}

#[pymethods]
impl TaskQueue {
    #[new]
    fn new(slots: usize, slot_bytes: usize) -> Result<Self, BindingError> {
        let queue = ParentQueue::create(slots, slot_bytes)?;
        Ok(Self { side: Side::Parent(queue) })
    }

    /// Opens the queue of a parent's `fd`, which is not needed afterwards.
    #[staticmethod]
    fn open(fd: RawFd) -> Result<Self, BindingError> {
        let queue = WorkerQueue::open(borrow(fd)?)?;
        Ok(Self { side: Side::Worker(queue) })
    }

    /// The descriptor with which workers open the queue, as long as the parent's `TaskQueue` lives.
    #[getter]
    fn fd(&self) -> PyResult<RawFd> {
        Ok(self.parent()?.descriptor().as_raw_fd())
    }

    /// Bytes of the largest payload.
    #[getter]
    fn capacity(&self) -> usize {
        match &self.side {
            Side::Parent(queue) => queue.capacity(),
            Side::Worker(queue) => queue.capacity(),
        }
    }

    /// Queues a task and returns its id; `None` if there is no room.
    fn put(&self, kind: u32, content: &Bound<'_, PyAny>) -> Result<Option<u64>, BindingError> {
        let (kind, content) = message_of(kind, content)?;
        let task_id = self.parent()?.put(kind, content.as_ref())?;
        Ok(task_id.map(TaskId::number))
    }

    /// Queues the first of `contents`, as many as there is room for; returns their ids.
    fn put_many<'py>(
        &self,
        py: Python<'py>,
        kind: u32,
        contents: &Bound<'py, PyList>,
    ) -> Result<Bound<'py, PyList>, BindingError> {
        let queue = self.parent()?;
        let contents: Vec<_> = contents.iter().take(queue.room()).collect();
        // If one of them is refused, none is put.
        let messages = contents.iter().map(|content| {
            let message = message_of(kind, content)?;
            queue.check(message.1.as_ref().len())?;
            Ok(message)
        });
        let messages = messages.collect::<Result<Vec<_>, BindingError>>()?;
        let task_ids = PyList::empty(py);
        let mut failed = Ok(());
        queue.put_many(messages.into_iter(), |task_id| {
            if failed.is_ok() {
                failed = task_ids.append(task_id.number());
            }
        });
        failed?;
        Ok(task_ids)
    }

    /// Whether there are results.
    fn is_ready(&self) -> PyResult<bool> {
        Ok(self.parent()?.is_ready())
    }

    /// Returns task id, kind and content of every result that has come.
    fn collect<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let results = PyList::empty(py);
        let mut failed = Ok(());
        self.parent()?.collect(|task_id, kind, payload| {
            if failed.is_ok() {
                failed = results.append(message(py, task_id, kind, payload));
            }
        });
        failed?;
        Ok(results)
    }

    /// Waits up to `timeout` seconds for results; returns whether there are any.
    ///
    /// `caller`: whether this thread needs a result now; results wake such threads first. The wait ends early on
    /// `end_waits`, or if another caller collects the results.
    fn wait(&self, py: Python<'_>, timeout: f64, caller: bool) -> PyResult<bool> {
        let queue = self.parent()?;
        if queue.is_ready() {
            return Ok(true);
        }
        let timeout = seconds(timeout)?;
        let role = if caller { WaiterRole::Caller } else { WaiterRole::Background };
        // A caller may be the main thread, the only one that handles signals.
        let check_every = caller.then_some(CALLER_CHECK_INTERVAL);
        enter(py, None, |signals| {
            match queue.wait(role, &mut TimeLimit::new(timeout, check_every, &mut || signals.look())) {
                WaitOutcome::Ready => Ok(true),
                WaitOutcome::Nothing => Ok(false),
                WaitOutcome::Interrupted => Err(ShmError::Interrupted.into()),
            }
        })
    }

    /// Takes a task back; False if a worker has taken it, or it is over.
    fn revoke(&self, task_id: u64) -> PyResult<bool> {
        Ok(self.parent()?.revoke(TaskId::from_number(task_id)))
    }

    /// Returns whether a worker has taken the task, and its result is not collected.
    fn running(&self, task_id: u64) -> PyResult<bool> {
        Ok(self.parent()?.is_running(TaskId::from_number(task_id)))
    }

    /// Frees the slots of a dead worker; returns the ids of the tasks that died with it.
    ///
    /// The tasks that it finished can still be collected. After this call another worker may have its number.
    fn reap(&self, worker: i64) -> Result<Vec<u64>, BindingError> {
        let lost = self.parent()?.reap(worker_number(worker)?)?;
        Ok(lost.into_iter().map(TaskId::number).collect())
    }

    /// Lets workers stop as soon as no task is queued.
    fn stop(&self) -> PyResult<()> {
        self.parent()?.stop();
        Ok(())
    }

    /// Ends all waits for results; in a role without one, the next wait.
    fn end_waits(&self) -> PyResult<()> {
        self.parent()?.end_waits();
        Ok(())
    }

    /// Waits up to `timeout` seconds (`None`: for ever) for a task. A worker takes on one thread only.
    ///
    /// Returns `None` if the worker is to stop. Raises `TimedOutError` after the timeout.
    #[pyo3(signature = (worker, timeout))]
    fn take<'py>(
        &self,
        py: Python<'py>,
        worker: i64,
        timeout: Option<f64>,
    ) -> Result<Option<Message<'py>>, BindingError> {
        let (queue, worker) = (self.worker()?, worker_number(worker)?);
        let task = queue.try_take(worker, |task_id, kind, payload| message(py, task_id, kind, payload));
        if let Some(task) = task? {
            return Ok(Some(task));
        }
        let timeout = timeout.map(seconds).transpose()?.flatten();
        let task_id = enter(py, None, |signals| {
            let taken =
                queue.take(worker, &mut TimeLimit::new(timeout, Some(WORKER_CHECK_INTERVAL), &mut || signals.look()));
            match taken? {
                TakeOutcome::Task(task_id) => Ok(Some(task_id)),
                TakeOutcome::Stop => Ok(None),
                TakeOutcome::Nothing => Err(ShmError::TimedOut { what: "a task" }.into()),
                TakeOutcome::Interrupted => Err(ShmError::Interrupted.into()),
            }
        })?;
        let task =
            task_id.map(|task_id| queue.read(task_id, |task_id, kind, payload| message(py, task_id, kind, payload)));
        Ok(task.transpose()?)
    }

    /// Leaves the result of a task that this worker has taken.
    fn finish(&self, task_id: u64, kind: u32, content: &Bound<'_, PyAny>) -> Result<(), BindingError> {
        let (kind, content) = message_of(kind, content)?;
        Ok(self.worker()?.finish(TaskId::from_number(task_id), kind, content.as_ref())?)
    }

    /// Leaves a result that is plain and fits. Returns False, and does nothing, for any other value, also bytes.
    fn finish_plain(&self, task_id: u64, kind: u32, value: &Bound<'_, PyAny>) -> Result<bool, BindingError> {
        let queue = self.worker()?;
        match BytesOrPlainValue::plain(value).filter(|content| content.as_ref().len() <= queue.capacity()) {
            Some(content) => {
                let kind = checked_kind(&content, kind)?;
                queue.finish(TaskId::from_number(task_id), kind, content.as_ref())?;
                Ok(true)
            }
            None => Ok(false),
        }
    }
}

impl TaskQueue {
    fn parent(&self) -> Result<&ParentQueue, BindingError> {
        match &self.side {
            Side::Parent(queue) => Ok(queue),
            Side::Worker(_) => {
                Err(ShmError::Invalid("this is a worker's queue; only its parent's can do that".into()).into())
            }
        }
    }

    fn worker(&self) -> Result<&WorkerQueue, BindingError> {
        match &self.side {
            Side::Worker(queue) => Ok(queue),
            Side::Parent(_) => {
                Err(ShmError::Invalid("this is the parent's queue; a worker takes from `TaskQueue.open(fd)`".into())
                    .into())
            }
        }
    }
}

/// Returns the number of processors that this process may use, by its affinity and the quota of its control group.
#[pyfunction]
pub(crate) fn available_processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Ends this process, with status 1, as soon as `fd` becomes readable, its writing end is closed everywhere, or the
/// process `pid` has ended. A thread that needs no GIL watches a copy of `fd`.
#[pyfunction]
pub(crate) fn exit_with_parent(fd: RawFd, pid: i32) -> Result<(), BindingError> {
    Ok(tundish_shm::exit_with_parent(borrow(fd)?, pid)?)
}

fn message<'py>(py: Python<'py>, task_id: TaskId, kind: u32, payload: &[u8]) -> Message<'py> {
    let (kind, content) = open(py, kind, payload);
    (task_id.number(), kind, content)
}

fn message_of<'a>(kind: u32, content: &'a Bound<'_, PyAny>) -> Result<(u32, BytesOrPlainValue<'a>), BindingError> {
    let content = BytesOrPlainValue::of(content)
        .ok_or_else(|| BindingError::Type("a message carries bytes or a plain value: pickle anything else".into()))?;
    Ok((checked_kind(&content, kind)?, content))
}

fn checked_kind(content: &BytesOrPlainValue<'_>, kind: u32) -> Result<u32, BindingError> {
    content.kind(kind).ok_or_else(|| BindingError::Value(format!("the kind of a message is below 2²⁴, not {kind}")))
}

/// `None` if the timeout is infinite or beyond the clock's range.
fn seconds(timeout: f64) -> Result<Option<Duration>, BindingError> {
    if timeout.is_nan() {
        return Err(BindingError::Value("a timeout is a number of seconds, not nan".into()));
    }
    Ok(Duration::try_from_secs_f64(timeout.max(0.0)).ok())
}

fn worker_number(worker: i64) -> Result<u16, BindingError> {
    u16::try_from(worker).ok().filter(|&worker| worker < MAX_WORKERS).ok_or_else(|| {
        BindingError::Value(format!("a task queue has the workers 0 to {}, not {worker}", MAX_WORKERS - 1))
    })
}

const FORM_SHIFT: u32 = 24;
const KIND: u32 = (1 << FORM_SHIFT) - 1;

const BYTES: u32 = 0;
const NONE: u32 = 1;
const BOOL: u32 = 2;
const INT: u32 = 3;
const FLOAT: u32 = 4;
const COMPLEX: u32 = 5;
const STR: u32 = 6;

/// The most bytes of a value other than a text.
const NUMBER_BYTES: usize = 16;

/// The content of a message.
pub(super) struct BytesOrPlainValue<'a> {
    form: u32,
    payload: Payload<'a>,
}

enum Payload<'a> {
    Borrowed(&'a [u8]),
    Number([u8; NUMBER_BYTES], usize),
}

impl<'a> BytesOrPlainValue<'a> {
    /// Returns the content for a plain value; `None` for everything else.
    pub(super) fn plain(value: &'a Bound<'_, PyAny>) -> Option<Self> {
        if value.is_exact_instance_of::<PyInt>() {
            return value.extract::<i64>().ok().map(|value| Self::number(INT, &value.to_le_bytes()));
        }
        if value.is_exact_instance_of::<PyString>() {
            // Lone surrogates have no UTF-8.
            let text = value.cast::<PyString>().ok()?.to_str().ok()?;
            return Some(Self { form: STR, payload: Payload::Borrowed(text.as_bytes()) });
        }
        if value.is_exact_instance_of::<PyFloat>() {
            return value.extract::<f64>().ok().map(|value| Self::number(FLOAT, &value.to_le_bytes()));
        }
        if value.is_none() {
            return Some(Self::number(NONE, &[]));
        }
        if let Ok(value) = value.cast_exact::<PyBool>() {
            return Some(Self::number(BOOL, &[u8::from(value.is_true())]));
        }
        let value = value.cast_exact::<PyComplex>().ok()?;
        let mut parts = [0; 16];
        parts[..8].copy_from_slice(&value.real().to_le_bytes());
        parts[8..].copy_from_slice(&value.imag().to_le_bytes());
        Some(Self::number(COMPLEX, &parts))
    }

    /// Returns the content for bytes or a plain value; `None` for everything else.
    pub(super) fn of(value: &'a Bound<'_, PyAny>) -> Option<Self> {
        if let Ok(bytes) = value.cast_exact::<PyBytes>() {
            return Some(Self { form: BYTES, payload: Payload::Borrowed(bytes.as_bytes()) });
        }
        Self::plain(value)
    }

    /// Returns the kind of the message, with the form; `None` if `kind` is too large.
    pub(super) fn kind(&self, kind: u32) -> Option<u32> {
        (kind <= KIND).then_some(self.form << FORM_SHIFT | kind)
    }

    fn number(form: u32, bytes: &[u8]) -> Self {
        let mut number = [0; NUMBER_BYTES];
        number[..bytes.len()].copy_from_slice(bytes);
        Self { form, payload: Payload::Number(number, bytes.len()) }
    }
}

impl AsRef<[u8]> for BytesOrPlainValue<'_> {
    fn as_ref(&self) -> &[u8] {
        match &self.payload {
            Payload::Borrowed(bytes) => bytes,
            Payload::Number(bytes, length) => &bytes[..*length],
        }
    }
}

/// Returns whether `value` is plain and takes at most `room` bytes, so that a message carries it as it is.
///
/// Plain are `None`, `bool`, `int` of 64 bits, `float`, `complex` and `str`, of exactly these types.
#[pyfunction]
pub(crate) fn is_plain(value: &Bound<'_, PyAny>, room: usize) -> bool {
    BytesOrPlainValue::plain(value).is_some_and(|content| content.as_ref().len() <= room)
}

/// Returns the kind, without the form, and the content of a message.
pub(super) fn open<'py>(py: Python<'py>, kind: u32, payload: &[u8]) -> (u32, Bound<'py, PyAny>) {
    let content = value(py, kind >> FORM_SHIFT, payload).unwrap_or_else(|| PyBytes::new(py, payload).into_any());
    (kind & KIND, content)
}

fn value<'py>(py: Python<'py>, form: u32, payload: &[u8]) -> Option<Bound<'py, PyAny>> {
    match form {
        NONE => Some(py.None().into_bound(py)),
        BOOL => Some(PyBool::new(py, *payload.first()? != 0).to_owned().into_any()),
        INT => i64::from_le_bytes(payload.try_into().ok()?).into_pyobject(py).ok().map(Bound::into_any),
        FLOAT => Some(PyFloat::new(py, float(payload)?).into_any()),
        COMPLEX => {
            let (real, imag) = payload.split_at_checked(8)?;
            Some(PyComplex::from_doubles(py, float(real)?, float(imag)?).into_any())
        }
        STR => Some(PyString::new(py, core::str::from_utf8(payload).ok()?).into_any()),
        _ => None,
    }
}

fn float(bytes: &[u8]) -> Option<f64> {
    Some(f64::from_le_bytes(bytes.try_into().ok()?))
}

/// Borrows descriptor `number` for the time of a call. Python keeps it open meanwhile; else calls on it fail, or use
/// another file that got the number.
pub(crate) fn borrow<'a>(number: RawFd) -> Result<BorrowedFd<'a>, BindingError> {
    if number < 0 {
        return Err(ShmError::Invalid(format!("{number} is not the number of a descriptor")).into());
    }
    // SAFETY: not -1, and used for system calls only.
    Ok(unsafe { BorrowedFd::borrow_raw(number) })
}

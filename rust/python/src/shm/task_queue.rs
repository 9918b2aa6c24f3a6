//! Binds the task queue, and the watcher that ends a process with its parent.
//!
//! Invariants: a thread waits without the GIL and reacts to signals. A task or result that is there already is returned
//! without releasing the GIL.

use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyList;
use tundish_shm::ShmError;
use tundish_shm::task_queue::{MOST_WORKERS, ParentQueue, Role, Taken, Ticket, Wait, Waited, WorkerQueue};

use super::descriptor;
use super::plain_value::{self, Content};
use crate::enter::enter;
use crate::error::BindingError;

/// Between two looks at signals. One that comes while a thread sleeps ends the sleep; this is for the few instructions
/// before it, in which one goes unnoticed.
const CALLER_LOOKS: Duration = Duration::from_millis(50);
/// As above, for workers, which have a watcher to end them and sleep for hours.
const WORKER_LOOKS: Duration = Duration::from_secs(1);

/// A ticket, a kind and a content.
type Message<'py> = (u64, u32, Bound<'py, PyAny>);

enum Side {
    Parent(ParentQueue),
    Worker(WorkerQueue),
}

/// A queue on which a parent puts tasks for its workers, and they their results.
///
/// `TaskQueue(slots, slot_bytes)` is the parent's, `TaskQueue.open(fd)` a worker's, which only takes and finishes. A
/// message is a kind, a number below 2²⁴, and a content: bytes, at most `capacity` of them, or a value that `is_plain`,
/// which arrives as such. A task goes by its ticket, a positive number, until its result is collected; then, or once it
/// is revoked, its ticket means nothing.
#[pyclass(frozen, module = "tundish._native")]
pub(crate) struct TaskQueue {
    side: Side,
}

#[pymethods]
impl TaskQueue {
    #[new]
    fn new(slots: usize, slot_bytes: usize) -> PyResult<Self> {
        let queue = ParentQueue::create(slots, slot_bytes).map_err(BindingError::from)?;
        Ok(Self { side: Side::Parent(queue) })
    }

    /// The queue of a parent's `fd`, which is not needed afterwards. `awake`: what waits are over within so many
    /// seconds are spent awake, until the timeout, unless the last ones took longer; fifty microseconds where nobody
    /// says it.
    #[staticmethod]
    #[pyo3(signature = (fd, awake=None))]
    fn open(fd: RawFd, awake: Option<f64>) -> PyResult<Self> {
        let queue = WorkerQueue::open(descriptor::borrow(fd)?).map_err(BindingError::from)?;
        let queue = match awake.map(seconds).transpose()?.flatten() {
            Some(longest) => queue.awake_for(longest),
            None => queue,
        };
        Ok(Self { side: Side::Worker(queue) })
    }

    /// What workers open the queue with, as long as the parent's `TaskQueue` lives.
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

    /// Queue a task; `None` when there is no room.
    fn put(&self, kind: u32, content: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
        let (kind, content) = message_of(kind, content)?;
        let ticket = self.parent()?.put(kind, content.as_ref()).map_err(BindingError::from)?;
        Ok(ticket.map(Ticket::number))
    }

    /// Queue `contents[start:]`, as many as there is room for; their tickets.
    fn put_many<'py>(
        &self,
        py: Python<'py>,
        kind: u32,
        contents: &Bound<'py, PyList>,
        start: usize,
    ) -> PyResult<Bound<'py, PyList>> {
        let queue = self.parent()?;
        let contents: Vec<_> = contents.iter().skip(start).take(queue.room()).collect();
        // Nothing is put if one of them is refused.
        let messages = contents.iter().map(|content| {
            let message = message_of(kind, content)?;
            queue.check(message.1.as_ref().len()).map_err(BindingError::from)?;
            Ok(message)
        });
        let messages = messages.collect::<PyResult<Vec<_>>>()?;
        let tickets = PyList::empty(py);
        let mut failed = Ok(());
        queue.put_many(messages.into_iter(), |ticket| {
            if failed.is_ok() {
                failed = tickets.append(ticket.number());
            }
        });
        failed?;
        Ok(tickets)
    }

    /// Whether there are results.
    fn is_ready(&self) -> PyResult<bool> {
        Ok(self.parent()?.is_ready())
    }

    /// Ticket, kind and content of every result that there is.
    fn collect<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let results = PyList::empty(py);
        let mut failed = Ok(());
        self.parent()?.collect(|ticket, kind, payload| {
            if failed.is_ok() {
                failed = results.append(message(py, ticket, kind, payload));
            }
        });
        failed?;
        Ok(results)
    }

    /// Wait up to `timeout` seconds for results; whether there are any, which anyone who is told so collects.
    ///
    /// `caller`: whether this thread needs one now; results are told to such threads first. Ends early when the queue
    /// is wait_ended, or another caller collects what there was.
    fn wait(&self, py: Python<'_>, timeout: f64, caller: bool) -> PyResult<bool> {
        let queue = self.parent()?;
        if queue.is_ready() {
            return Ok(true);
        }
        let timeout = seconds(timeout)?;
        let role = if caller { Role::Caller } else { Role::Background };
        // Callers may be the main thread, the only one that signals matter to.
        let looks = caller.then_some(CALLER_LOOKS);
        enter(py, None, |door| match queue.wait(role, &mut Wait::new(timeout, looks, &mut || door.look())) {
            Waited::Ready => Ok(true),
            Waited::Nothing => Ok(false),
            Waited::Interrupted => Err(ShmError::Interrupted.into()),
        })
    }

    /// Take a task back that no worker has taken; False when one has, or it is over.
    fn revoke(&self, ticket: u64) -> PyResult<bool> {
        Ok(self.parent()?.revoke(Ticket::from_number(ticket)))
    }

    /// Whether a worker has taken the task, and its result is not collected.
    fn running(&self, ticket: u64) -> PyResult<bool> {
        Ok(self.parent()?.is_running(Ticket::from_number(ticket)))
    }

    /// Give back what a worker held that is dead for certain; the tickets of tasks that died with it.
    ///
    /// What it had finished is there to be collected. From then on another worker may have its number.
    fn reap(&self, worker: i64) -> PyResult<Vec<u64>> {
        let lost = self.parent()?.reap(worker_number(worker)?).map_err(BindingError::from)?;
        Ok(lost.into_iter().map(Ticket::number).collect())
    }

    /// Let workers stop as soon as no task is queued.
    fn stop(&self) -> PyResult<()> {
        self.parent()?.stop();
        Ok(())
    }

    /// End all waits for results, or the next one of callers and of others if there is none.
    fn end_waits(&self) -> PyResult<()> {
        self.parent()?.end_waits();
        Ok(())
    }

    /// Wait up to `timeout` seconds (`None`: for ever) for a task of this worker, who has one thread at it.
    ///
    /// Returns `None` when it is to stop. A time that is over is a `TimedOutError`.
    #[pyo3(signature = (worker, timeout))]
    fn take<'py>(&self, py: Python<'py>, worker: i64, timeout: Option<f64>) -> PyResult<Option<Message<'py>>> {
        let (queue, worker) = (self.worker()?, worker_number(worker)?);
        let task = queue.try_take(worker, |ticket, kind, payload| message(py, ticket, kind, payload));
        if let Some(task) = task.map_err(BindingError::from)? {
            return Ok(Some(task));
        }
        let timeout = timeout.map(seconds).transpose()?.flatten();
        let ticket = enter(py, None, |door| {
            let taken = queue.take(worker, &mut Wait::new(timeout, Some(WORKER_LOOKS), &mut || door.look()));
            match taken? {
                Taken::Task(ticket) => Ok(Some(ticket)),
                Taken::Stop => Ok(None),
                Taken::Nothing => Err(ShmError::TimedOut { what: "a task" }.into()),
                Taken::Interrupted => Err(ShmError::Interrupted.into()),
            }
        })?;
        let task = ticket.map(|ticket| queue.read(ticket, |ticket, kind, payload| message(py, ticket, kind, payload)));
        Ok(task.transpose().map_err(BindingError::from)?)
    }

    /// Leave the result of a task that this worker has taken.
    fn finish(&self, ticket: u64, kind: u32, content: &Bound<'_, PyAny>) -> PyResult<()> {
        let (kind, content) = message_of(kind, content)?;
        Ok(self.worker()?.finish(Ticket::from_number(ticket), kind, content.as_ref()).map_err(BindingError::from)?)
    }

    /// The same with a result that is plain and fits; False, and nothing is done, with any other, bytes among them.
    fn finish_plain(&self, ticket: u64, kind: u32, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        let queue = self.worker()?;
        match Content::plain(value).filter(|content| content.as_ref().len() <= queue.capacity()) {
            Some(content) => {
                let kind = checked_kind(&content, kind)?;
                queue.finish(Ticket::from_number(ticket), kind, content.as_ref()).map_err(BindingError::from)?;
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

/// How many processors this process may use at once, by its affinity and by the quota of its group.
#[pyfunction]
pub(crate) fn available_processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// End this process, with status 1, as soon as something comes from `fd`, or its writing end is closed everywhere, or
/// the process `pid` ends; at once if that is over. A copy of `fd` is watched by a thread that needs no interpreter.
#[pyfunction]
pub(crate) fn exit_with_parent(fd: RawFd, pid: i32) -> PyResult<()> {
    Ok(tundish_shm::exit_with_parent(descriptor::borrow(fd)?, pid).map_err(BindingError::from)?)
}

fn message<'py>(py: Python<'py>, ticket: Ticket, kind: u32, payload: &[u8]) -> Message<'py> {
    let (kind, content) = plain_value::open(py, kind, payload);
    (ticket.number(), kind, content)
}

fn message_of<'a>(kind: u32, content: &'a Bound<'_, PyAny>) -> Result<(u32, Content<'a>), BindingError> {
    let content = Content::of(content).ok_or_else(|| {
        BindingError::Type("a message carries bytes or a plain value; anything else is to be pickled".into())
    })?;
    Ok((checked_kind(&content, kind)?, content))
}

fn checked_kind(content: &Content<'_>, kind: u32) -> Result<u32, BindingError> {
    content.kind(kind).ok_or_else(|| BindingError::Value(format!("the kind of a message is below 2²⁴, not {kind}")))
}

/// `None` is for ever, as infinity is, and what no clock counts.
fn seconds(timeout: f64) -> Result<Option<Duration>, BindingError> {
    if timeout.is_nan() {
        return Err(BindingError::Value("a timeout is a number of seconds, not nan".into()));
    }
    Ok(Duration::try_from_secs_f64(timeout.max(0.0)).ok())
}

fn worker_number(worker: i64) -> Result<u16, BindingError> {
    u16::try_from(worker).ok().filter(|&worker| worker < MOST_WORKERS).ok_or_else(|| {
        BindingError::Value(format!("a task queue has the workers 0 to {}, not {worker}", MOST_WORKERS - 1))
    })
}

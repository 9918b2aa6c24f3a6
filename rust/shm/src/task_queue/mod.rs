//! The task queue: how a pool's parent sends tasks to its workers and gets their results.
//!
//! A queue is sealed memory without a name that the parent and all workers map. It holds slots for messages, a ring of
//! slot numbers, and the words on which both sides sleep. The parent has a [`ParentQueue`], each worker a
//! [`WorkerQueue`].
//!
//! Invariants: a worker that is killed between any two instructions loses at most the task that it had taken. No thread
//! waits for that task after the worker is reaped. A model checks these rules of `protocol`.

/// The atomics of the protocol; a model checker puts its own in their place.
pub(crate) mod atomic {
    pub(crate) use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
    pub(crate) use core::sync::atomic::{AtomicU32, AtomicU64, fence};
    pub(crate) use std::sync::Mutex;
}
mod memory;
mod protocol;

use std::thread::available_parallelism;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

use self::memory::{QueueLayout, QueueMemory};
use self::protocol::QueueWords;
pub use self::protocol::TimeLimit;
pub use self::protocol::WaiterRole;
use self::protocol::parent::ParentProtocol;
pub use self::protocol::parent::WaitOutcome;
pub use self::protocol::slots::TaskId;
pub use self::protocol::worker::TakeOutcome;
use self::protocol::worker::WorkerProtocol;
use crate::ShmError;

/// How many workers a queue has room for; their numbers are below.
pub const MAX_WORKERS: u16 = memory::WORKERS;

/// A queue as its parent has it. Threads may share it; a child made by `fork` uses a [`WorkerQueue`].
pub struct ParentQueue {
    parent: ParentProtocol<QueueMemory>,
    memory: OwnedFd,
}

impl ParentQueue {
    /// Creates a queue with `slots` slots of `slot_bytes` bytes.
    ///
    /// # Errors
    /// [`ShmError::Invalid`] for numbers that no queue can have, [`ShmError::Io`] where the system makes no such
    /// memory.
    pub fn create(slots: usize, slot_bytes: usize) -> Result<Self, ShmError> {
        let (words, memory) = QueueMemory::create(QueueLayout::new(slots, slot_bytes)?)?;
        Ok(Self { parent: ParentProtocol::new(words, processors() > 1), memory })
    }

    /// The descriptor with which workers open the queue.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// The largest payload.
    pub fn capacity(&self) -> usize {
        self.parent.words().layout().capacity()
    }

    /// How many tasks there is room for now.
    pub fn room(&self) -> usize {
        self.parent.room()
    }

    /// Queue a task; `None` when there is no room.
    ///
    /// # Errors
    /// [`ShmError::Invalid`] for a payload larger than [`ParentQueue::capacity`].
    pub fn put(&self, kind: u32, payload: &[u8]) -> Result<Option<TaskId>, ShmError> {
        self.check(payload.len())?;
        let mut task_id = None;
        self.parent.put(core::iter::once((kind, payload)), |given| task_id = Some(given));
        Ok(task_id)
    }

    /// Queues as many tasks, each a kind and a payload, as there is room for, and calls `each` with their ids. It
    /// stops before a payload larger than [`ParentQueue::capacity`].
    pub fn put_many<P: AsRef<[u8]>>(&self, messages: impl Iterator<Item = (u32, P)>, each: impl FnMut(TaskId)) {
        self.parent.put(messages.take_while(|(_, payload)| payload.as_ref().len() <= self.capacity()), each);
    }

    /// Whether `put` takes a payload of `length` bytes.
    ///
    /// # Errors
    /// [`ShmError::Invalid`] when not.
    pub fn check(&self, length: usize) -> Result<(), ShmError> {
        check(self.parent.words(), length)
    }

    /// Take a task back that no worker has taken; `false` when one has, or the task is over.
    pub fn revoke(&self, task_id: TaskId) -> bool {
        self.parent.revoke(task_id)
    }

    /// Whether a worker has taken the task, and its result is not collected.
    pub fn is_running(&self, task_id: TaskId) -> bool {
        self.parent.is_running(task_id)
    }

    /// Whether there are results.
    pub fn is_ready(&self) -> bool {
        self.parent.is_ready()
    }

    /// Call `each` with task id, kind and payload of every result that there is.
    pub fn collect(&self, each: impl FnMut(TaskId, u32, &[u8])) {
        self.parent.collect(each);
    }

    /// Waits for results. A result wakes a caller rather than the background thread; the woken thread collects.
    pub fn wait(&self, role: WaiterRole, limit: &mut TimeLimit<'_>) -> WaitOutcome {
        self.parent.wait(role, limit)
    }

    /// Frees the slots of a worker that is dead, and wakes all waiters. Returns the tasks that died with it. Its
    /// finished tasks can still be collected. From then on another worker may have its number.
    ///
    /// # Errors
    /// [`ShmError::Invalid`] for a number that no worker can have.
    pub fn reap(&self, worker: u16) -> Result<Vec<TaskId>, ShmError> {
        check_worker(worker)?;
        Ok(self.parent.reap(worker))
    }

    /// Let workers stop as soon as no task is queued.
    pub fn stop(&self) {
        self.parent.stop();
    }

    /// End all waits for results, or the next one of each role if there is none.
    pub fn end_waits(&self) {
        self.parent.end_waits();
    }
}

fn check(words: &QueueMemory, length: usize) -> Result<(), ShmError> {
    let capacity = words.layout().capacity();
    if length <= capacity {
        return Ok(());
    }
    Err(ShmError::Invalid(format!(
        "a message of {length} bytes does not fit into a slot, which holds {capacity}; send it in a segment"
    )))
}

fn check_worker(worker: u16) -> Result<(), ShmError> {
    if worker < MAX_WORKERS {
        return Ok(());
    }
    Err(ShmError::Invalid(format!("a task queue has the workers 0 to {}, not {worker}", MAX_WORKERS - 1)))
}

fn processors() -> usize {
    available_parallelism().map_or(1, usize::from)
}

/// A queue as its workers have it, each with a number of its own.
pub struct WorkerQueue {
    worker: WorkerProtocol<QueueMemory>,
}

impl WorkerQueue {
    /// The queue in `memory`, a [`ParentQueue::descriptor`](super::ParentQueue::descriptor); it is not needed
    /// afterwards.
    ///
    /// # Errors
    /// [`ShmError::NotASegment`] for anything else than a queue of this version, [`ShmError::Io`] where it cannot be
    /// mapped.
    pub fn open(memory: BorrowedFd<'_>) -> Result<Self, ShmError> {
        // At most half of the processors spin: the parent and the work itself need the others.
        let max_spinning = (processors() / 2) as u64;
        Ok(Self { worker: WorkerProtocol::new(QueueMemory::open(memory)?, max_spinning) })
    }

    /// The largest payload.
    pub fn capacity(&self) -> usize {
        self.worker.words().layout().capacity()
    }

    /// The first task that is queued, if there is one; as `take`.
    ///
    /// # Errors
    /// As those of `take`.
    pub fn try_take<R>(&self, worker: u16, read: impl FnOnce(TaskId, u32, &[u8]) -> R) -> Result<Option<R>, ShmError> {
        check_worker(worker)?;
        self.worker.try_take(worker).map(|task_id| self.read(task_id, read)).transpose()
    }

    /// Wait for a task. It is this worker's until it is finished.
    ///
    /// # Errors
    /// [`ShmError::Invalid`] for a number that no worker can have.
    pub fn take(&self, worker: u16, limit: &mut TimeLimit<'_>) -> Result<TakeOutcome<TaskId>, ShmError> {
        check_worker(worker)?;
        Ok(self.worker.take(worker, limit))
    }

    /// Read the message of a task.
    ///
    /// # Errors
    /// [`ShmError::Invalid`] for a task that was not taken or is finished.
    pub fn read<R>(&self, task_id: TaskId, read: impl FnOnce(TaskId, u32, &[u8]) -> R) -> Result<R, ShmError> {
        self.check_taken(task_id)?;
        Ok(self.worker.words().read(task_id.slot(), |kind, payload| read(task_id, kind, payload)))
    }

    /// Leaves the result of a task, and wakes the parent.
    ///
    /// # Errors
    /// [`ShmError::Invalid`] for a payload larger than [`WorkerQueue::capacity`], or a task that was not taken or is
    /// finished.
    pub fn finish(&self, task_id: TaskId, kind: u32, payload: &[u8]) -> Result<(), ShmError> {
        check(self.worker.words(), payload.len())?;
        self.check_taken(task_id)?;
        self.worker.finish(task_id, kind, payload);
        Ok(())
    }

    fn check_taken(&self, task_id: TaskId) -> Result<(), ShmError> {
        if self.worker.has(task_id) {
            return Ok(());
        }
        Err(ShmError::Invalid(format!("task {} is not taken, or is finished already", task_id.number())))
    }
}

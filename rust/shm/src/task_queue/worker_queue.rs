//! The queue as a worker has it.

use rustix::fd::BorrowedFd;

use super::protocol::QueueWords;
use super::protocol::slot_state::TaskId;
use super::protocol::time_limit::TimeLimit;
use super::protocol::worker::{TakeOutcome, WorkerProtocol};
use super::shared_memory::QueueMemory;
use super::{check, check_worker, processors};
use crate::ShmError;

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

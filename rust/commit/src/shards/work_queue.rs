//! The work of a shard writer: what is to be done and what is done, without the disk.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;

use rustix::io::Errno;

use super::pending_write::SubmittedBytes;
use super::writer_slots::WriterSlot;
use crate::checksum::Checksum;
use crate::error::CommitError;
use crate::files::FileProgress;

/// Written files that wait for their fsync while there is more to write. The first fsync of many small files commits
/// the others too, and each waiting file has two open descriptors.
const MAX_UNSYNCED: usize = 64;

/// The next step of one thread.
pub(super) enum WorkItem {
    /// Write one chunk, and compute its checksum.
    Write(SubmittedBytes),
    /// Make a written file durable.
    Finish(usize),
    /// Make the names durable, after all files.
    FinishFolders,
}

/// The result of an item.
pub(super) enum WorkResult {
    Wrote { write: SubmittedBytes, checksum: Option<Checksum> },
    Finished,
    FinishedFolders,
}

/// Whether this writer may write.
pub(super) enum WritePermission {
    None,
    /// A thread waits for a slot.
    Seeking,
    Granted(WriterSlot),
}

#[derive(PartialEq)]
enum FolderSync {
    Waiting,
    Taken,
    Durable,
}

pub(super) struct WorkQueue {
    /// Submitted and not begun.
    queue: VecDeque<SubmittedBytes>,
    /// Files that are written and that no thread makes durable yet. They are open.
    written: VecDeque<usize>,
    pub(super) files: Vec<FileProgress>,
    /// The number of files that are not durable.
    unfinished: usize,
    folders: FolderSync,
    /// Threads that write.
    writing: usize,
    /// Threads that have not ended.
    pub(super) running: usize,
    pub(super) slot: WritePermission,
    /// Nothing more is submitted.
    pub(super) closed: bool,
    pub(super) stopped: bool,
    failure: Option<CommitError>,
}

impl WorkQueue {
    pub(super) fn new(sizes: &[u64]) -> Self {
        WorkQueue {
            queue: VecDeque::new(),
            // Empty files need no write.
            written: (0..sizes.len()).filter(|&file| sizes[file] == 0).collect(),
            files: sizes.iter().map(|&size| FileProgress::new(size)).collect(),
            unfinished: sizes.len(),
            folders: FolderSync::Waiting,
            writing: 0,
            running: 0,
            slot: WritePermission::None,
            closed: false,
            stopped: false,
            failure: None,
        }
    }

    /// Whether everything is durable.
    pub(super) fn is_done(&self) -> bool {
        self.folders == FolderSync::Durable
    }

    /// Whether the threads have nothing left to do.
    pub(super) fn is_over(&self) -> bool {
        self.stopped || self.failure.is_some() || self.is_done()
    }

    pub(super) fn push(&mut self, write: SubmittedBytes) {
        self.queue.push_back(write);
    }

    /// Whether a thread could write if it had a slot.
    pub(super) fn has_writes(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Begins an item; a write only while a slot is held. [`done`](WorkQueue::done) or [`fail`](WorkQueue::fail) ends
    /// it.
    pub(super) fn next_item(&mut self) -> Option<WorkItem> {
        if self.written.len() < MAX_UNSYNCED
            && matches!(self.slot, WritePermission::Granted(_))
            && let Some(write) = self.queue.front_mut()
        {
            let chunk = write.cut_chunk();
            if write.length == 0 {
                self.queue.pop_front();
            }
            self.writing += 1;
            return Some(WorkItem::Write(chunk));
        }
        if let Some(file) = self.written.pop_front() {
            return Some(WorkItem::Finish(file));
        }
        if self.closed && self.unfinished == 0 && self.folders == FolderSync::Waiting {
            self.folders = FolderSync::Taken;
            return Some(WorkItem::FinishFolders);
        }
        None
    }

    /// Ends an item. Gives the slot back after the last submitted write: other ranks may write while this one makes its
    /// files durable, or waits for more bytes.
    pub(super) fn done(&mut self, done: WorkResult) {
        match done {
            WorkResult::Wrote { write, checksum } => {
                self.writing -= 1;
                let length = write.length as u64;
                if let Some(checksum) = checksum {
                    self.files[write.file].sum(write.offset, length, checksum);
                }
                if self.files[write.file].wrote(length) && !self.is_over() {
                    self.written.push_back(write.file);
                }
            }
            WorkResult::Finished => self.unfinished -= 1,
            WorkResult::FinishedFolders => self.folders = FolderSync::Durable,
        }
        if self.writing == 0 && self.queue.is_empty() {
            self.slot = WritePermission::None;
        }
    }

    /// Keeps the first failure and drops the work that was not begun.
    pub(super) fn fail(&mut self, error: CommitError) {
        self.failure.get_or_insert(error);
        self.give_up();
    }

    pub(super) fn stop(&mut self) {
        self.stopped = true;
        self.give_up();
    }

    fn give_up(&mut self) {
        self.queue.clear();
        self.written.clear();
    }

    /// The failure, if there is one: the original error the first time, then one that refers to it.
    pub(super) fn take_failure(&mut self) -> Option<CommitError> {
        let past = earlier(self.failure.as_ref()?);
        self.failure.replace(past)
    }

    /// Refuses once anything failed.
    pub(super) fn check(&self) -> Result<(), CommitError> {
        self.failure.as_ref().map_or(Ok(()), |failure| Err(earlier(failure)))
    }
}

/// An error that refers to an earlier failure.
fn earlier(failure: &CommitError) -> CommitError {
    let path: PathBuf = failure.path().to_path_buf();
    match failure {
        CommitError::Panicked { message, .. } => CommitError::Panicked { path, message: message.clone() },
        CommitError::Io { operation, .. } | CommitError::Poisoned { operation, .. } => {
            let errno = failure.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
            CommitError::Poisoned { operation, path, source: io::Error::from_raw_os_error(errno) }
        }
        other => CommitError::InvalidWrite { path, reason: other.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::files::WINDOW;
    use crate::staging::FileImage;

    /// A queue of files of one chunk each, all submitted.
    fn queue_of(files: usize) -> WorkQueue {
        let mut queue = WorkQueue::new(&vec![WINDOW; files]);
        for file in 0..files {
            assert!(queue.files[file].submit(0..WINDOW));
            queue.push(chunk(file));
        }
        queue
    }

    fn chunk(file: usize) -> SubmittedBytes {
        let memory = Arc::new(FileImage::new(0).unwrap());
        SubmittedBytes { file, offset: 0, memory, start: 0, length: WINDOW as usize }
    }

    fn begin_write(queue: &mut WorkQueue) -> usize {
        match queue.next_item() {
            Some(WorkItem::Write(write)) => write.file,
            _ => panic!("there is something to write"),
        }
    }

    fn wrote(queue: &mut WorkQueue, file: usize) {
        queue.done(WorkResult::Wrote { write: chunk(file), checksum: None });
    }

    fn is_held(queue: &WorkQueue) -> bool {
        matches!(queue.slot, WritePermission::Granted(_))
    }

    #[test]
    fn nothing_is_written_without_a_slot() {
        let mut queue = queue_of(1);
        assert!(queue.next_item().is_none() && queue.has_writes());
        queue.slot = WritePermission::Seeking;
        assert!(queue.next_item().is_none());
        queue.slot = WritePermission::Granted(WriterSlot::without_lock());
        assert_eq!(begin_write(&mut queue), 0);
    }

    #[test]
    fn the_slot_is_held_until_the_last_thread_has_written() {
        let mut queue = queue_of(2);
        queue.slot = WritePermission::Granted(WriterSlot::without_lock());
        let (one, other) = (begin_write(&mut queue), begin_write(&mut queue));
        wrote(&mut queue, one);
        assert!(is_held(&queue));
        assert!(matches!(queue.next_item(), Some(WorkItem::Finish(file)) if file == one));
        queue.done(WorkResult::Finished);
        assert!(is_held(&queue));
        wrote(&mut queue, other);
        assert!(!is_held(&queue));
        assert!(matches!(queue.next_item(), Some(WorkItem::Finish(file)) if file == other));
    }

    #[test]
    fn names_are_made_durable_after_all_files_and_only_once_closed() {
        let mut queue = WorkQueue::new(&[0]);
        assert!(matches!(queue.next_item(), Some(WorkItem::Finish(0))));
        assert!(queue.next_item().is_none());
        queue.done(WorkResult::Finished);
        assert!(queue.next_item().is_none());
        queue.closed = true;
        assert!(matches!(queue.next_item(), Some(WorkItem::FinishFolders)));
        assert!(queue.next_item().is_none() && !queue.is_done());
        queue.done(WorkResult::FinishedFolders);
        assert!(queue.is_done() && queue.is_over());
    }

    #[test]
    fn few_files_wait_for_their_fsync_at_once() {
        let mut queue = queue_of(2 * MAX_UNSYNCED);
        queue.slot = WritePermission::Granted(WriterSlot::without_lock());
        for _ in 0..MAX_UNSYNCED {
            let file = begin_write(&mut queue);
            wrote(&mut queue, file);
        }
        // The oldest first: the first fsync of a batch commits the others.
        for oldest in 0..3 {
            assert!(matches!(queue.next_item(), Some(WorkItem::Finish(file)) if file == oldest));
            queue.done(WorkResult::Finished);
            let file = begin_write(&mut queue);
            wrote(&mut queue, file);
        }
    }

    #[test]
    fn the_first_failure_is_kept_and_the_rest_is_given_up() {
        let mut queue = queue_of(2);
        queue.slot = WritePermission::Granted(WriterSlot::without_lock());
        let file = begin_write(&mut queue);
        let path = std::path::Path::new("/somewhere");
        queue.fail(CommitError::io("write", path, Errno::NOSPC));
        queue.fail(CommitError::io("fsync", path, Errno::IO));
        assert!(queue.is_over() && queue.next_item().is_none());
        wrote(&mut queue, file);
        assert!(queue.next_item().is_none() && !is_held(&queue));
        assert!(matches!(queue.take_failure(), Some(CommitError::Io { operation: "write", .. })));
        assert!(matches!(queue.take_failure(), Some(CommitError::Poisoned { operation: "write", .. })));
        assert!(matches!(queue.check(), Err(CommitError::Poisoned { .. })));
    }
}

//! The work of a shard writer: what is to be done and what is done, without the disk.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::checksum::{Checksum, FileProgress};
use crate::error::{CommitError, FirstFailure};
use crate::output_file::WINDOW;
use crate::staging::Memory;

/// Written files that wait for their fsync while there is more to write. The first fsync of many small files commits
/// the others too, and each waiting file has two open descriptors.
const MAX_UNSYNCED: usize = 64;

/// Bytes for one file, and the memory that they lie in.
pub(crate) struct SubmittedBytes {
    pub(crate) file: usize,
    pub(crate) offset: u64,
    pub(crate) memory: Arc<dyn Memory>,
    pub(crate) start: usize,
    pub(crate) length: usize,
}

impl SubmittedBytes {
    /// Cuts off the first chunk, which one thread writes at a time: up to the next multiple of [`WINDOW`] in the file.
    pub(crate) fn cut_chunk(&mut self) -> SubmittedBytes {
        let room = WINDOW - self.offset % WINDOW;
        let length = usize::try_from(room).map_or(self.length, |room| room.min(self.length));
        let memory = Arc::clone(&self.memory);
        let chunk = SubmittedBytes { file: self.file, offset: self.offset, memory, start: self.start, length };
        self.offset += length as u64;
        self.start += length;
        self.length -= length;
        chunk
    }
}

/// The next step of one thread.
pub(crate) enum WorkItem {
    /// Write one chunk, and compute its checksum.
    Write(SubmittedBytes),
    /// Make a written file durable.
    Finish(usize),
    /// Make the names durable, after all files.
    FinishFolders,
}

/// The result of an item.
pub(crate) enum WorkResult {
    Wrote { write: SubmittedBytes, checksum: Option<Checksum> },
    Finished,
    FinishedFolders,
}

#[derive(PartialEq)]
enum FolderSync {
    Waiting,
    Taken,
    Durable,
}

pub(crate) struct WorkQueue {
    /// Submitted and not begun.
    queue: VecDeque<SubmittedBytes>,
    /// Files that are written and that no thread makes durable yet. They are open.
    written: VecDeque<usize>,
    pub(crate) files: Vec<FileProgress>,
    /// The number of files that are not durable.
    unfinished: usize,
    folders: FolderSync,
    /// Threads that have not ended.
    pub(crate) running: usize,
    /// Nothing more is submitted.
    pub(crate) closed: bool,
    pub(crate) stopped: bool,
    pub(crate) failure: FirstFailure,
}

impl WorkQueue {
    pub(crate) fn new(sizes: &[u64]) -> Self {
        WorkQueue {
            queue: VecDeque::new(),
            // Empty files need no write.
            written: (0..sizes.len()).filter(|&file| sizes[file] == 0).collect(),
            files: sizes.iter().map(|&size| FileProgress::new(size)).collect(),
            unfinished: sizes.len(),
            folders: FolderSync::Waiting,
            running: 0,
            closed: false,
            stopped: false,
            failure: FirstFailure::default(),
        }
    }

    /// Whether everything is durable.
    pub(crate) fn is_done(&self) -> bool {
        self.folders == FolderSync::Durable
    }

    /// Whether the threads have nothing left to do.
    pub(crate) fn is_over(&self) -> bool {
        self.stopped || self.failure.is_recorded() || self.is_done()
    }

    pub(crate) fn push(&mut self, write: SubmittedBytes) {
        self.queue.push_back(write);
    }

    /// Begins an item. [`done`](WorkQueue::done) or [`fail`](WorkQueue::fail) ends it.
    pub(crate) fn next_item(&mut self) -> Option<WorkItem> {
        if self.written.len() < MAX_UNSYNCED
            && let Some(write) = self.queue.front_mut()
        {
            let chunk = write.cut_chunk();
            if write.length == 0 {
                self.queue.pop_front();
            }
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

    /// Ends an item.
    pub(crate) fn done(&mut self, done: WorkResult) {
        match done {
            WorkResult::Wrote { write, checksum } => {
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
    }

    /// Keeps the first failure and drops the work that was not begun.
    pub(crate) fn fail(&mut self, error: CommitError) {
        self.failure.record(error);
        self.give_up();
    }

    pub(crate) fn stop(&mut self) {
        self.stopped = true;
        self.give_up();
    }

    fn give_up(&mut self) {
        self.queue.clear();
        self.written.clear();
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;
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
        let file = begin_write(&mut queue);
        let path = std::path::Path::new("/somewhere");
        queue.fail(CommitError::io("write", path, Errno::NOSPC));
        queue.fail(CommitError::io("fsync", path, Errno::IO));
        assert!(queue.is_over() && queue.next_item().is_none());
        wrote(&mut queue, file);
        assert!(queue.next_item().is_none());
        assert!(matches!(queue.failure.report(), Err(CommitError::Io { operation: "write", .. })));
        assert!(matches!(queue.failure.report(), Err(CommitError::Poisoned { operation: "write", .. })));
        assert!(matches!(queue.failure.check(), Err(CommitError::Poisoned { .. })));
    }
}

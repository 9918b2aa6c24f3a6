//! The threads of a shard writer and the state they share.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::process::{getpriority_process, setpriority_process};

use crate::checksum::Checksum;
use crate::disk::Disk;
use crate::error::CommitError;
use crate::folder_tree::{FolderTree, TreeFile};
use crate::manifest::FileMetadata;
use crate::output_file::{DirectIo, OutputFile};
use crate::work_queue::{SubmittedBytes, WorkItem, WorkQueue, WorkResult};

/// The state that the threads of a writer share.
pub(crate) struct SharedWriterState<D: Disk> {
    disk: D,
    tree: FolderTree<D>,
    files: Vec<SharedFile<D>>,
    by_name: HashMap<String, usize>,
    direct_io: DirectIo,
    checksum: bool,
    total: u64,
    /// Bytes that are written, and summed if wanted: their memory may be reused.
    written: AtomicU64,
    state: Mutex<WorkQueue>,
    /// Notified of every change of the state.
    changed: Condvar,
}

struct SharedFile<D: Disk> {
    tree_file: TreeFile,
    size: u64,
    /// Open from the first chunk until the file is durable: there may be more files than descriptors.
    output: Mutex<Option<Arc<OutputFile<D>>>>,
}

impl<D: Disk> SharedWriterState<D> {
    pub(crate) fn new(
        disk: D,
        tree: FolderTree<D>,
        files: impl Iterator<Item = (TreeFile, u64)>,
        checksum: bool,
    ) -> Self {
        let files: Vec<_> =
            files.map(|(tree_file, size)| SharedFile { tree_file, size, output: Mutex::new(None) }).collect();
        let sizes: Vec<_> = files.iter().map(|file| file.size).collect();
        SharedWriterState {
            disk,
            tree,
            by_name: files.iter().enumerate().map(|(number, file)| (file.tree_file.name.clone(), number)).collect(),
            files,
            direct_io: DirectIo::default(),
            checksum,
            total: sizes.iter().sum(),
            written: AtomicU64::new(0),
            state: Mutex::new(WorkQueue::new(&sizes)),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.tree.path()
    }

    /// Written bytes, and bytes of all files. Without the lock, which a child made by `fork` may find held.
    pub(crate) fn progress(&self) -> (u64, u64) {
        (self.written.load(Ordering::Relaxed), self.total)
    }

    pub(crate) fn submit(&self, name: &str, mut write: SubmittedBytes) -> Result<(), CommitError> {
        let refuse = |reason: String| Err(CommitError::InvalidWrite { path: self.path().join(name), reason });
        let Some(&number) = self.by_name.get(name) else {
            return refuse("it is not a file of this writer".to_owned());
        };
        let size = self.files[number].size;
        let end = write.offset.checked_add(write.length as u64).filter(|&end| end <= size);
        let Some(end) = end else {
            return refuse(format!("bytes {} + {} are not in a file of {size}", write.offset, write.length));
        };
        write.file = number;
        let mut state = self.lock();
        state.failure.check()?;
        if state.closed || state.stopped {
            return refuse("its writer was finished or aborted; make another one".to_owned());
        }
        if write.length == 0 {
            return Ok(());
        }
        if !state.files[number].submit(write.offset..end) {
            return refuse(format!("some of the bytes {}..{end} were submitted before", write.offset));
        }
        state.push(write);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    pub(crate) fn finish(&self, deadline: Instant) -> Result<Option<Vec<FileMetadata>>, CommitError> {
        let mut state = self.lock();
        if !state.is_over() && !state.closed {
            self.check_complete(&state)?;
            state.closed = true;
            self.changed.notify_all();
        }
        while !(state.is_over() && state.running == 0) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.failure.report()?;
        if state.is_done() {
            return Ok(Some(self.file_metadata(&state)));
        }
        let reason = "its writer was aborted; make another one".to_owned();
        Err(CommitError::InvalidWrite { path: self.path().to_path_buf(), reason })
    }

    fn check_complete(&self, state: &WorkQueue) -> Result<(), CommitError> {
        for (file, progress) in self.files.iter().zip(&state.files) {
            if let Some(gap) = progress.first_gap() {
                let reason = format!("its bytes from {gap} on were not submitted");
                return Err(CommitError::InvalidWrite { path: file.tree_file.path.clone(), reason });
            }
        }
        Ok(())
    }

    fn file_metadata(&self, state: &WorkQueue) -> Vec<FileMetadata> {
        let files = self.files.iter().zip(&state.files);
        let metadata = files.map(|(file, progress)| FileMetadata {
            name: file.tree_file.name.clone(),
            size: file.size,
            checksum: self.checksum.then(|| progress.checksum()),
        });
        metadata.collect()
    }

    pub(crate) fn stop(&self) {
        self.lock().stop();
        self.changed.notify_all();
    }

    /// Counts a thread that is about to run (1), or that could not be started (−1).
    pub(crate) fn count_thread(&self, change: isize) {
        let mut state = self.lock();
        state.running = state.running.saturating_add_signed(change);
    }

    /// Runs one thread from its start to its end.
    pub(crate) fn run(&self) {
        lower_priority();
        let mut at = self.path().to_path_buf();
        let panic = catch_unwind(AssertUnwindSafe(|| self.work(&mut at))).err();
        let mut state = self.lock();
        if let Some(panic) = panic {
            state.fail(CommitError::Panicked { path: at, message: message_of(panic.as_ref()) });
        }
        state.running -= 1;
        drop(state);
        self.changed.notify_all();
    }

    /// Works until nothing is left to do. `at` is the file that a panic refers to.
    fn work(&self, at: &mut PathBuf) {
        let mut state = self.lock();
        while !state.is_over() {
            let Some(item) = state.next_item() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            let outcome = self.perform(item, at);
            state = self.lock();
            match outcome {
                Ok(done) => {
                    if let WorkResult::Wrote { write, .. } = &done {
                        self.written.fetch_add(write.length as u64, Ordering::Relaxed);
                    }
                    state.done(done);
                }
                Err(error) => state.fail(error),
            }
            self.changed.notify_all();
        }
    }

    fn perform(&self, item: WorkItem, at: &mut PathBuf) -> Result<WorkResult, CommitError> {
        match item {
            WorkItem::Write(write) => {
                at.clone_from(&self.files[write.file].tree_file.path);
                self.write(write)
            }
            WorkItem::Finish(file) => {
                at.clone_from(&self.files[file].tree_file.path);
                let file = &self.files[file];
                self.output(file)?.finish(&self.disk, &file.tree_file.path)?;
                *file.output.lock().unwrap_or_else(PoisonError::into_inner) = None;
                Ok(WorkResult::Finished)
            }
            WorkItem::FinishFolders => {
                at.clone_from(&self.path().to_path_buf());
                self.tree.sync()?;
                Ok(WorkResult::FinishedFolders)
            }
        }
    }

    fn write(&self, write: SubmittedBytes) -> Result<WorkResult, CommitError> {
        let file = &self.files[write.file];
        let bytes = &write.memory.bytes()[write.start..write.start + write.length];
        let output = self.output(file)?;
        output.write(&self.disk, write.offset, bytes, &file.tree_file.path, &self.direct_io)?;
        let checksum = self.checksum.then(|| Checksum::of(bytes));
        Ok(WorkResult::Wrote { write, checksum })
    }

    fn output(&self, file: &SharedFile<D>) -> Result<Arc<OutputFile<D>>, CommitError> {
        let mut output = file.output.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(output) = output.as_ref() {
            return Ok(Arc::clone(output));
        }
        let opened = Arc::new(OutputFile::open(&self.tree, &file.tree_file, &self.direct_io)?);
        Ok(Arc::clone(output.insert(opened)))
    }

    fn lock(&self) -> MutexGuard<'_, WorkQueue> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|&text| text.to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

/// How much nicer a writer's thread is than the thread that made it. On a processor that both want, it gets a tenth of
/// the other's time. Nicer still would delay checksums so much that a save holds its memory for seconds longer.
const NICER: i32 = 10;

/// Lowers the processor and disk priorities of the calling thread alone, so that training keeps its processors and
/// disk. Where the system refuses, the thread goes on without.
#[allow(unsafe_code)]
fn lower_priority() {
    // On Linux a nice value belongs to a thread.
    let thread = Some(rustix::thread::gettid());
    if let Ok(nice) = getpriority_process(thread) {
        let _ = setpriority_process(thread, nice + NICER);
    }
    // From linux/ioprio.h: the lowest level of the class best effort (2). The idle class would starve while anybody
    // else uses the disk.
    const WHO_PROCESS: libc::c_int = 1;
    const THIS_THREAD: libc::c_int = 0;
    const BEST_EFFORT_LOWEST: libc::c_int = (2 << 13) | 7;
    // SAFETY: three integers are passed, and no memory.
    let _ = unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, THIS_THREAD, BEST_EFFORT_LOWEST) };
}

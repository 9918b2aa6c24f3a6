//! What the threads of a writer share, and what each of them does.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::WriterOptions;
use super::output::{DirectIo, Output};
use super::priority;
use super::slot::{Slot, Slots};
use super::state::{Done, Right, State, Task};
use super::write::Write;
use crate::checksum::Checksum;
use crate::disk::{Disk, Status};
use crate::error::CommitError;
use crate::file_metadata::FileMetadata;
use crate::tree::{Place, Tree};

/// Between two looks for a free slot: a part of the time waited so far, but no less and no more than this.
const LEAST_SLOT_INTERVAL: Duration = Duration::from_micros(500);
const MOST_SLOT_INTERVAL: Duration = Duration::from_millis(5);
const PART_OF_WAIT: u32 = 64;

/// What the threads of a writer share.
pub(super) struct Shared<D: Disk> {
    disk: D,
    tree: Tree<D>,
    files: Vec<SharedFile<D>>,
    by_name: HashMap<String, usize>,
    direct_io: DirectIo,
    slots: Slots,
    checksum: bool,
    total: u64,
    /// Bytes whose memory nobody needs any more.
    through: AtomicU64,
    state: Mutex<State>,
    /// Told of every change of the state.
    changed: Condvar,
}

struct SharedFile<D: Disk> {
    place: Place,
    size: u64,
    /// Open from the first piece until the file is durable: there may be more files than descriptors.
    output: Mutex<Option<Arc<Output<D>>>>,
}

impl<D: Disk> Shared<D> {
    pub(super) fn new(
        disk: D,
        tree: Tree<D>,
        files: impl Iterator<Item = (Place, u64)>,
        options: WriterOptions,
        root: &Status,
    ) -> Self {
        let files: Vec<_> = files.map(|(place, size)| SharedFile { place, size, output: Mutex::new(None) }).collect();
        let sizes: Vec<_> = files.iter().map(|file| file.size).collect();
        Shared {
            disk,
            tree,
            by_name: files.iter().enumerate().map(|(number, file)| (file.place.name.clone(), number)).collect(),
            files,
            direct_io: DirectIo::default(),
            slots: Slots::new(options.writers_per_node, (root.device, root.number)),
            checksum: options.checksum,
            total: sizes.iter().sum(),
            through: AtomicU64::new(0),
            state: Mutex::new(State::new(&sizes, options.checksum)),
            changed: Condvar::new(),
        }
    }

    pub(super) fn path(&self) -> &Path {
        self.tree.path()
    }

    /// Bytes that are through, and bytes of all files; without the lock, which a child made by `fork` may find held.
    pub(super) fn progress(&self) -> (u64, u64) {
        (self.through.load(Ordering::Relaxed), self.total)
    }

    pub(super) fn hand_in(&self, name: &str, mut write: Write) -> Result<(), CommitError> {
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
        state.check()?;
        if state.closed || state.stopped {
            return refuse("its writer was finished or aborted; make another one".to_owned());
        }
        if write.length == 0 {
            return Ok(());
        }
        if !state.files[number].hand_in(write.offset..end) {
            return refuse(format!("some of the bytes {}..{end} were handed in before", write.offset));
        }
        state.push(write);
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    pub(super) fn finish(&self, until: Instant) -> Result<Option<Vec<FileMetadata>>, CommitError> {
        let mut state = self.lock();
        if !state.is_over() && !state.closed {
            self.check_complete(&state)?;
            state.closed = true;
            self.changed.notify_all();
        }
        while !(state.is_over() && state.running == 0) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        match state.take_failure() {
            Some(failure) => Err(failure),
            None if state.is_done() => Ok(Some(self.facts(&state))),
            None => {
                let reason = "its writer was aborted; make another one".to_owned();
                Err(CommitError::InvalidWrite { path: self.path().to_path_buf(), reason })
            }
        }
    }

    fn check_complete(&self, state: &State) -> Result<(), CommitError> {
        for (file, progress) in self.files.iter().zip(&state.files) {
            if let Some(gap) = progress.first_gap() {
                let reason = format!("its bytes from {gap} on were not handed in");
                return Err(CommitError::InvalidWrite { path: file.place.path.clone(), reason });
            }
        }
        Ok(())
    }

    fn facts(&self, state: &State) -> Vec<FileMetadata> {
        let files = self.files.iter().zip(&state.files);
        let facts = files.map(|(file, progress)| FileMetadata {
            name: file.place.name.clone(),
            size: file.size,
            checksum: self.checksum.then(|| progress.checksum()),
        });
        facts.collect()
    }

    pub(super) fn stop(&self) {
        self.lock().stop();
        self.changed.notify_all();
    }

    /// Counts a thread in (1) that is about to run, or out (−1) where it could not be started.
    pub(super) fn count_thread(&self, change: isize) {
        let mut state = self.lock();
        state.running = state.running.saturating_add_signed(change);
    }

    /// What a thread does, from its start to its end.
    pub(super) fn run(&self) {
        priority::lower();
        let mut at = self.path().to_path_buf();
        let panic = catch_unwind(AssertUnwindSafe(|| self.work(&mut at))).err();
        let mut state = self.lock();
        if let Some(panic) = panic {
            state.fail(CommitError::Panicked { path: at, message: message_of(panic.as_ref()) });
        }
        state.running -= 1;
        if state.running == 0 {
            state.right = Right::None;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Works until there is nothing to do any more. `at` says which file a panic is about.
    fn work(&self, at: &mut PathBuf) {
        let mut state = self.lock();
        while !state.is_over() {
            let Some(task) = state.next_task() else {
                state = if state.has_writes() && matches!(state.right, Right::None) {
                    self.seek_slot(state)
                } else {
                    self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
                };
                continue;
            };
            drop(state);
            let outcome = self.perform(task, at);
            state = self.lock();
            if let Right::Held(slot) = &state.right {
                slot.date();
            }
            match outcome {
                Ok(done) => {
                    self.through.fetch_add(state.done(done), Ordering::Relaxed);
                }
                Err(error) => state.fail(error),
            }
            self.changed.notify_all();
        }
    }

    /// Waits for a slot without the lock, for all threads; the writer has it afterwards, or is over.
    fn seek_slot<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.right = Right::Sought;
        drop(state);
        let taken = self.wait_for_slot();
        let mut state = self.lock();
        state.right = taken.map_or(Right::None, Right::Held);
        self.changed.notify_all();
        state
    }

    /// `None` when there is nothing to do with a slot any more.
    fn wait_for_slot(&self) -> Option<Slot> {
        let (mut waiting, begun) = (self.slots.wait(), Instant::now());
        loop {
            if let Some(slot) = waiting.try_take() {
                return Some(slot);
            }
            let state = self.lock();
            if state.is_over() {
                return None;
            }
            let interval = (begun.elapsed() / PART_OF_WAIT).clamp(LEAST_SLOT_INTERVAL, MOST_SLOT_INTERVAL);
            drop(self.changed.wait_timeout(state, interval));
        }
    }

    fn perform(&self, task: Task, at: &mut PathBuf) -> Result<Done, CommitError> {
        match task {
            Task::Write(write) => {
                at.clone_from(&self.files[write.file].place.path);
                self.write(write)
            }
            // Only now: a disk takes bytes faster from memory than from the caches of the processor that summed them.
            Task::Sum(Write { file, offset, image, start, length }) => {
                at.clone_from(&self.files[file].place.path);
                let checksum = Checksum::of(image.bytes(start, length));
                Ok(Done::Summed { file, offset, length: length as u64, checksum })
            }
            Task::Finish(file) => {
                at.clone_from(&self.files[file].place.path);
                let file = &self.files[file];
                self.output(file)?.finish(&self.disk, &file.place.path)?;
                *file.output.lock().unwrap_or_else(PoisonError::into_inner) = None;
                Ok(Done::Finished)
            }
            Task::FinishFolders => {
                at.clone_from(&self.path().to_path_buf());
                self.tree.fsync(&self.disk)?;
                Ok(Done::FinishedFolders)
            }
        }
    }

    fn write(&self, write: Write) -> Result<Done, CommitError> {
        let file = &self.files[write.file];
        let bytes = write.image.bytes(write.start, write.length);
        let output = self.output(file)?;
        let cached = output.write(&self.disk, write.offset, bytes, &file.place.path, &self.direct_io)?;
        Ok(Done::Wrote { write, cached: cached as u64 })
    }

    fn output(&self, file: &SharedFile<D>) -> Result<Arc<Output<D>>, CommitError> {
        let mut output = file.output.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(output) = output.as_ref() {
            return Ok(Arc::clone(output));
        }
        let opened = Arc::new(Output::open(&self.disk, &self.tree, &file.place, &self.direct_io)?);
        Ok(Arc::clone(output.insert(opened)))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn message_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|&text| text.to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

//! What is to be done and what is done: the state of a writer, without its disk.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;

use rustix::io::Errno;

use super::progress::Progress;
use super::slot::Slot;
use super::write::Write;
use crate::checksum::Checksum;
use crate::error::CommitError;
use crate::writeback::WINDOW;

/// The most threads that write. One alone gives the disks measured all they can take; the others keep it busy where
/// training leaves a thread waiting for a processor.
pub(super) const THREADS: usize = 4;

/// Of these, how many write where what is written is summed too: if all did, they would come to sum at one time, and
/// leave the disk idle.
const WRITING_BESIDE_SUMS: usize = 3;

/// Files that are made durable together: the first fsync of many small ones commits what the others wait for, too.
const BATCH: usize = 64;

/// Bytes in the page cache that may be written while another rank writes: a piece's, more than the ends of files that
/// are no whole pages come to.
const LITTLE: u64 = WINDOW;

/// What one thread does next.
pub(super) enum Task {
    /// At most [`WINDOW`] bytes, which end at a multiple of it in the file where they are not the last of a write.
    Write(Write),
    /// Compute the checksum of what is written.
    Sum(Write),
    /// Make a file durable that is written.
    Finish(usize),
    /// Make the names durable, after all files.
    FinishFolders,
}

/// What came of a task.
pub(super) enum Done {
    /// `cached`: how many of the bytes went through the page cache.
    Wrote {
        write: Write,
        cached: u64,
    },
    Summed {
        file: usize,
        offset: u64,
        length: u64,
        checksum: Checksum,
    },
    Finished,
    FinishedFolders,
}

/// The right to write.
pub(super) enum Right {
    None,
    /// A thread waits for a slot.
    Sought,
    Held(Slot),
}

#[derive(PartialEq)]
enum Folders {
    Waiting,
    Taken,
    Durable,
}

pub(super) struct State {
    /// Handed in, and not begun.
    queue: VecDeque<Write>,
    /// Written, and to be summed, which no thread does yet.
    unsummed: VecDeque<Write>,
    /// How many pieces are written and not summed, where sums are wanted; also of those that were given up.
    sums_left: usize,
    sums: bool,
    /// Files that are written, and that no thread makes durable yet; all are open.
    written: Vec<usize>,
    /// Whether they are made durable before anything more is written.
    catching_up: bool,
    pub(super) files: Vec<Progress>,
    /// Files that are not durable.
    unfinished: usize,
    folders: Folders,
    /// Threads that write.
    writing: usize,
    /// Threads that make a file durable.
    finishing: usize,
    /// Bytes that went through the page cache while the slot was held.
    cached: u64,
    /// Threads that have not ended.
    pub(super) running: usize,
    pub(super) right: Right,
    /// Nothing more is handed in.
    pub(super) closed: bool,
    pub(super) stopped: bool,
    failure: Option<CommitError>,
}

impl State {
    /// `sums`: whether what is written is summed.
    pub(super) fn new(sizes: &[u64], sums: bool) -> Self {
        State {
            queue: VecDeque::new(),
            unsummed: VecDeque::new(),
            sums_left: 0,
            sums,
            // Nothing is to be written of an empty file.
            written: (0..sizes.len()).filter(|&file| sizes[file] == 0).collect(),
            catching_up: false,
            files: sizes.iter().map(|&size| Progress::new(size)).collect(),
            unfinished: sizes.len(),
            folders: Folders::Waiting,
            writing: 0,
            finishing: 0,
            cached: 0,
            running: 0,
            right: Right::None,
            closed: false,
            stopped: false,
            failure: None,
        }
    }

    /// Whether all is durable, and summed.
    pub(super) fn is_done(&self) -> bool {
        self.folders == Folders::Durable && self.sums_left == 0
    }

    /// Whether threads have nothing to do any more.
    pub(super) fn is_over(&self) -> bool {
        self.stopped || self.failure.is_some() || self.is_done()
    }

    pub(super) fn push(&mut self, write: Write) {
        self.queue.push_back(write);
    }

    /// Whether a thread could write if there were a slot.
    pub(super) fn has_writes(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Begins a task, a write only while a slot is held; [`done`](State::done) or [`fail`](State::fail) ends it.
    pub(super) fn next_task(&mut self) -> Option<Task> {
        self.catching_up = match self.written.len() {
            0 => false,
            number => self.catching_up || number >= BATCH || self.queue.is_empty(),
        };
        let most_writing = if self.sums { WRITING_BESIDE_SUMS } else { THREADS };
        if !self.catching_up
            && matches!(self.right, Right::Held(_))
            && let Some(write) = self.queue.front_mut()
        {
            if self.writing < most_writing {
                let piece = write.cut_piece();
                if write.length == 0 {
                    self.queue.pop_front();
                }
                self.writing += 1;
                return Some(Task::Write(piece));
            }
        } else if let Some(file) = self.written.pop() {
            self.finishing += 1;
            return Some(Task::Finish(file));
        }
        if self.closed && self.unfinished == 0 && self.folders == Folders::Waiting {
            self.folders = Folders::Taken;
            return Some(Task::FinishFolders);
        }
        self.unsummed.pop_front().map(Task::Sum)
    }

    /// Ends a task; returns the bytes whose memory is needed no more: they are written, and summed if they are to be.
    /// What went past the cache is written, so that another rank may write while this one makes its files durable; what
    /// did not is written by that.
    pub(super) fn done(&mut self, done: Done) -> u64 {
        let mut needed_no_more = 0;
        match done {
            Done::Wrote { write, cached } => {
                self.writing -= 1;
                self.cached += cached;
                if self.files[write.file].wrote(write.length as u64) && !self.is_over() {
                    self.written.push(write.file);
                }
                self.sums_left += usize::from(self.sums);
                if self.sums && !self.is_over() {
                    self.unsummed.push_back(write);
                } else {
                    needed_no_more = write.length as u64;
                }
            }
            Done::Summed { file, offset, length, checksum } => {
                self.sums_left -= 1;
                self.files[file].sum(offset, length, checksum);
                needed_no_more = length;
            }
            Done::Finished => {
                self.finishing -= 1;
                self.unfinished -= 1;
            }
            Done::FinishedFolders => self.folders = Folders::Durable,
        }
        let is_durable = self.finishing == 0 && self.written.is_empty();
        if self.writing == 0 && self.queue.is_empty() && (is_durable || self.cached <= LITTLE) {
            self.right = Right::None;
            self.cached = 0;
        }
        needed_no_more
    }

    /// Keeps the first failure and gives up what was not begun.
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
        self.unsummed.clear();
        self.written.clear();
    }

    /// The failure, if there is one: as it was the first time, as one that lies in the past from then on.
    pub(super) fn take_failure(&mut self) -> Option<CommitError> {
        let past = in_the_past(self.failure.as_ref()?);
        self.failure.replace(past)
    }

    /// Refuses once anything failed.
    pub(super) fn check(&self) -> Result<(), CommitError> {
        self.failure.as_ref().map_or(Ok(()), |failure| Err(in_the_past(failure)))
    }
}

fn in_the_past(failure: &CommitError) -> CommitError {
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
    use crate::staging::FileImage;

    /// Of files of one piece each, `pieces` of which were handed in.
    fn state(files: usize, pieces: usize) -> State {
        let mut state = State::new(&vec![WINDOW; files], false);
        for file in 0..pieces {
            hand_in(&mut state, file);
        }
        state
    }

    /// As `state`, of files of which all was handed in, and is to be summed; with a slot.
    fn state_with_sums(files: usize) -> State {
        let mut state = State { sums: true, closed: true, ..state(files, files) };
        take_slot(&mut state);
        state
    }

    fn piece(file: usize) -> Write {
        let image = Arc::new(FileImage::new(0).unwrap());
        Write { file, offset: 0, image, start: 0, length: WINDOW as usize }
    }

    fn hand_in(state: &mut State, file: usize) {
        assert!(state.files[file].hand_in(0..WINDOW));
        state.push(piece(file));
    }

    fn take_slot(state: &mut State) {
        assert!(matches!(state.right, Right::None));
        state.right = Right::Held(Slot::of_nothing());
    }

    fn begin_write(state: &mut State) -> usize {
        match state.next_task() {
            Some(Task::Write(write)) => write.file,
            _ => panic!("there is something to write"),
        }
    }

    fn wrote(state: &mut State, file: usize, cached: u64) {
        let through = if state.sums { 0 } else { WINDOW };
        assert_eq!(state.done(Done::Wrote { write: piece(file), cached }), through);
    }

    fn is_held(state: &State) -> bool {
        matches!(state.right, Right::Held(_))
    }

    #[test]
    fn nothing_is_written_without_a_slot() {
        let mut state = state(1, 1);
        assert!(state.next_task().is_none() && state.has_writes());
        state.right = Right::Sought;
        assert!(state.next_task().is_none());
        state.right = Right::Held(Slot::of_nothing());
        assert_eq!(begin_write(&mut state), 0);
    }

    #[test]
    fn the_slot_is_held_until_the_last_thread_has_written() {
        let mut state = state(2, 2);
        take_slot(&mut state);
        let (one, other) = (begin_write(&mut state), begin_write(&mut state));
        wrote(&mut state, one, 0);
        assert!(is_held(&state));
        // What is written may be made durable meanwhile.
        assert!(matches!(state.next_task(), Some(Task::Finish(file)) if file == one));
        state.done(Done::Finished);
        assert!(is_held(&state));
        wrote(&mut state, other, 0);
        assert!(!is_held(&state));
        assert!(matches!(state.next_task(), Some(Task::Finish(file)) if file == other));
    }

    /// Begins and ends the writing of a piece; the file that it is of.
    fn write_one(state: &mut State) -> usize {
        let file = begin_write(state);
        wrote(state, file, 0);
        file
    }

    fn begin_sum(state: &mut State) -> usize {
        match state.next_task() {
            Some(Task::Sum(write)) => write.file,
            _ => panic!("there is something to sum"),
        }
    }

    fn summed(state: &mut State, file: usize) {
        let done = Done::Summed { file, offset: 0, length: WINDOW, checksum: Checksum::EMPTY };
        assert_eq!(state.done(done), WINDOW);
    }

    /// Makes the files durable, and their names.
    fn make_durable(state: &mut State, files: usize) {
        for _ in 0..files {
            assert!(matches!(state.next_task(), Some(Task::Finish(_))));
            state.done(Done::Finished);
        }
        assert!(matches!(state.next_task(), Some(Task::FinishFolders)));
        state.done(Done::FinishedFolders);
    }

    #[test]
    fn a_thread_is_left_to_sum_what_the_others_wrote() {
        let mut state = state_with_sums(8);
        for _ in 1..WRITING_BESIDE_SUMS {
            begin_write(&mut state);
        }
        let first = begin_write(&mut state);
        assert!(state.next_task().is_none(), "nothing is there to sum");
        wrote(&mut state, first, 0);
        // The disk is not to wait for the sum, nor for the fsync of one file of many.
        begin_write(&mut state);
        assert_eq!(begin_sum(&mut state), first);
        assert!(state.next_task().is_none());
    }

    #[test]
    fn what_is_written_is_made_durable_before_and_while_it_is_summed() {
        for is_begun_before in [true, false] {
            let mut state = state_with_sums(1);
            write_one(&mut state);
            assert!(!is_held(&state));
            assert!(matches!(state.next_task(), Some(Task::Finish(0))));
            if is_begun_before {
                begin_sum(&mut state);
            }
            state.done(Done::Finished);
            make_durable(&mut state, 0);
            assert!(!state.is_done());
            if !is_begun_before {
                begin_sum(&mut state);
            }
            summed(&mut state, 0);
            assert!(state.is_done());
        }
    }

    #[test]
    fn who_stops_before_all_is_summed_is_not_done() {
        let mut state = state_with_sums(2);
        for _ in 0..2 {
            write_one(&mut state);
        }
        make_durable(&mut state, 2);
        let file = begin_sum(&mut state);
        state.stop();
        summed(&mut state, file);
        assert!(state.is_over() && !state.is_done());
    }

    #[test]
    fn after_a_failure_nothing_is_summed() {
        let mut state = state_with_sums(3);
        let (one, other) = (write_one(&mut state), begin_write(&mut state));
        state.fail(CommitError::io("write", &PathBuf::from(one.to_string()), Errno::IO));
        assert_eq!(state.done(Done::Wrote { write: piece(other), cached: 0 }), WINDOW);
        assert!(state.next_task().is_none());
    }

    #[test]
    fn what_is_in_the_cache_is_made_durable_with_the_slot() {
        let mut state = state(2, 2);
        take_slot(&mut state);
        for cached in [WINDOW, 1] {
            let file = begin_write(&mut state);
            wrote(&mut state, file, cached);
        }
        for _ in 0..2 {
            assert!(is_held(&state));
            assert!(matches!(state.next_task(), Some(Task::Finish(_))));
            assert!(is_held(&state));
            state.done(Done::Finished);
        }
        assert!(!is_held(&state));
    }

    #[test]
    fn of_what_is_handed_in_later_the_cached_bytes_count_anew() {
        let mut state = state(3, 2);
        take_slot(&mut state);
        for cached in [LITTLE, 0] {
            let file = begin_write(&mut state);
            wrote(&mut state, file, cached);
        }
        assert!(!is_held(&state));
        hand_in(&mut state, 2);
        // Whoever comes first makes durable what is written; the next one asks for a slot.
        assert!(matches!(state.next_task(), Some(Task::Finish(_))));
        assert!(matches!(state.next_task(), Some(Task::Finish(_))));
        assert!(state.next_task().is_none() && state.has_writes());
        take_slot(&mut state);
        assert_eq!(begin_write(&mut state), 2);
        wrote(&mut state, 2, LITTLE);
        assert!(!is_held(&state));
    }

    #[test]
    fn empty_files_and_names_need_no_slot() {
        let mut state = State::new(&[0], true);
        state.closed = true;
        assert!(matches!(state.next_task(), Some(Task::Finish(0))));
        assert!(state.next_task().is_none());
        state.done(Done::Finished);
        assert!(matches!(state.next_task(), Some(Task::FinishFolders)));
        assert!(state.next_task().is_none());
        state.done(Done::FinishedFolders);
        assert!(state.is_done() && !is_held(&state));
    }

    #[test]
    fn after_a_failure_the_slot_is_held_while_somebody_writes() {
        let mut state = state(3, 3);
        take_slot(&mut state);
        let (one, other) = (begin_write(&mut state), begin_write(&mut state));
        state.fail(CommitError::io("write", &PathBuf::from(one.to_string()), Errno::IO));
        assert!(state.is_over() && !state.has_writes());
        wrote(&mut state, other, 0);
        // The one that failed is counted out by the end of its thread.
        assert!(is_held(&state));
        assert!(state.next_task().is_none());
    }
}

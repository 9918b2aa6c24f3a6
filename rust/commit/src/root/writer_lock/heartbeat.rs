//! The thread that writes the owner's heartbeat.
//!
//! Invariant: it ends with the ownership. A copy in a child made by `fork` has no thread and touches nothing.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;

use rustix::io::Errno;

use super::lock_file::LockFile;
use crate::disk::Disk;
use crate::error::CommitError;

pub(crate) struct Heartbeat {
    thread: Option<JoinHandle<()>>,
    /// Dropping it ends the thread.
    stop: Option<Sender<()>>,
}

impl Heartbeat {
    pub(crate) fn start<D: Disk + 'static>(lock_file: Arc<LockFile<D>>) -> Result<Self, CommitError> {
        let (stop, stopped) = mpsc::channel::<()>();
        let path = lock_file.path.clone();
        let run = move || {
            let mut beat = 0;
            while stopped.recv_timeout(lock_file.timing.beat) == Err(RecvTimeoutError::Timeout) {
                beat += 1;
                // A disk that fails now and then must not end the heartbeat. The owner itself finds out about another
                // owner before it changes anything.
                if matches!(lock_file.beat(beat), Ok(false)) {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("tundish-heartbeat".to_owned()).spawn(run).map_err(|error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::AGAIN);
            CommitError::io("start the heartbeat of", &path, errno)
        })?;
        Ok(Self { thread: Some(thread), stop: Some(stop) })
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

//! The thread that lets the owner's heart beat.
//!
//! What always holds: it ends with the ownership; a copy in a child made by `fork` has no thread and touches nothing.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::io::Errno;

use super::Claim;
use crate::disk::Disk;
use crate::error::CommitError;

pub(super) struct Heart {
    thread: Option<JoinHandle<()>>,
    stop: Arc<(Mutex<bool>, Condvar)>,
}

impl Heart {
    pub(super) fn start<D: Disk + 'static>(claim: Arc<Claim<D>>) -> Result<Self, CommitError> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let path = claim.path.clone();
        let seen = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("tundish-heart".to_owned())
            .spawn(move || beat_until(&seen, &claim))
            .map_err(|error| {
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::AGAIN);
                CommitError::io("start the heartbeat of", &path, errno)
            })?;
        Ok(Self { thread: Some(thread), stop })
    }
}

impl Drop for Heart {
    fn drop(&mut self) {
        *self.stop.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn beat_until<D: Disk>(stop: &(Mutex<bool>, Condvar), claim: &Claim<D>) {
    let (stopped, changed) = stop;
    let mut beat = 0;
    let mut stopped = stopped.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let waited = changed.wait_timeout_while(stopped, claim.timing.beat, |stopped| !*stopped);
        stopped = waited.unwrap_or_else(PoisonError::into_inner).0;
        if *stopped {
            return;
        }
        beat += 1;
        // A disk that fails now and then must not stop the heart. Who else owns the root is found out by the owner
        // itself before it changes anything.
        if matches!(claim.beat(beat), Ok(false)) {
            return;
        }
    }
}

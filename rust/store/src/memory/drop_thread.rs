//! Drops large collections on a thread of its own, so that the thread that drains does not wait for it.
//!
//! Invariant: everything that is handed over is dropped, by the caller where the system has no thread left.

use std::any::Any;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crate::memory::slab_pool::SlabPool;

/// Fewer entries are dropped at once, so that their memory is free for the next use.
const FEW: u64 = 1000;

/// Memory that is idle for so long goes back to the system.
const QUIET: Duration = Duration::from_secs(60);

type Garbage = Box<dyn Any + Send>;

/// Drops large collections in the background.
pub(crate) struct DropThread {
    sender: Mutex<Option<Sender<Garbage>>>,
    left: Arc<Left>,
    pools: Vec<Weak<SlabPool>>,
    /// Idle time after which slabs go back to the system.
    pub(crate) quiet: Duration,
}

/// The number of collections to drop.
#[derive(Default)]
struct Left {
    count: Mutex<u64>,
    done: Condvar,
}

impl DropThread {
    /// A drop thread that also trims these pools now and then.
    pub(crate) fn new(pools: &[&Arc<SlabPool>]) -> Self {
        let pools = pools.iter().map(|pool| Arc::downgrade(pool)).collect();
        DropThread { sender: Mutex::default(), left: Arc::default(), pools, quiet: QUIET }
    }

    /// Drops something that holds `entries` entries: here if they are few, else on the thread.
    pub(crate) fn drop_later(&self, garbage: impl Send + 'static, entries: u64) {
        let mut sender = self.sender.lock().unwrap_or_else(PoisonError::into_inner);
        if sender.is_none() {
            *sender = self.start();
        }
        match &*sender {
            Some(sender) if entries > FEW => {
                *self.left.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
                let sent = sender.send(Box::new(garbage));
                debug_assert!(sent.is_ok(), "the thread lives as long as the sender");
            }
            _ => {
                drop(sender);
                drop(garbage);
            }
        }
    }

    /// Waits until the thread has dropped everything; `false` if that takes longer than `longest`.
    pub(crate) fn wait_for_drops(&self, longest: Duration) -> bool {
        let count = self.left.count.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.left.done.wait_timeout_while(count, longest, |count| *count > 0);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// `None` where the system has no thread left.
    fn start(&self) -> Option<Sender<Garbage>> {
        let (sender, receiver) = channel();
        let (left, pools, quiet) = (Arc::clone(&self.left), self.pools.clone(), self.quiet);
        let started = thread::Builder::new().name("tundish-drop".to_owned());
        started.spawn(move || work(&receiver, &left, &pools, quiet)).ok().map(|_| sender)
    }
}

fn work(garbage: &Receiver<Garbage>, left: &Left, pools: &[Weak<SlabPool>], quiet: Duration) {
    let mut last = Instant::now();
    loop {
        if last.elapsed() >= quiet {
            pools.iter().filter_map(Weak::upgrade).for_each(|pool| pool.trim());
            last = Instant::now();
        }
        match garbage.recv_timeout(quiet.saturating_sub(last.elapsed())) {
            Ok(garbage) => {
                drop(garbage);
                *left.count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
                left.done.notify_all();
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

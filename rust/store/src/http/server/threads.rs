//! Work that takes longer than a turn, done beside the threads that serve.
//!
//! What always holds: what is given is done, if need be by who gives it; its threads take no signals.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use tokio::sync::{Semaphore, oneshot};
use tundish_shm::without_signals;

/// Threads at the same time, so that many requests take no more of them than some.
const MOST: usize = 8;

static FREE: Semaphore = Semaphore::const_new(MOST);

/// Does it on a thread of its own; on this one where the system has none left. `None` where it panics.
pub(super) async fn beside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let _one = FREE.acquire().await;
    let (tell, told) = oneshot::channel();
    // A thread that does not start takes what it was to do with it: it is left here for who comes first.
    let left = Arc::new(Mutex::new(Some(work)));
    let take = |left: &Mutex<Option<_>>| left.lock().unwrap_or_else(PoisonError::into_inner).take();
    let taken = Arc::clone(&left);
    let start = || {
        let started = thread::Builder::new().name("tundish-serve".to_owned());
        started.spawn(move || take(&taken).map(|work| tell.send(work())))
    };
    if without_signals(start).is_err() {
        return take(&left).map(|work| work());
    }
    told.await.ok()
}

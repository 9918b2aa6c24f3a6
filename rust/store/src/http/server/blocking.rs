//! Work that takes long, done beside the threads that serve.
//!
//! Not tokio's own pool: where the system has no thread left, work that is given to that is never done.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use tokio::sync::{Semaphore, oneshot};
use tundish_shm::without_signals;

use crate::http::refusal::Refusal;

/// Threads at the same time, however many requests there are.
const MOST: usize = 8;

static FREE: Semaphore = Semaphore::const_new(MOST);

/// Does it on a thread of its own, which takes no signals; on this one where the system has none left.
///
/// # Errors
/// 500 where it panics.
pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Refusal> {
    let _one = FREE.acquire().await;
    let (sender, receiver) = oneshot::channel();
    // A thread that does not start drops what it was given: the work stays here for anyone who comes first.
    let work = Arc::new(Mutex::new(Some(work)));
    let take = |work: &Mutex<Option<_>>| work.lock().unwrap_or_else(PoisonError::into_inner).take();
    let shared = Arc::clone(&work);
    let start = || {
        let builder = thread::Builder::new().name("tundish-serve".to_owned());
        builder.spawn(move || take(&shared).map(|work| sender.send(work())))
    };
    let done = match without_signals(start) {
        Ok(_) => receiver.await.ok(),
        Err(_) => take(&work).map(|work| work()),
    };
    done.ok_or_else(|| Refusal::new(500, "it failed; the owner's standard error tells why"))
}

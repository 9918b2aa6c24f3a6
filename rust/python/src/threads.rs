//! Thread pools that survive `fork`.
//!
//! It owns every pool of this module. What always holds: a pool is used only by the process that
//! made it. A forked child inherits the memory of a pool but none of its threads, so it makes its own and leaves
//! the inherited one untouched; and since the list is only ever appended to, by one compare-and-exchange of a
//! pointer, there is no lock that a child could find held by a thread it does not have.
#![allow(unsafe_code)]

use std::process;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::thread;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::BindingError;

/// A pool and where it may be used. Never freed: dropping a pool waits for its threads, and in a
/// child there are none to wait for.
struct Node {
    process: u32,
    pool: ThreadPool,
    next: AtomicPtr<Node>,
}

static FIRST: AtomicPtr<Node> = AtomicPtr::new(ptr::null_mut());

/// How many threads this process may run on at once.
pub(crate) fn available() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// The pool of `threads` threads of this process; none for a single thread.
///
/// # Errors
/// When the system refuses to start the threads.
pub(crate) fn pool(threads: usize) -> Result<Option<&'static ThreadPool>, BindingError> {
    if threads <= 1 {
        return Ok(None);
    }
    let process = process::id();
    let mut fresh: *mut Node = ptr::null_mut();
    let mut link: &'static AtomicPtr<Node> = &FIRST;
    loop {
        let mut node = link.load(Ordering::Acquire);
        if node.is_null() {
            if fresh.is_null() {
                let pool = start(threads)?;
                fresh = Box::into_raw(Box::new(Node { process, pool, next: AtomicPtr::new(ptr::null_mut()) }));
            }
            // Whoever comes second goes on behind the first, with the pool it has made.
            node = match link.compare_exchange(ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => std::mem::replace(&mut fresh, ptr::null_mut()),
                Err(first) => first,
            };
        }
        // SAFETY: not null, made by `Box::into_raw` above, published with release ordering and never freed.
        let node: &'static Node = unsafe { &*node };
        if node.process == process && node.pool.current_num_threads() == threads {
            if !fresh.is_null() {
                // SAFETY: made by `Box::into_raw` above, and never published.
                drop(unsafe { Box::from_raw(fresh) });
            }
            return Ok(Some(&node.pool));
        }
        link = &node.next;
    }
}

fn start(threads: usize) -> Result<ThreadPool, BindingError> {
    ThreadPoolBuilder::new().num_threads(threads).thread_name(|number| format!("tundish-{number}")).build().map_err(
        |error| BindingError::Threads(format!("cannot start {threads} threads: {error}; pass a smaller threads=")),
    )
}

//! Thread pools that survive `fork`.
//!
//! It owns every pool of this module. What always holds: a pool is used only by the process that
//! made it. A forked child inherits the memory of a pool but none of its threads, so it makes its own and leaves
//! the inherited one untouched; and since the list is only ever appended to, by one atomic exchange, no
//! lock can be found held by a thread that does not exist in the child.

use std::process;
use std::sync::OnceLock;
use std::thread;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::BindingError;

/// A pool and where it may be used. Never freed: dropping a pool waits for its threads, and in a
/// child there are none to wait for.
struct Node {
    process: u32,
    pool: ThreadPool,
    next: OnceLock<Box<Node>>,
}

static FIRST: OnceLock<Box<Node>> = OnceLock::new();

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
    let mut fresh: Option<Box<Node>> = None;
    let mut slot = &FIRST;
    loop {
        let node = match slot.get() {
            Some(node) => node,
            None => {
                let node = match fresh.take() {
                    Some(node) => node,
                    None => Box::new(Node { process, pool: start(threads)?, next: OnceLock::new() }),
                };
                match slot.set(node) {
                    Ok(()) => match slot.get() {
                        Some(node) => node,
                        None => continue,
                    },
                    // Another thread was first; what was made here goes behind it.
                    Err(node) => {
                        fresh = Some(node);
                        continue;
                    }
                }
            }
        };
        if node.process == process && node.pool.current_num_threads() == threads {
            return Ok(Some(&node.pool));
        }
        slot = &node.next;
    }
}

fn start(threads: usize) -> Result<ThreadPool, BindingError> {
    ThreadPoolBuilder::new().num_threads(threads).thread_name(|number| format!("tundish-{number}")).build().map_err(
        |error| BindingError::Threads(format!("cannot start {threads} threads: {error}; pass a smaller threads=")),
    )
}

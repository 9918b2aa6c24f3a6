//! The threads of one call.
//!
//! Invariants: the pool is built for the call and dropped with it, so that a child of `fork` inherits no pool whose
//! threads are gone.

use std::thread;

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

/// A call starts this many threads even on a machine with fewer processors.
const ALWAYS_ALLOWED: usize = 8;

/// The calling thread alone, or a pool of threads.
pub(crate) struct Threads {
    pool: Option<ThreadPool>,
}

impl Threads {
    /// Start up to `threads` threads: no more than the machine has processors, except for a few. A machine that starts
    /// none leaves the calling thread to do the work.
    pub(crate) fn new(threads: usize) -> Self {
        let processors = thread::available_parallelism().map_or(ALWAYS_ALLOWED, usize::from);
        let threads = threads.min(processors.max(ALWAYS_ALLOWED));
        if threads <= 1 {
            return Self { pool: None };
        }
        let builder = ThreadPoolBuilder::new().num_threads(threads).thread_name(|number| format!("tundish-{number}"));
        Self { pool: builder.build().ok() }
    }

    /// How many threads a request asks for: by default, as many as this process has processors.
    pub(crate) fn asked(threads: Option<u64>) -> usize {
        match threads {
            Some(threads) => usize::try_from(threads).unwrap_or(usize::MAX),
            None => thread::available_parallelism().map_or(1, usize::from),
        }
    }

    /// How many threads work.
    pub(crate) fn count(&self) -> usize {
        self.pool.as_ref().map_or(1, ThreadPool::current_num_threads)
    }

    /// Call `work` once for each item, with the number of the thread that runs it, below `count()`.
    ///
    /// # Panics
    /// When `work` panics.
    pub(crate) fn for_each<T: Send>(&self, items: &mut [T], work: impl Fn(usize, &mut T) + Send + Sync) {
        match &self.pool {
            None => items.iter_mut().for_each(|item| work(0, item)),
            Some(pool) => pool.install(|| {
                let thread = || rayon::current_thread_index().unwrap_or_default();
                items.par_iter_mut().with_max_len(1).for_each(|item| work(thread(), item));
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_item_is_visited_once_by_a_thread_with_a_valid_number() {
        for count in 1..5 {
            let threads = Threads::new(count);
            assert_eq!(threads.count(), count);
            let mut items = vec![0usize; 1000];
            for _ in 0..3 {
                threads.for_each(&mut items, |thread, item| {
                    assert!(thread < count);
                    *item += 1;
                });
            }
            assert_eq!(items, [3; 1000]);
        }
    }

    #[test]
    fn a_call_never_starts_many_more_threads_than_processors() {
        let most = thread::available_parallelism().map_or(ALWAYS_ALLOWED, usize::from).max(ALWAYS_ALLOWED);
        for threads in [1, 2, ALWAYS_ALLOWED, ALWAYS_ALLOWED + 1, 512, usize::MAX] {
            assert_eq!(Threads::new(threads).count(), threads.min(most));
        }
    }
}

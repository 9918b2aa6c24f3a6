use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use crate::entries::fair_lock::FairLock;

/// Keeps this thread and those that it starts on one processor, where a thread that yields makes room for the others.
/// On several, the processor of a waiting thread may be busy for longer than the lock is free.
#[cfg(target_os = "linux")]
fn stay_on_one_processor() {
    use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};
    let mut here = CpuSet::new();
    here.set(sched_getcpu());
    sched_setaffinity(None, &here).unwrap();
}

#[cfg(not(target_os = "linux"))]
fn stay_on_one_processor() {}

#[test]
fn a_chunk_is_short_and_a_waiting_thread_gets_the_lock_between_two() {
    stay_on_one_processor();
    let (fair_lock, is_over) = (FairLock::new(()), AtomicBool::new(false));
    let (came, got_in) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let chunks = thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                came.fetch_add(1, Ordering::SeqCst);
                drop(fair_lock.lock());
                got_in.fetch_add(1, Ordering::SeqCst);
                // So that it counts once between two chunks.
                thread::sleep(Duration::from_micros(100));
            }
        });
        let chunks = fair_lock.in_chunks(&[0u8; 50 * 128], |(), chunk| {
            let before = got_in.load(Ordering::SeqCst);
            // The other thread waits at the end of each chunk.
            while came.load(Ordering::SeqCst) == got_in.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_micros(100));
            }
            thread::sleep(Duration::from_millis(2));
            (chunk.len(), before)
        });
        is_over.store(true, Ordering::SeqCst);
        chunks
    });
    assert!(chunks.iter().all(|(len, _)| *len <= 128));
    let let_in = chunks.windows(2).filter(|pair| pair[0].1 < pair[1].1).count();
    assert!(let_in >= chunks.len() * 3 / 4, "in {let_in} of {} pauses", chunks.len() - 1);
}

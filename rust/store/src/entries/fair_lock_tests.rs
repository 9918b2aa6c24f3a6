use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use crate::entries::fair_lock::FairLock;

/// Keeps this thread, and those that it starts, on the processor that it is on: what one yields there, another gets. Of
/// several, that on which who waits is to wake up may have other work for longer than anybody is let in.
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
fn a_turn_is_short_and_a_waiting_thread_gets_in_between_two() {
    stay_on_one_processor();
    let (fair_lock, is_over) = (FairLock::new(()), AtomicBool::new(false));
    let (came, got_in) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let turns = thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                came.fetch_add(1, Ordering::SeqCst);
                drop(fair_lock.lock());
                got_in.fetch_add(1, Ordering::SeqCst);
                // So that it counts once between two turns.
                thread::sleep(Duration::from_micros(100));
            }
        });
        let turns = fair_lock.in_turns(&[0u8; 50 * 128], |(), some| {
            let before = got_in.load(Ordering::SeqCst);
            // Somebody waits at the end of each turn.
            while came.load(Ordering::SeqCst) == got_in.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_micros(100));
            }
            thread::sleep(Duration::from_millis(2));
            (some.len(), before)
        });
        is_over.store(true, Ordering::SeqCst);
        turns
    });
    assert!(turns.iter().all(|(len, _)| *len <= 128));
    let let_in = turns.windows(2).filter(|pair| pair[0].1 < pair[1].1).count();
    assert!(let_in >= turns.len() * 3 / 4, "in {let_in} of {} pauses", turns.len() - 1);
}

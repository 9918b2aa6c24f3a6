//! Sleeps on a word of memory that several processes map.
//!
//! A sleep may end for no visible reason, so the caller looks again; errors mean no more than that.

use core::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleep as long as `word` is `seen`, until it is rung, a signal is handled or `longest` is over.
#[cfg(target_os = "linux")]
pub(crate) fn sleep(word: &AtomicU32, seen: u32, longest: Option<Duration>) {
    use rustix::thread::futex;
    // A time that is too long for the kernel is none.
    let timeout = longest.and_then(|longest| futex::Timespec::try_from(longest).ok());
    let _ = futex::wait(word, futex::Flags::empty(), seen, timeout.as_ref());
}

/// End the sleep of everybody on `word`, in every process.
#[cfg(target_os = "linux")]
pub(crate) fn ring(word: &AtomicU32) {
    use rustix::thread::futex;
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

/// Without futexes a sleep is short, and its end is to look again.
#[cfg(not(target_os = "linux"))]
pub(crate) fn sleep(_word: &AtomicU32, _seen: u32, longest: Option<Duration>) {
    const NAP: Duration = Duration::from_millis(1);
    std::thread::sleep(longest.map_or(NAP, |longest| longest.min(NAP)));
}

/// Nobody sleeps for long.
#[cfg(not(target_os = "linux"))]
pub(crate) fn ring(_word: &AtomicU32) {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use core::sync::atomic::Ordering::SeqCst;
    use std::sync::Arc;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_sleep_ends_when_the_word_is_rung_has_changed_or_time_is_over() {
        let word = Arc::new(AtomicU32::new(1));
        let begin = Instant::now();
        sleep(&word, 0, None);
        sleep(&word, 1, Some(Duration::from_millis(20)));
        assert!(begin.elapsed() >= Duration::from_millis(20));
        let sleeper = std::thread::spawn({
            let word = Arc::clone(&word);
            move || {
                while word.load(SeqCst) == 1 {
                    sleep(&word, 1, None);
                }
            }
        });
        std::thread::sleep(Duration::from_millis(10));
        word.store(2, SeqCst);
        ring(&word);
        sleeper.join().unwrap();
    }
}

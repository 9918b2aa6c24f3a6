//! Sleeps on a word of memory that several processes map.
//!
//! A sleep may end without a reason, also by an error, so the caller checks the word again.

use core::sync::atomic::AtomicU32;
use std::time::Duration;

use rustix::thread::futex;

/// Sleeps while `word` is `seen`, until a wake-up, a signal or the end of `longest`.
pub(crate) fn sleep(word: &AtomicU32, seen: u32, longest: Option<Duration>) {
    // A time that is too long for the kernel is no limit.
    let timeout = longest.and_then(|longest| futex::Timespec::try_from(longest).ok());
    let _ = futex::wait(word, futex::Flags::empty(), seen, timeout.as_ref());
}

/// Wakes every thread that sleeps on `word`, in every process.
pub(crate) fn wake_all(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::Ordering::SeqCst;
    use std::sync::Arc;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_sleep_ends_when_the_word_is_woken_has_changed_or_time_is_over() {
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
        wake_all(&word);
        sleeper.join().unwrap();
    }
}

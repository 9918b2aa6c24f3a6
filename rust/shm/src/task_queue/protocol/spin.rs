//! Waits awake (spins), as long as that pays.
//!
//! A sleep and its end cost some ten microseconds of latency and a system call of the other side. A shorter wait is
//! better spent awake; a longer one takes a processor from working threads. The length of the last waits predicts the
//! next one.

use core::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::time_limit::TimeLimit;

/// A shorter wait is spent awake. A receiver of a small batch waits a fifth of a millisecond for it.
const MAX_SPIN: Duration = Duration::from_micros(400);
/// Looks between two yields of the processor: the awaited process may need it.
const CHECKS_PER_YIELD: usize = 32;
/// After so many long waits in a row, the next one is expected to be long too.
const LONG_WAITS_BEFORE_SLEEP: u32 = 2;

/// The lengths of the last waits of one side.
#[derive(Debug, Default)]
pub(crate) struct SpinHistory {
    long_waits: AtomicU32,
}

/// A wait that has begun.
pub(crate) struct StartedWait(Instant);

impl SpinHistory {
    pub(crate) fn begin(&self) -> StartedWait {
        StartedWait(Instant::now())
    }

    /// Look until `is_over` or it is time to sleep, or to go.
    pub(crate) fn spin_until(&self, started: &StartedWait, limit: &TimeLimit<'_>, is_over: impl Fn() -> bool) {
        if self.long_waits.load(Ordering::Relaxed) >= LONG_WAITS_BEFORE_SLEEP {
            return;
        }
        while started.0.elapsed() < MAX_SPIN && !limit.is_over() {
            for _ in 0..CHECKS_PER_YIELD {
                if is_over() {
                    return;
                }
                core::hint::spin_loop();
            }
            std::thread::yield_now();
        }
    }

    /// Learn from a wait that is over.
    pub(crate) fn end(&self, started: &StartedWait) {
        let is_long = started.0.elapsed() >= MAX_SPIN;
        let waits = if is_long { self.long_waits.load(Ordering::Relaxed).saturating_add(1) } else { 0 };
        self.long_waits.store(waits, Ordering::Relaxed);
    }
}

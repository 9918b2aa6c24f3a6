//! Waits awake (spins), as long as that pays.
//!
//! A sleep and its end cost some ten microseconds of latency and a system call of the other side. A shorter wait is
//! better spent awake; a longer one takes a processor from those who work. The length of the last waits tells which the
//! next one is.

use core::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::wait::Wait;

/// A wait that is over sooner is spent awake, where nobody says another time.
const LONGEST: Duration = Duration::from_micros(50);
/// Looks between two times that the processor is offered to others: anyone who is waited for may need this one.
const LOOKS: usize = 32;
/// So many long waits in a row are taken for a habit.
const HABIT: u32 = 2;

/// What the last waits of one side were like.
#[derive(Debug)]
pub(crate) struct Spin {
    longest: Duration,
    long_waits: AtomicU32,
}

impl Default for Spin {
    fn default() -> Self {
        Spin::of(LONGEST)
    }
}

/// A wait that has begun.
pub(crate) struct Begun(Instant);

impl Spin {
    /// A wait that is over within `longest` is spent awake.
    pub(crate) fn of(longest: Duration) -> Self {
        Spin { longest, long_waits: AtomicU32::new(0) }
    }

    pub(crate) fn begin(&self) -> Begun {
        Begun(Instant::now())
    }

    /// Look until `is_over` or it is time to sleep, or to go.
    pub(crate) fn look(&self, begun: &Begun, wait: &Wait<'_>, is_over: impl Fn() -> bool) {
        if self.long_waits.load(Ordering::Relaxed) >= HABIT {
            return;
        }
        while begun.0.elapsed() < self.longest && !wait.is_over() {
            for _ in 0..LOOKS {
                if is_over() {
                    return;
                }
                core::hint::spin_loop();
            }
            std::thread::yield_now();
        }
    }

    /// Learn from a wait that is over.
    pub(crate) fn end(&self, begun: &Begun) {
        let is_long = begun.0.elapsed() >= self.longest;
        let waits = if is_long { self.long_waits.load(Ordering::Relaxed).saturating_add(1) } else { 0 };
        self.long_waits.store(waits, Ordering::Relaxed);
    }
}

//! The deadline and the cancellation of a call.

use std::time::{Duration, Instant};

use crate::error::StoreError;

/// Called regularly while a call waits or works; an error ends the call.
pub type CheckCancelled<'a> = &'a mut dyn FnMut() -> Result<(), StoreError>;

/// The longest time between two checks for cancellation.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// A deadline, and a function that may cancel the call before.
pub struct TimeLimit<'a> {
    deadline: Instant,
    check_cancelled: CheckCancelled<'a>,
    last_check: Instant,
}

impl<'a> TimeLimit<'a> {
    /// A limit that ends at `deadline`, or earlier when `check_cancelled` returns an error.
    pub fn new(deadline: Instant, check_cancelled: CheckCancelled<'a>) -> Self {
        TimeLimit { deadline, check_cancelled, last_check: Instant::now() }
    }

    /// When it ends.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Whether the deadline has passed.
    pub fn is_over(&self) -> bool {
        Instant::now() >= self.deadline
    }

    /// How long to wait before the next [`check_cancelled`](TimeLimit::check_cancelled): at most 50 ms, and never
    /// beyond the deadline.
    pub fn next_wait(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now()).min(CHECK_INTERVAL)
    }

    /// Calls the function that may cancel. Does not check the deadline.
    ///
    /// # Errors
    /// The error of the caller's function, such as [`StoreError::Interrupted`].
    pub fn check_cancelled(&mut self) -> Result<(), StoreError> {
        self.last_check = Instant::now();
        (self.check_cancelled)()
    }

    /// Checks the deadline, and calls [`check_cancelled`](TimeLimit::check_cancelled) if the last call is 50 ms ago.
    /// For loops that may never have to wait.
    ///
    /// # Errors
    /// As [`check_cancelled`](TimeLimit::check_cancelled), and [`StoreError::TimedOut`] without a description.
    pub fn check(&mut self) -> Result<(), StoreError> {
        let now = Instant::now();
        if now >= self.deadline {
            return Err(StoreError::TimedOut { what: String::new() });
        }
        if now.duration_since(self.last_check) < CHECK_INTERVAL { Ok(()) } else { self.check_cancelled() }
    }
}

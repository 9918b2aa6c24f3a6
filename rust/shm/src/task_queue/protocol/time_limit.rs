//! How long a wait lasts, and the check that may end it early.

use std::time::{Duration, Instant};

/// The end of a wait.
pub struct TimeLimit<'a> {
    deadline: Option<Instant>,
    check_every: Option<Duration>,
    check: &'a mut dyn FnMut() -> bool,
}

impl<'a> TimeLimit<'a> {
    /// Wait for `timeout`, or for ever. `check` is called after a signal, and after each `check_every`; the wait ends
    /// when it says `false`.
    pub fn new(timeout: Option<Duration>, check_every: Option<Duration>, check: &'a mut dyn FnMut() -> bool) -> Self {
        // A time beyond the clock's range is no limit.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        Self { deadline, check_every, check }
    }

    /// How long to sleep at most before the next check.
    pub(crate) fn next_sleep(&self) -> Option<Duration> {
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        match (left, self.check_every) {
            (Some(left), Some(every)) => Some(left.min(every)),
            (left, every) => left.or(every),
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    pub(crate) fn may_continue(&mut self) -> bool {
        (self.check)()
    }
}

//! How long a wait lasts, and the check that may end it early.

use std::time::{Duration, Instant};

/// The end of a wait.
pub struct TimeLimit<'a> {
    until: Option<Instant>,
    look_every: Option<Duration>,
    look: &'a mut dyn FnMut() -> bool,
}

impl<'a> TimeLimit<'a> {
    /// Wait for `timeout`, or for ever. `look` is called after a signal, and after each `look_every`; the wait ends
    /// when it says `false`.
    pub fn new(timeout: Option<Duration>, look_every: Option<Duration>, look: &'a mut dyn FnMut() -> bool) -> Self {
        // A time beyond the clock's range is no limit.
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        Self { until, look_every, look }
    }

    /// How long to sleep at most before the next look.
    pub(crate) fn slice(&self) -> Option<Duration> {
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        match (left, self.look_every) {
            (Some(left), Some(every)) => Some(left.min(every)),
            (left, every) => left.or(every),
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() >= until)
    }

    pub(crate) fn goes_on(&mut self) -> bool {
        (self.look)()
    }
}

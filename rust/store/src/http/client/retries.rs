//! Trying again, for less than half a second.

use std::time::{Duration, Instant};

use super::connection::{Trouble, look};
use crate::time_limit::TimeLimit;

/// From the first failure on. A dead owner is told of within a second, of which the system that ends it, and a machine
/// that has much else to do, need the larger part.
const LONGEST: Duration = Duration::from_millis(400);

/// Before the second try; doubled before each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(20);

/// Tries of one request.
pub(super) struct Retries {
    began: Option<Instant>,
    pause: Duration,
}

impl Retries {
    pub(super) fn new() -> Self {
        Retries { began: None, pause: FIRST_PAUSE }
    }

    /// Something came: what fails from here on fails for the first time.
    pub(super) fn made_progress(&mut self) {
        *self = Retries::new();
    }

    /// Waits before the next try; `false` where there is none any more.
    pub(super) fn wait(&mut self, time_limit: &mut TimeLimit<'_>) -> Result<bool, Trouble> {
        let began = *self.began.get_or_insert_with(Instant::now);
        if began.elapsed() + self.pause > LONGEST {
            return Ok(false);
        }
        let end = Instant::now() + self.pause;
        self.pause *= 2;
        while Instant::now() < end {
            look(time_limit)?;
            std::thread::sleep(end.saturating_duration_since(Instant::now()).min(time_limit.turn()));
        }
        Ok(true)
    }
}

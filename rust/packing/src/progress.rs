//! Progress reports of a long computation, and its cancellation.

use crate::error::PackError;

/// Receives the progress of a computation, and may cancel it.
pub trait Progress {
    /// Called on the calling thread, at least every few milliseconds of work: `done` of `total` items of `phase` are
    /// done.
    ///
    /// # Errors
    /// `PackError::Interrupted` cancels the computation.
    fn tick(&mut self, phase: &'static str, done: u64, total: u64) -> Result<(), PackError>;
}

/// Shows nothing and never cancels.
pub struct NoProgress;

impl Progress for NoProgress {
    fn tick(&mut self, _phase: &'static str, _done: u64, _total: u64) -> Result<(), PackError> {
        Ok(())
    }
}

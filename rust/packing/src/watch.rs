//! How a long computation tells its caller how far it is, and asks whether to go on.
//!
//! `tick` is called on the calling thread, at least every few milliseconds of work.

use crate::error::PackError;

/// The caller's side of a long computation.
pub trait Watch {
    /// Called with the items done so far in `phase`, out of `total`.
    ///
    /// # Errors
    /// `PackError::Interrupted` ends the computation.
    fn tick(&mut self, phase: &'static str, done: u64, total: u64) -> Result<(), PackError>;
}

/// Shows nothing and never interrupts.
pub struct Silent;

impl Watch for Silent {
    fn tick(&mut self, _phase: &'static str, _done: u64, _total: u64) -> Result<(), PackError> {
        Ok(())
    }
}

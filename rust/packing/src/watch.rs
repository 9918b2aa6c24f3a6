//! How a long computation tells its caller how far it is, and asks whether to go on.
//!
//! `tick` is called on the calling thread, at least every few milliseconds of work.

use crate::error::PackError;
use crate::fingerprint::LEAF;

/// The caller's side of a long computation.
pub trait Watch {
    /// Called with the items done so far in `phase`, out of `total`.
    ///
    /// # Errors
    /// `PackError::Interrupted` ends the computation.
    fn tick(&mut self, phase: &'static str, done: u64, total: u64) -> Result<(), PackError>;
}

/// How far the packing of an order is, and the watch that is told.
pub(crate) struct Lookout<'r> {
    pub(crate) watch: &'r mut dyn Watch,
    /// Position in the order, and its length.
    reached: (u64, u64),
    /// Samples and packs since the last look.
    entries: usize,
}

impl<'r> Lookout<'r> {
    /// Samples and packs between two looks: a few milliseconds.
    const ENTRIES_A_TICK: usize = 64 * LEAF;

    pub(crate) fn new(watch: &'r mut dyn Watch) -> Self {
        Self { watch, reached: (0, 0), entries: 0 }
    }

    pub(crate) fn reach(&mut self, position: usize, len: usize) {
        self.reached = (position as u64, len as u64);
    }

    /// Look at the watch.
    pub(crate) fn look(&mut self) -> Result<(), PackError> {
        let (position, len) = self.reached;
        self.entries = 0;
        self.watch.tick("packing", position, len)
    }

    /// Look at the watch where it is time for that once so many samples and packs more will be done.
    ///
    /// Packs count as samples do: one sample may make millions of them.
    pub(crate) fn look_after(&mut self, entries: usize) -> Result<(), PackError> {
        self.entries += entries;
        if self.entries < Self::ENTRIES_A_TICK { Ok(()) } else { self.look() }
    }
}

/// Shows nothing and never interrupts.
pub struct Silent;

impl Watch for Silent {
    fn tick(&mut self, _phase: &'static str, _done: u64, _total: u64) -> Result<(), PackError> {
        Ok(())
    }
}

//! Iterates over the ordered samples of a stream, each with its length.
//!
//! Invariants: memory is constant. A sample that does not exist and a negative length, which only inputs that change
//! during the call can have, are errors.

use super::integers::Integers;
use super::sample_lengths::SampleLengths;
use crate::error::PackError;
use crate::progress::Progress;

/// Samples, pieces or packs that are read between two ticks: microseconds in memory, and below 100 ms where each of them waits for a page
/// from a disk.
pub(crate) const WINDOW: usize = 1024;

/// The samples of a stream in their order, each with its length, read a window at a time.
pub(crate) struct OrderedSamples<'a> {
    /// The name of the work in progress reports.
    phase: &'static str,
    stream: &'a SampleLengths<'a>,
    /// None for the samples' own order.
    order: Option<Integers<'a>>,
    len: usize,
    /// Position behind the window.
    read: usize,
    samples: Vec<u64>,
    lengths: Vec<u64>,
    /// Where in the window the next sample is.
    next: usize,
}

impl<'a> OrderedSamples<'a> {
    pub(crate) fn new(phase: &'static str, stream: &'a SampleLengths<'a>, order: Option<Integers<'a>>) -> Self {
        let len = order.map_or(stream.len(), |order| order.len());
        Self { phase, stream, order, len, read: 0, samples: Vec::new(), lengths: Vec::new(), next: 0 }
    }

    /// The next sample and its length.
    pub(crate) fn next(&mut self, progress: &mut dyn Progress) -> Result<Option<(u64, u64)>, PackError> {
        if self.next == self.samples.len() {
            self.fill(progress)?;
        }
        let found = self.samples.get(self.next).copied().zip(self.lengths.get(self.next).copied());
        self.next += usize::from(found.is_some());
        Ok(found)
    }

    fn fill(&mut self, progress: &mut dyn Progress) -> Result<(), PackError> {
        progress.tick(self.phase, self.read as u64, self.len as u64)?;
        let count = (self.len - self.read).min(WINDOW);
        self.samples.resize(count, 0);
        self.lengths.resize(count, 0);
        let seen = match self.order {
            None => {
                self.samples.iter_mut().zip(self.read as u64..).for_each(|(slot, sample)| *slot = sample);
                self.stream.read(self.read, &mut self.lengths)
            }
            Some(order) => {
                order.read(self.read, &mut self.samples);
                if self.samples.iter().any(|&sample| sample >= self.stream.len() as u64) {
                    return Err(PackError::InputChanged);
                }
                self.stream.gather(&self.samples, &mut self.lengths)
            }
        };
        if seen >> 63 != 0 {
            return Err(PackError::InputChanged);
        }
        self.read += count;
        self.next = 0;
        Ok(())
    }
}

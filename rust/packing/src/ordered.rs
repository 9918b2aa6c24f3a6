//! The ordered samples of a stream, each with its length, for who goes through them one by one.
//!
//! What always holds: memory is constant, beyond an order that is drawn; a sample that does not exist and a
//! length below zero, which only inputs that change meanwhile can have, are errors.

use crate::error::PackError;
use crate::hard::Dataset;
use crate::integers::Integers;
use crate::plan::Column;
use crate::shuffle::RandomState;
use crate::watch::Watch;

/// Samples and pieces between two looks at the watch: microseconds in memory, and still below 100 ms where each of
/// them waits for a page from a disk.
pub(crate) const STEP: usize = 1024;

/// The order that a seed gives: one index a sample.
pub(crate) fn draw(random: &mut RandomState, samples: usize, watch: &mut dyn Watch) -> Result<Column, PackError> {
    Ok(if samples <= 1 << 31 {
        Column::I32(random.shuffled(samples, watch)?)
    } else {
        Column::I64(random.shuffled(samples, watch)?)
    })
}

/// The samples of a stream in their order, each with its length, read a window at a time.
pub(crate) struct Ordered<'a> {
    /// Said to the watch.
    phase: &'static str,
    stream: &'a Dataset<'a>,
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

impl<'a> Ordered<'a> {
    pub(crate) fn new(phase: &'static str, stream: &'a Dataset<'a>, order: Option<Integers<'a>>) -> Self {
        let len = order.map_or(stream.len(), |order| order.len());
        Self { phase, stream, order, len, read: 0, samples: Vec::new(), lengths: Vec::new(), next: 0 }
    }

    /// The next sample and its length.
    pub(crate) fn next(&mut self, watch: &mut dyn Watch) -> Result<Option<(u64, u64)>, PackError> {
        if self.next == self.samples.len() {
            self.fill(watch)?;
        }
        let found = self.samples.get(self.next).copied().zip(self.lengths.get(self.next).copied());
        self.next += usize::from(found.is_some());
        Ok(found)
    }

    fn fill(&mut self, watch: &mut dyn Watch) -> Result<(), PackError> {
        watch.tick(self.phase, self.read as u64, self.len as u64)?;
        let count = (self.len - self.read).min(STEP);
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

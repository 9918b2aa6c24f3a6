//! Reads the ordered samples of a stream, a chunk at a time: indices first, then the length of each.
//!
//! Invariants: each index and each length is read from the caller's arrays once. What is checked is what is used.

use super::repeated_samples::SeenSamples;
use crate::fingerprint::{self, LEAF};
use crate::inputs::{Integers, SampleLengths};
use crate::plan::PlanInteger;
use crate::simd::vectorized;

/// Samples of a chunk: they fit the second-level cache, and hash as one leaf.
pub(super) const CHUNK: usize = LEAF;

/// Where the indices of a stream's samples come from.
#[derive(Clone, Copy)]
pub(super) enum IndexSource<'r, P> {
    /// 0 … n - 1.
    Natural(usize),
    /// As the caller gave them, yet to be checked.
    Given(Integers<'r>),
    /// As drawn from a seed.
    Drawn(&'r [P]),
}

impl<P> IndexSource<'_, P> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Natural(len) => *len,
            Self::Given(order) => order.len(),
            Self::Drawn(order) => order.len(),
        }
    }
}

/// Why a chunk of samples cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadFailure {
    /// An index is out of range, or was seen before.
    BadOrder,
    /// A length is longer than the first pass found.
    InputChanged,
}

/// Consecutive ordered samples.
pub(super) struct Samples<P> {
    pub(super) indices: Vec<P>,
    pub(super) lengths: Vec<P>,
    /// Tokens of all samples.
    pub(super) tokens: u64,
    /// Hash of the indices of an order that was given.
    pub(super) order_leaf: u128,
}

impl<P> Default for Samples<P> {
    fn default() -> Self {
        Self { indices: Vec::new(), lengths: Vec::new(), tokens: 0, order_leaf: 0 }
    }
}

/// The ordered samples of one stream.
pub(super) struct SampleReader<'r, P> {
    pub(super) lengths: &'r SampleLengths<'r>,
    pub(super) indices: IndexSource<'r, P>,
    /// Marks the samples of an order that was given.
    pub(super) used: Option<SeenSamples>,
}

impl<P: PlanInteger> SampleReader<'_, P> {
    /// Read `count` samples from position `start` of the order on.
    pub(super) fn read(
        &self,
        thread: usize,
        start: usize,
        count: usize,
        samples: &mut Samples<P>,
    ) -> Result<(), ReadFailure> {
        samples.indices.resize(count, P::default());
        samples.lengths.resize(count, P::default());
        let (indices, lengths) = (&mut samples.indices[..], &mut samples.lengths[..]);
        let seen = match self.indices {
            IndexSource::Natural(_) => {
                indices.iter_mut().zip(start as u64..).for_each(|(slot, index)| *slot = P::truncate(index));
                self.lengths.read(start, lengths)
            }
            IndexSource::Drawn(order) => {
                indices.copy_from_slice(&order[start..start + count]);
                self.lengths.gather(indices, lengths)
            }
            IndexSource::Given(order) => {
                // The or of all values tells whether one is negative or lost bits as it became a P.
                let seen = order.read(start, indices);
                let largest = vectorized(|| indices.iter().copied().max());
                if seen > P::LARGEST || largest.is_some_and(|index| index.widen() >= self.lengths.len() as u64) {
                    return Err(ReadFailure::BadOrder);
                }
                samples.order_leaf = fingerprint::leaf(indices);
                self.gather_and_mark(thread, indices, lengths)?
            }
        };
        if seen > P::LARGEST {
            return Err(ReadFailure::InputChanged);
        }
        samples.tokens = P::sum(lengths);
        Ok(())
    }

    fn gather_and_mark(&self, thread: usize, indices: &[P], lengths: &mut [P]) -> Result<u64, ReadFailure> {
        let Some(used) = &self.used else { return Ok(self.lengths.gather(indices, lengths)) };
        let bitmap = used.bitmap(thread);
        let mut repeated = 0;
        let prefetch = |sample| bitmap.prefetch(sample);
        let seen = self.lengths.gather_with(indices, lengths, prefetch, |sample| repeated |= bitmap.mark(sample));
        if repeated == 0 { Ok(seen) } else { Err(ReadFailure::BadOrder) }
    }
}

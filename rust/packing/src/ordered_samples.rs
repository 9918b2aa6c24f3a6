//! The samples of a plan: their lengths, their order, and the samples in this order.
//!
//! Invariants: memory is constant, but for one bit a sample while an order is checked. A sample that does not exist and a
//! negative length, which only inputs that change during the call can have, are errors.

use crate::error::PackError;
use crate::integers::{ColumnWord, Integers};
use crate::memory;
use crate::progress::Progress;

/// The lengths of one dataset, or of several joined end to end.
pub(crate) struct SampleLengths<'a> {
    parts: Vec<Integers<'a>>,
    /// Index of each part's first sample.
    starts: Vec<usize>,
    len: usize,
    dataset_id: usize,
}

impl<'a> SampleLengths<'a> {
    /// The lengths of each stream: of each dataset, or with `global_pack` of all datasets joined.
    pub(crate) fn streams(datasets: &[Integers<'a>], global_pack: bool) -> Vec<Self> {
        if global_pack {
            return vec![Self::new(datasets.to_vec(), 0)];
        }
        datasets.iter().enumerate().map(|(id, &lengths)| Self::new(vec![lengths], id)).collect()
    }

    /// Join `parts` end to end, as dataset `dataset_id` of the plan.
    pub(crate) fn new(parts: Vec<Integers<'a>>, dataset_id: usize) -> Self {
        let mut starts = Vec::with_capacity(parts.len());
        let mut len = 0usize;
        for part in &parts {
            starts.push(len);
            len += part.len();
        }
        Self { parts, starts, len, dataset_id }
    }

    /// How many samples.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn dataset_id(&self) -> usize {
        self.dataset_id
    }

    /// The lengths of each dataset that was joined.
    pub(crate) fn parts(&self) -> &[Integers<'a>] {
        &self.parts
    }

    /// The length of one sample, which exists.
    pub(crate) fn get(&self, sample: usize) -> u64 {
        let part = self.part_of(sample);
        self.parts[part].get(sample - self.starts[part])
    }

    /// As `Integers::read`, across parts.
    pub(crate) fn read<W: ColumnWord>(&self, start: usize, out: &mut [W]) -> u64 {
        let mut seen = 0u64;
        let mut done = 0usize;
        let mut part = self.part_of(start);
        while done < out.len() {
            let within = start + done - self.starts[part];
            let take = (self.parts[part].len() - within).min(out.len() - done);
            seen |= self.parts[part].read(within, &mut out[done..done + take]);
            done += take;
            part += 1;
        }
        seen
    }

    /// The dataset of a sample of the stream, and its number there.
    pub(crate) fn locate(&self, sample: usize) -> (usize, usize) {
        let part = self.part_of(sample);
        (self.dataset_id + part, sample - self.starts[part])
    }

    fn part_of(&self, index: usize) -> usize {
        self.starts.partition_point(|&start| start <= index).saturating_sub(1)
    }

    /// As `Integers::gather`, across parts.
    pub(crate) fn gather<W: ColumnWord>(&self, indices: &[W], out: &mut [W]) -> u64 {
        self.gather_with(indices, out, |_| (), |_| ())
    }

    /// As `Integers::gather_with`, across parts.
    pub(crate) fn gather_with<W: ColumnWord>(
        &self,
        indices: &[W],
        out: &mut [W],
        prefetch: impl FnMut(u64),
        mut visit: impl FnMut(u64),
    ) -> u64 {
        if let [only] = &self.parts[..] {
            return only.gather_with(indices, out, prefetch, visit);
        }
        let mut seen = 0u64;
        for (&index, slot) in indices.iter().zip(out) {
            visit(index.widen());
            let index = index.widen() as usize;
            let part = self.part_of(index);
            let value = self.parts[part].get(index - self.starts[part]);
            seen |= value;
            *slot = W::truncate(value);
        }
        seen
    }
}

/// Where the order of the samples comes from.
#[derive(Clone, Copy, Debug)]
pub enum SampleOrder<'a> {
    /// The samples keep their order.
    Natural,
    /// Indices of the samples of one dataset, each at most once.
    Given(Integers<'a>),
    /// The order of numpy's `RandomState(seed).shuffle`, dataset after dataset in one random stream.
    Seed(u32),
}

/// Check that every entry of an order names one of `samples` samples, and no two entries the same.
///
/// # Errors
/// `OrderOutOfRange` or `OrderRepeated` with the first wrong entry; an interrupt.
pub(crate) fn check_order(order: &Integers<'_>, samples: usize, progress: &mut dyn Progress) -> Result<(), PackError> {
    let mut used = memory::zeroed::<u64>(samples.div_ceil(64))?;
    let mut entries = vec![0u64; order.len().min(WINDOW)];
    for start in (0..order.len()).step_by(WINDOW) {
        progress.tick("checking the order", start as u64, order.len() as u64)?;
        let entries = &mut entries[..(order.len() - start).min(WINDOW)];
        order.read(start, entries);
        for (position, &sample) in (start..).zip(&*entries) {
            if sample >= samples as u64 {
                return Err(PackError::OrderOutOfRange { position, value: order.as_given(sample), samples });
            }
            let (word, bit) = (&mut used[(sample / 64) as usize], 1u64 << (sample % 64));
            if *word & bit != 0 {
                return Err(PackError::OrderRepeated { position, sample: sample as usize });
            }
            *word |= bit;
        }
    }
    Ok(())
}

/// Samples, pieces or packs that are read between two ticks: microseconds in memory, and below 100 ms where each of them
/// waits for a page from a disk.
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

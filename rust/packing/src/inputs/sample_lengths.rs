//! The lengths of the samples that are packed as one stream of tokens.

use super::integers::{ColumnWord, Integers};

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

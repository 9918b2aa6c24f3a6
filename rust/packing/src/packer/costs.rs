//! What samples cost beside their tokens, checked and hashed.

use super::scan;
use crate::error::PackError;
use crate::fingerprint::ParameterHash;
use crate::inputs::SampleLengths;
use crate::plan::PlanInteger;
use crate::progress::Progress;
use crate::request::{PackRequest, SampleCosts};
use crate::threads::Threads;

/// The costs of a request.
pub(crate) struct CheckedCosts<'a> {
    /// Laid out as the lengths are.
    streams: Vec<SampleLengths<'a>>,
    max_cost: u64,
    /// Hash of each dataset's costs.
    digests: Vec<u128>,
}

/// The costs of the samples of one stream.
#[derive(Clone, Copy)]
pub(crate) struct StreamCosts<'r> {
    samples: &'r SampleLengths<'r>,
    /// What the samples of a pack cost together at most.
    pub(crate) max_cost: u64,
}

impl<'a> CheckedCosts<'a> {
    /// Check and hash the costs of a request, if it has any.
    ///
    /// # Errors
    /// `BadCost`; an interrupt.
    pub(super) fn new(
        request: &PackRequest<'a>,
        threads: &Threads,
        progress: &mut dyn Progress,
    ) -> Result<Option<Self>, PackError> {
        let Some(SampleCosts { columns, max_cost }) = &request.costs else { return Ok(None) };
        let digests = columns
            .iter()
            .enumerate()
            .map(|(dataset, column)| scan::hash_costs(column, dataset, threads, progress))
            .collect::<Result<_, _>>()?;
        let streams = SampleLengths::streams(columns, request.global_pack);
        Ok(Some(Self { streams, max_cost: *max_cost, digests }))
    }

    /// Add all that determines the plan.
    pub(super) fn push_to(&self, hash: &mut ParameterHash) {
        hash.push("max_cost", &self.max_cost.to_le_bytes());
        for digest in &self.digests {
            hash.push("costs", &digest.to_le_bytes());
        }
    }

    pub(crate) fn max_cost(&self) -> u64 {
        self.max_cost
    }

    /// The costs of stream `stream`, which exists.
    pub(crate) fn of_stream(&self, stream: usize) -> StreamCosts<'_> {
        StreamCosts { samples: &self.streams[stream], max_cost: self.max_cost }
    }
}

impl StreamCosts<'_> {
    /// The cost of one sample, which exists.
    pub(crate) fn of<P: PlanInteger>(self, sample: P) -> u64 {
        self.samples.get(sample.widen() as usize)
    }
}

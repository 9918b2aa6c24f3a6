//! Refuses samples that no pack can take, before any work: how many there are, and which is the worst.

use super::Packer;
use crate::error::PackError;
use crate::inputs::{OrderedSamples, SampleLengths, SampleOrder, check_order};
use crate::progress::Progress;
use crate::request::{Overlong, WholeOptions};

/// The samples at fault.
struct Refused {
    count: u64,
    dataset: usize,
    /// The worst one, or the first of several.
    sample: usize,
    value: u64,
}

impl Packer<'_> {
    /// Refuse samples of the order that are longer than a pack.
    pub(super) fn refuse_overlong(&self, progress: &mut dyn Progress) -> Result<(), PackError> {
        let max_length = self.request.max_length;
        let is_refused = |options: WholeOptions| options.overlong == Overlong::Error;
        let may_be = |stream: usize| {
            self.whole_options(stream).is_some_and(is_refused) && self.scans[stream].longest > max_length
        };
        match self.find(may_be, |_, _, length| Some(length).filter(|&length| length > max_length), progress)? {
            Some(Refused { count, dataset, sample, value: length }) => {
                Err(PackError::Overlong { count, dataset, sample, length, max_length })
            }
            None => Ok(()),
        }
    }

    /// Refuse samples of the order that cost more than a pack may.
    pub(super) fn refuse_too_costly(&self, progress: &mut dyn Progress) -> Result<(), PackError> {
        let Some(costs) = &self.costs else { return Ok(()) };
        let (max_cost, max_length) = (costs.max_cost(), self.request.max_length);
        let cost_of = |stream: usize, sample: u64, length: u64| {
            let drops = self.whole_options(stream).is_some_and(|options| options.overlong == Overlong::Drop);
            let is_left_out = length == 0 || (length > max_length && drops);
            let cost = costs.of_stream(stream).of(sample as i64);
            Some(cost).filter(|&cost| cost > max_cost && !is_left_out)
        };
        match self.find(|stream| self.whole_options(stream).is_some(), cost_of, progress)? {
            Some(Refused { count, dataset, sample, value: cost }) => {
                Err(PackError::TooCostly { count, dataset, sample, cost, max_cost })
            }
            None => Ok(()),
        }
    }

    /// Go through the samples of the order, of the streams that `may_be` at fault. `fault` takes the stream, the sample and
    /// its length.
    fn find(
        &self,
        may_be: impl Fn(usize) -> bool,
        fault: impl Fn(usize, u64, u64) -> Option<u64>,
        progress: &mut dyn Progress,
    ) -> Result<Option<Refused>, PackError> {
        let mut count = 0u64;
        let mut worst: Option<(u64, &SampleLengths<'_>, u64)> = None;
        for (number, stream) in self.streams.iter().enumerate() {
            if !may_be(number) {
                continue;
            }
            let order = match self.request.order {
                SampleOrder::Given(order) => {
                    check_order(&order, stream.len(), progress)?;
                    Some(order)
                }
                _ => None,
            };
            let mut samples = OrderedSamples::new("checking lengths", stream, order);
            while let Some((sample, length)) = samples.next(progress)? {
                let Some(value) = fault(number, sample, length) else { continue };
                count += 1;
                if worst.is_none_or(|(most, ..)| value > most) {
                    worst = Some((value, stream, sample));
                }
            }
        }
        Ok(worst.map(|(value, stream, sample)| {
            let (dataset, sample) = stream.locate(sample as usize);
            Refused { count, dataset, sample, value }
        }))
    }
}

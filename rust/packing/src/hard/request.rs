//! The arguments of a plan.

use crate::error::PackError;
use crate::inputs::{Integers, SampleOrder};

/// What to pack, and how.
#[derive(Clone)]
pub struct PackRequest<'a> {
    /// The lengths of each dataset, in tokens.
    pub lengths: Vec<Integers<'a>>,
    /// The order of the samples.
    pub order: SampleOrder<'a>,
    /// Tokens a pack.
    pub max_length: u64,
    /// Leave out the tail that is shorter than a pack, instead of making it a shorter last pack.
    pub drop_last: bool,
    /// Pack all datasets as one: sample indices count through, and packs span datasets.
    pub global_pack: bool,
    /// Threads to compute on at most.
    pub threads: usize,
}

impl PackRequest<'_> {
    /// Refuse arguments that contradict each other, before any length is read.
    pub(super) fn check(&self) -> Result<(), PackError> {
        if self.max_length == 0 || self.max_length > i64::MAX as u64 {
            return Err(PackError::Invalid(format!(
                "max_length is {}; it must be at least 1 token and below 2^63",
                self.max_length
            )));
        }
        if let SampleOrder::Given(order) = self.order {
            let [lengths] = self.lengths[..] else {
                return Err(PackError::Invalid("order can be given for a single dataset only".into()));
            };
            if order.len() > lengths.len() {
                return Err(PackError::Invalid(format!(
                    "order has {} entries for {} samples; each sample may be used at most once",
                    order.len(),
                    lengths.len()
                )));
            }
        }
        Ok(())
    }
}

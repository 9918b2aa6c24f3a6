//! What is asked for: which lengths are packed, in which order, and how.
//!
//! Owns the refusal of what contradicts itself before any length is read.

use super::{Prepared, scan};
use crate::error::PackError;
use crate::fingerprint::Fingerprint;
use crate::integers::Integers;
use crate::watch::Watch;

/// Where the order of the samples comes from.
#[derive(Clone, Copy)]
pub enum OrderSource<'a> {
    /// The samples keep their order.
    Natural,
    /// This order, of one dataset: indices, each at most once.
    Given(Integers<'a>),
    /// The order numpy's `RandomState(seed).shuffle` gives, dataset after dataset in one stream.
    Seed(u32),
}

/// What to pack, and how.
pub struct Request<'a> {
    /// The lengths of each dataset, in tokens.
    pub lengths: Vec<Integers<'a>>,
    /// The order of the samples.
    pub order: OrderSource<'a>,
    /// Tokens a pack.
    pub max_length: u64,
    /// Leave out the tail that is shorter than a pack, instead of making it a shorter last pack.
    pub drop_last: bool,
    /// Pack all datasets as one: sample indices count through, and packs span datasets.
    pub global_pack: bool,
    /// Threads to compute on at most, the calling one among them.
    pub threads: usize,
}

impl Request<'_> {
    /// The identity of the plan that is asked for.
    ///
    /// # Errors
    /// As `Prepared::new`. The order is only hashed here; whether it is one, packing will tell.
    pub fn fingerprint(self, watch: &mut dyn Watch) -> Result<Fingerprint, PackError> {
        let prepared = Prepared::scanned(self, false, watch)?;
        let order_digest = match prepared.request.order {
            OrderSource::Given(order) => scan::hash_column(&order, &prepared.crew, watch)?,
            _ => 0,
        };
        Ok(prepared.identity(order_digest))
    }

    pub(super) fn check(&self) -> Result<(), PackError> {
        if self.max_length == 0 || self.max_length > i64::MAX as u64 {
            return Err(PackError::Invalid(format!(
                "max_length is {}; it must be at least 1 token and below 2^63",
                self.max_length
            )));
        }
        if let OrderSource::Given(order) = self.order {
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

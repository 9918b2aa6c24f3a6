//! `FetchReceiver`: receives the shards of one request into the fetch buffer.
//!
//! Invariants: every shard of a request either arrives or fails, also when a thread unwinds. A shard that has arrived
//! is not written to again.

use std::sync::Arc;

use super::Wanted;
use crate::entries::fetch_buffer::FetchBuffer;
use crate::entries::fetch_buffer::{InFlight, Outcome};
use crate::error::{MissingShard, StoreError};
use crate::memory::attached_segments::AttachedSegments;
use crate::memory::attached_segments::SegmentRange;
use crate::memory::slab::{Allocation, allocate};
use crate::memory::slab_pool::SlabPool;
use crate::memory::tensor::{Location, Tensor};
use crate::selection::ShardRows;
use crate::tensor_meta::TensorMeta;
use crate::tensor_store::TensorStore;
use crate::time_limit::TimeLimit;

/// Receives the shards of one request to one owner into the fetch buffer.
pub struct FetchReceiver<'a> {
    buffer: &'a FetchBuffer<Tensor>,
    pool: &'a Arc<SlabPool>,
    attached_segments: &'a AttachedSegments,
    pub(super) shards: Vec<RequestedShard<'a>>,
}

/// One shard of such a request.
pub(super) struct RequestedShard<'a> {
    wanted: &'a Wanted,
    in_flight: Arc<InFlight<Tensor>>,
    space: Option<Allocation>,
    is_over: bool,
}

impl<'a> RequestedShard<'a> {
    pub(super) fn new(wanted: &'a Wanted, in_flight: Arc<InFlight<Tensor>>) -> Self {
        RequestedShard { wanted, in_flight, space: None, is_over: false }
    }
}

impl<'a> FetchReceiver<'a> {
    pub(super) fn new(store: &'a TensorStore) -> Self {
        let TensorStore { buffer, buffer_pool: pool, attached_segments, .. } = store;
        FetchReceiver { buffer, pool, attached_segments, shards: Vec::new() }
    }

    /// The owner that the request goes to, and the shards in the order of their indices.
    pub(super) fn request(&self) -> (&'a Arc<str>, Vec<ShardRows>) {
        (&self.shards[0].wanted.owner, self.shards.iter().map(|shard| shard.wanted.shard_rows()).collect())
    }

    /// Ends the request with its outcome. Shards that have not arrived fail.
    ///
    /// # Errors
    /// The error of the request, or [`StoreError::Corrupt`] if the answer lacks a shard.
    pub(super) fn finish(&mut self, sent: Result<(), StoreError>) -> Result<(), StoreError> {
        let done = sent.and_then(|()| {
            if self.shards.iter().all(|shard| shard.is_over) {
                return Ok(());
            }
            let Wanted { id, owner, .. } = self.shards[0].wanted;
            let reason = "the answer ended before all that was asked for had come".to_owned();
            Err(StoreError::Corrupt { id: id.clone(), owner: Arc::clone(owner), reason })
        });
        if let Err(error) = &done {
            self.fail(error);
        }
        done
    }

    /// Fails all shards that have not arrived.
    fn fail(&mut self, error: &StoreError) {
        for shard in &mut self.shards {
            if !std::mem::replace(&mut shard.is_over, true) {
                self.buffer.fail(&shard.in_flight, outcome_for(error, shard.wanted));
            }
        }
    }

    fn check_expected(&mut self, index: usize, meta: &TensorMeta) -> Result<(), StoreError> {
        let shard =
            self.shards.get(index).ok_or_else(|| StoreError::Invalid(format!("nothing was wanted at {index}")))?;
        if shard.is_over {
            return Err(StoreError::Invalid(format!("shard {} has come already", shard.wanted.id)));
        }
        check(shard.wanted, meta)
    }

    /// Spaces for all that is still to come: all or none, so that two batches do not wait for each other's halves.
    fn make_spaces(&mut self, time_limit: &mut TimeLimit<'_>) -> Result<(), StoreError> {
        let missing =
            |shard: &&mut RequestedShard<'_>| !shard.is_over && shard.space.is_none() && shard.wanted.meta.nbytes() > 0;
        let mut shards: Vec<_> = self.shards.iter_mut().filter(missing).collect();
        let sizes: Vec<_> = shards.iter().map(|shard| shard.wanted.meta.nbytes()).collect();
        let made = allocate(self.pool, &sizes, Some(time_limit), &mut |segment, _, space, _| {
            segment.populate(space as usize);
            Ok(())
        })?;
        for (shard, space) in shards.iter_mut().zip(made) {
            shard.space = Some(space);
        }
        Ok(())
    }

    fn insert(&mut self, index: usize, location: Location) -> Result<(), StoreError> {
        let shard = &mut self.shards[index];
        shard.is_over = true;
        let tensor = Tensor::fetched(shard.wanted.meta.clone(), location);
        let charge = tensor.charge();
        self.buffer.insert(&shard.in_flight, tensor, charge)
    }

    /// The space for the bytes of the entry at `index`, which are a `meta` by the owner's declaration.
    ///
    /// # Errors
    /// [`StoreError::Mismatch`] if the handle declares something else, [`StoreError::Full`] at the limit when
    /// `time_limit` ends.
    pub fn space(
        &mut self,
        index: usize,
        meta: &TensorMeta,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<&mut [u8], StoreError> {
        self.check_expected(index, meta)?;
        if meta.nbytes() == 0 {
            return Ok(&mut []);
        }
        if self.shards[index].space.is_none() {
            self.make_spaces(time_limit)?;
        }
        Ok(self.shards[index].space.as_mut().expect("just made").bytes())
    }

    /// The space at `index` is filled, and its checksum is right.
    ///
    /// # Errors
    /// [`StoreError::StepEnded`] and [`StoreError::Drained`] if it was drained meanwhile.
    pub fn complete(&mut self, index: usize) -> Result<(), StoreError> {
        let shard = self.shards.get_mut(index).filter(|shard| !shard.is_over);
        let shard = shard.ok_or_else(|| StoreError::Invalid(format!("nothing is to come at {index}")))?;
        let location = match shard.space.take() {
            Some(space) => Location::Here(space.into_range()),
            None if shard.wanted.meta.nbytes() == 0 => Location::Nowhere,
            None => return Err(StoreError::Invalid(format!("no space was asked for at {index}"))),
        };
        self.insert(index, location)
    }

    /// The bytes of the entry at `index` are in memory of this node. The reference is not trusted.
    ///
    /// # Errors
    /// The errors of `space` and `complete`, and [`StoreError::Memory`] if that memory cannot be reached: the transport
    /// then asks for the bytes.
    pub fn attach(&mut self, index: usize, meta: &TensorMeta, reference: &SegmentRange) -> Result<(), StoreError> {
        self.check_expected(index, meta)?;
        let location = attached_location(self.attached_segments, self.shards[index].wanted, reference)?;
        self.insert(index, location)
    }
}

impl Drop for FetchReceiver<'_> {
    fn drop(&mut self) {
        self.fail(&StoreError::Interrupted);
    }
}

/// Where a reference leads to.
fn attached_location(
    attached_segments: &AttachedSegments,
    wanted: &Wanted,
    reference: &SegmentRange,
) -> Result<Location, StoreError> {
    let nbytes = wanted.meta.nbytes();
    if reference.len != nbytes {
        let reason = format!("the reference to it has {} bytes instead of {nbytes}", reference.len);
        return Err(StoreError::Corrupt { id: wanted.id.clone(), owner: Arc::clone(&wanted.owner), reason });
    }
    if nbytes == 0 {
        return Ok(Location::Nowhere);
    }
    Ok(Location::Attached(attached_segments.reach(reference)?))
}

fn check(wanted: &Wanted, meta: &TensorMeta) -> Result<(), StoreError> {
    if *meta == wanted.meta {
        return Ok(());
    }
    Err(StoreError::Mismatch {
        id: wanted.id.clone(),
        owner: Arc::clone(&wanted.owner),
        declared: format!("{:?}", wanted.meta),
        found: format!("{meta:?}"),
    })
}

/// The outcome for other threads that wait for a shard of a failed batch. They may have better handles, or wait for
/// another shard: they share only failures of the shard itself or of its owner.
fn outcome_for(error: &StoreError, wanted: &Wanted) -> Outcome<Tensor> {
    match error {
        StoreError::Missing { owner, shards } => {
            let its: Vec<MissingShard> = shards.iter().filter(|shard| shard.id == wanted.id).cloned().collect();
            if its.is_empty() {
                return Outcome::Again;
            }
            Outcome::Failed(StoreError::Missing { owner: owner.clone(), shards: its })
        }
        StoreError::Corrupt { id, .. } if *id == wanted.id => Outcome::Failed(error.clone()),
        StoreError::Unreachable { .. }
        | StoreError::Unanswered { .. }
        | StoreError::Refused { status: 401 | 403, .. } => Outcome::Failed(error.clone()),
        _ => Outcome::Again,
    }
}

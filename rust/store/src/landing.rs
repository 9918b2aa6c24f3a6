//! Where a batch of one owner lands: in the buffer, or in memory of the caller's.
//!
//! What always holds: of what was to be fetched each piece lands or fails, also where a thread unwinds; what has landed
//! is not written to again.

use std::sync::Arc;

use crate::attached::Attachments;
use crate::buffer::Buffer;
use crate::error::{MissingShard, StoreError};
use crate::flight::{Flight, Outcome};
use crate::meta::Meta;
use crate::patience::Patience;
use crate::pool::Pool;
use crate::slab::{Room, rooms};
use crate::tensor::{Location, Tensor};
use crate::transport::{Receiver, Reference, Wanted};

/// What this process fetches from one owner in one request, for the buffer.
pub(crate) struct Batch<'a> {
    pub(crate) buffer: &'a Buffer<Tensor>,
    pub(crate) pool: &'a Arc<Pool>,
    pub(crate) attachments: &'a Attachments,
    pub(crate) legs: Vec<Leg<'a>>,
}

/// One of them.
pub(crate) struct Leg<'a> {
    wanted: &'a Wanted,
    flight: Arc<Flight<Tensor>>,
    room: Option<Room>,
    is_over: bool,
}

impl<'a> Leg<'a> {
    pub(crate) fn new(wanted: &'a Wanted, flight: Arc<Flight<Tensor>>) -> Self {
        Leg { wanted, flight, room: None, is_over: false }
    }

    pub(crate) fn wanted(&self) -> &'a Wanted {
        self.wanted
    }
}

impl Batch<'_> {
    /// Whatever has not landed fails, as `error` says.
    pub(crate) fn fail(&mut self, error: &StoreError) {
        let is_alone = self.legs.len() == 1;
        for leg in &mut self.legs {
            if !std::mem::replace(&mut leg.is_over, true) {
                self.buffer.fail(&leg.flight, outcome_for(error, leg.wanted, is_alone));
            }
        }
    }

    /// Whether all have landed.
    pub(crate) fn is_over(&self) -> bool {
        self.legs.iter().all(|leg| leg.is_over)
    }

    fn leg(&mut self, index: usize, meta: &Meta) -> Result<(), StoreError> {
        let leg = self.legs.get(index).ok_or_else(|| StoreError::Invalid(format!("nothing was wanted at {index}")))?;
        if leg.is_over {
            return Err(StoreError::Invalid(format!("shard {} has come already", leg.wanted.id)));
        }
        check(leg.wanted, meta)
    }

    /// Rooms for all that is still to come: all or none, so that two batches do not wait for each other's halves.
    fn make_rooms(&mut self, patience: &mut Patience<'_>) -> Result<(), StoreError> {
        let missing = |leg: &&mut Leg<'_>| !leg.is_over && leg.room.is_none() && leg.wanted.meta.nbytes() > 0;
        let mut legs: Vec<_> = self.legs.iter_mut().filter(missing).collect();
        let sizes: Vec<_> = legs.iter().map(|leg| leg.wanted.meta.nbytes()).collect();
        let made = rooms(self.pool, &sizes, Some(patience), &mut |segment, _, room, _| {
            segment.populate(room as usize);
            Ok(())
        })?;
        for (leg, room) in legs.iter_mut().zip(made) {
            leg.room = Some(room);
        }
        Ok(())
    }

    fn land(&mut self, index: usize, location: Location) -> Result<(), StoreError> {
        let leg = &mut self.legs[index];
        leg.is_over = true;
        let tensor = Tensor::fetched(leg.wanted.meta.clone(), location);
        let charge = tensor.charge();
        self.buffer.land(&leg.flight, tensor, charge)
    }
}

impl Receiver for Batch<'_> {
    fn room(&mut self, index: usize, meta: &Meta, patience: &mut Patience<'_>) -> Result<&mut [u8], StoreError> {
        self.leg(index, meta)?;
        if meta.nbytes() == 0 {
            return Ok(&mut []);
        }
        if self.legs[index].room.is_none() {
            self.make_rooms(patience)?;
        }
        Ok(self.legs[index].room.as_mut().expect("just made").bytes())
    }

    fn complete(&mut self, index: usize) -> Result<(), StoreError> {
        let leg = self.legs.get_mut(index).filter(|leg| !leg.is_over);
        let leg = leg.ok_or_else(|| StoreError::Invalid(format!("nothing is to come at {index}")))?;
        let location = match leg.room.take() {
            Some(room) => Location::Here(room.into_place()),
            None if leg.wanted.meta.nbytes() == 0 => Location::Nowhere,
            None => return Err(StoreError::Invalid(format!("nothing was announced at {index}"))),
        };
        self.land(index, location)
    }

    fn attach(
        &mut self,
        index: usize,
        meta: &Meta,
        reference: &Reference,
        _patience: &mut Patience<'_>,
    ) -> Result<(), StoreError> {
        self.leg(index, meta)?;
        let location = lent(self.attachments, self.legs[index].wanted, reference)?;
        self.land(index, location)
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        self.fail(&StoreError::Interrupted);
    }
}

/// Where a reference leads to.
fn lent(attachments: &Attachments, wanted: &Wanted, reference: &Reference) -> Result<Location, StoreError> {
    let nbytes = wanted.meta.nbytes();
    if reference.len != nbytes {
        let reason = format!("the reference to it has {} bytes instead of {nbytes}", reference.len);
        return Err(StoreError::Corrupt { id: wanted.id.clone(), owner: Arc::clone(&wanted.owner), reason });
    }
    if nbytes == 0 {
        return Ok(Location::Nowhere);
    }
    Ok(Location::Lent(attachments.reach(reference)?))
}

fn check(wanted: &Wanted, meta: &Meta) -> Result<(), StoreError> {
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

/// What those who wait for a piece of a batch that failed are told; whether all of the batch was this piece.
///
/// They may have asked by better handles: what is wrong with the fetcher's own is no failure of theirs.
fn outcome_for(error: &StoreError, wanted: &Wanted, is_alone: bool) -> Outcome<Tensor> {
    match error {
        StoreError::Missing { owner, shards } => {
            let its: Vec<MissingShard> = shards.iter().filter(|shard| shard.id == wanted.id).cloned().collect();
            if its.is_empty() {
                Outcome::Again
            } else {
                Outcome::Failed(StoreError::Missing { owner: owner.clone(), shards: its })
            }
        }
        // Of one shard a batch may have several pieces.
        StoreError::Mismatch { id, declared, .. } if *id == wanted.id && *declared == format!("{:?}", wanted.meta) => {
            Outcome::Refuted(error.clone(), wanted.meta.clone())
        }
        // The request itself was wrong, such as rows that a shard has not got: for which of its pieces is not told.
        StoreError::Invalid(_) | StoreError::Refused { status: 400 | 413, .. } if is_alone => {
            Outcome::Refuted(error.clone(), wanted.meta.clone())
        }
        // Another shard's, or of whoever fetched.
        StoreError::Corrupt { id, .. } | StoreError::Drained { id } if *id != wanted.id => Outcome::Again,
        StoreError::Mismatch { .. }
        | StoreError::Invalid(_)
        | StoreError::Refused { status: 400 | 413, .. }
        | StoreError::Interrupted
        | StoreError::TimedOut { .. }
        | StoreError::Full { .. }
        | StoreError::TooLarge { .. }
        | StoreError::StepEnded { .. } => Outcome::Again,
        other => Outcome::Failed(other.clone()),
    }
}

/// Targets of the caller's, filled without the buffer.
pub(crate) struct Direct<'a, 'b> {
    pub(crate) attachments: &'a Attachments,
    pub(crate) wanted: Vec<&'a Wanted>,
    pub(crate) targets: Vec<&'a mut &'b mut [u8]>,
    pub(crate) is_filled: Vec<bool>,
}

impl Receiver for Direct<'_, '_> {
    fn room(&mut self, index: usize, meta: &Meta, _patience: &mut Patience<'_>) -> Result<&mut [u8], StoreError> {
        let wanted =
            self.wanted.get(index).ok_or_else(|| StoreError::Invalid(format!("nothing was wanted at {index}")))?;
        check(wanted, meta)?;
        Ok(self.targets[index])
    }

    fn complete(&mut self, index: usize) -> Result<(), StoreError> {
        let filled = self.is_filled.get_mut(index);
        *filled.ok_or_else(|| StoreError::Invalid(format!("nothing was wanted at {index}")))? = true;
        Ok(())
    }

    fn attach(
        &mut self,
        index: usize,
        meta: &Meta,
        reference: &Reference,
        patience: &mut Patience<'_>,
    ) -> Result<(), StoreError> {
        self.room(index, meta, patience)?;
        let location = lent(self.attachments, self.wanted[index], reference)?;
        let tensor = Tensor::fetched(meta.clone(), location);
        self.targets[index].copy_from_slice(tensor.bytes());
        self.complete(index)
    }
}

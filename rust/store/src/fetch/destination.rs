//! Where fetched shards are received: in the fetch buffer, or in memory of the caller.
//!
//! Invariants: every shard of a request either arrives or fails, also when a thread unwinds. A shard that has arrived is
//! not written to again.

use std::sync::Arc;

use crate::entries::fetch_buffer::Buffer;
use crate::entries::in_flight::{InFlight, Outcome};
use crate::error::{MissingShard, StoreError};
use crate::memory::attached_segments::Attachments;
use crate::memory::slab::{Allocation, allocate};
use crate::memory::slab_pool::Pool;
use crate::memory::tensor::{Location, Tensor};
use crate::meta::Meta;
use crate::time_limit::TimeLimit;
use crate::transport::{Receiver, Reference, Wanted};

/// The shards of one request to one owner, received into the fetch buffer.
pub(crate) struct BufferDestination<'a> {
    pub(crate) buffer: &'a Buffer<Tensor>,
    pub(crate) pool: &'a Arc<Pool>,
    pub(crate) attachments: &'a Attachments,
    pub(crate) pieces: Vec<Piece<'a>>,
}

/// One shard of such a request.
pub(crate) struct Piece<'a> {
    wanted: &'a Wanted,
    flight: Arc<InFlight<Tensor>>,
    space: Option<Allocation>,
    is_over: bool,
}

impl<'a> Piece<'a> {
    pub(crate) fn new(wanted: &'a Wanted, flight: Arc<InFlight<Tensor>>) -> Self {
        Piece { wanted, flight, space: None, is_over: false }
    }

    pub(crate) fn wanted(&self) -> &'a Wanted {
        self.wanted
    }
}

impl BufferDestination<'_> {
    /// Fails all pieces that have not landed.
    pub(crate) fn fail(&mut self, error: &StoreError) {
        for piece in &mut self.pieces {
            if !std::mem::replace(&mut piece.is_over, true) {
                self.buffer.fail(&piece.flight, outcome_for(error, piece.wanted));
            }
        }
    }

    /// Whether all have landed.
    pub(crate) fn is_over(&self) -> bool {
        self.pieces.iter().all(|piece| piece.is_over)
    }

    fn piece(&mut self, index: usize, meta: &Meta) -> Result<(), StoreError> {
        let piece =
            self.pieces.get(index).ok_or_else(|| StoreError::Invalid(format!("nothing was wanted at {index}")))?;
        if piece.is_over {
            return Err(StoreError::Invalid(format!("shard {} has come already", piece.wanted.id)));
        }
        check(piece.wanted, meta)
    }

    /// Spaces for all that is still to come: all or none, so that two batches do not wait for each other's halves.
    fn make_spaces(&mut self, time_limit: &mut TimeLimit<'_>) -> Result<(), StoreError> {
        let missing =
            |piece: &&mut Piece<'_>| !piece.is_over && piece.space.is_none() && piece.wanted.meta.nbytes() > 0;
        let mut pieces: Vec<_> = self.pieces.iter_mut().filter(missing).collect();
        let sizes: Vec<_> = pieces.iter().map(|piece| piece.wanted.meta.nbytes()).collect();
        let made = allocate(self.pool, &sizes, Some(time_limit), &mut |segment, _, space, _| {
            segment.populate(space as usize);
            Ok(())
        })?;
        for (piece, space) in pieces.iter_mut().zip(made) {
            piece.space = Some(space);
        }
        Ok(())
    }

    fn land(&mut self, index: usize, location: Location) -> Result<(), StoreError> {
        let piece = &mut self.pieces[index];
        piece.is_over = true;
        let tensor = Tensor::fetched(piece.wanted.meta.clone(), location);
        let charge = tensor.charge();
        self.buffer.land(&piece.flight, tensor, charge)
    }
}

impl Receiver for BufferDestination<'_> {
    fn space(&mut self, index: usize, meta: &Meta, time_limit: &mut TimeLimit<'_>) -> Result<&mut [u8], StoreError> {
        self.piece(index, meta)?;
        if meta.nbytes() == 0 {
            return Ok(&mut []);
        }
        if self.pieces[index].space.is_none() {
            self.make_spaces(time_limit)?;
        }
        Ok(self.pieces[index].space.as_mut().expect("just made").bytes())
    }

    fn complete(&mut self, index: usize) -> Result<(), StoreError> {
        let piece = self.pieces.get_mut(index).filter(|piece| !piece.is_over);
        let piece = piece.ok_or_else(|| StoreError::Invalid(format!("nothing is to come at {index}")))?;
        let location = match piece.space.take() {
            Some(space) => Location::Here(space.into_place()),
            None if piece.wanted.meta.nbytes() == 0 => Location::Nowhere,
            None => return Err(StoreError::Invalid(format!("nothing was announced at {index}"))),
        };
        self.land(index, location)
    }

    fn attach(
        &mut self,
        index: usize,
        meta: &Meta,
        reference: &Reference,
        _time_limit: &mut TimeLimit<'_>,
    ) -> Result<(), StoreError> {
        self.piece(index, meta)?;
        let location = lent(self.attachments, self.pieces[index].wanted, reference)?;
        self.land(index, location)
    }
}

impl Drop for BufferDestination<'_> {
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

/// The outcome for other threads that wait for a piece of a failed batch. They may have better handles, or wait for
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

/// Targets of the caller's, filled without the buffer.
pub(crate) struct CallerDestination<'a, 'b> {
    pub(crate) attachments: &'a Attachments,
    pub(crate) wanted: Vec<&'a Wanted>,
    pub(crate) targets: Vec<&'a mut &'b mut [u8]>,
    pub(crate) is_filled: Vec<bool>,
}

impl Receiver for CallerDestination<'_, '_> {
    fn space(&mut self, index: usize, meta: &Meta, _time_limit: &mut TimeLimit<'_>) -> Result<&mut [u8], StoreError> {
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
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(), StoreError> {
        self.space(index, meta, time_limit)?;
        let location = lent(self.attachments, self.wanted[index], reference)?;
        let tensor = Tensor::fetched(meta.clone(), location);
        self.targets[index].copy_from_slice(tensor.bytes());
        self.complete(index)
    }
}

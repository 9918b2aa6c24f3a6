//! The store of one process: what it holds as an owner, what it fetched as a consumer, and the account of both.

use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use crate::error::StoreError;
use crate::meta::Meta;
use crate::patience::Patience;
use crate::shard::{Selection, ShardId};
use crate::stats::{Claimed, EpochLedger, Limits, Removed, Stats};
use crate::transport::{Reference, Service, Transport, Wanted};
use crate::{Claimant, Epoch};

/// The store of one process.
pub struct Node {
    _limits: Limits,
}

/// A tensor to be stored: its bytes lie one after the other.
pub struct Source<'a> {
    _meta: Meta,
    _start: *const u8,
    _bytes: PhantomData<&'a [u8]>,
}

impl<'a> Source<'a> {
    /// These bytes.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] where they are not as many as `meta` says.
    pub fn new(_meta: Meta, _bytes: &'a [u8]) -> Result<Self, StoreError> {
        todo!()
    }

    /// The `meta.nbytes()` bytes at `start`.
    ///
    /// # Safety
    /// They can be read as long as `'a`. Who changes them while they are stored gets some of the old and some of the new.
    #[allow(unsafe_code)]
    pub unsafe fn from_raw(_meta: Meta, _start: *const u8) -> Self {
        todo!()
    }
}

impl Node {
    /// A store of its own, for as long as it lives. What a process uses is [`of_process`](Node::of_process).
    pub fn new(_limits: Limits) -> Arc<Node> {
        todo!()
    }

    /// The store of this process: the same one always, and in a child made by `fork` a new one, which is empty. Ask anew
    /// each time instead of keeping it.
    pub fn of_process() -> Arc<Node> {
        todo!()
    }

    /// Lets go of what the parent's store kept at the fork, and would keep alive here. For a child.
    pub fn forget_inherited() {
        todo!()
    }

    /// Changes the limits, for what is asked for from here on.
    pub fn set_limits(&self, _limits: Limits) {
        todo!()
    }

    /// Handles that name this owner are this node's own: they are looked up, not fetched.
    pub fn announce(&self, _owner: Arc<str>) {
        todo!()
    }

    /// The number that begins the names of this node's shards.
    pub fn nonce(&self) -> u64 {
        todo!()
    }

    /// Stores copies of these tensors, unclaimed, under names of their own: all of them or none.
    ///
    /// # Errors
    /// [`StoreError::Full`] where the limit was reached until patience ended, [`StoreError::TooLarge`],
    /// [`StoreError::Memory`], and what patience says.
    pub fn put(&self, _sources: &[Source<'_>], _patience: &mut Patience<'_>) -> Result<Vec<ShardId>, StoreError> {
        todo!()
    }

    /// Removes all that is stored and all that was fetched; epochs and claims of what was there end with it. Says what the
    /// storage held.
    pub fn clear_node(&self) -> Removed {
        todo!()
    }

    /// The step that fetches belong to now.
    pub fn current_epoch(&self) -> Option<Epoch> {
        todo!()
    }

    /// What is wanted, in order, as memory that the caller may write to and nobody else sees.
    ///
    /// What the buffer has comes from there. Of the rest each shard is asked for once, however many threads want it: in
    /// one request an owner, all owners at once. What comes is kept in the buffer under the step that was current when
    /// this was called.
    ///
    /// # Errors
    /// [`StoreError::Missing`] and the transport's errors; [`StoreError::StepEnded`] and [`StoreError::Drained`] where
    /// that was drained meanwhile; [`StoreError::Mismatch`], [`StoreError::Full`], and what patience says.
    pub fn fetch(
        &self,
        _wanted: &[Wanted],
        _transport: &dyn Transport,
        _patience: &mut Patience<'_>,
    ) -> Result<Vec<View>, StoreError> {
        todo!()
    }

    /// As [`fetch`](Node::fetch), into memory of the caller's, one target for each; nothing is kept in the buffer.
    ///
    /// # Errors
    /// As of `fetch`, and [`StoreError::Invalid`] where a target is not as large as what is wanted.
    pub fn fetch_into(
        &self,
        _wanted: &[Wanted],
        _targets: &mut [&mut [u8]],
        _transport: &dyn Transport,
        _patience: &mut Patience<'_>,
    ) -> Result<(), StoreError> {
        todo!()
    }

    /// Carries these shards over: what was fetched of them, and the shards where they are stored here, no longer end with
    /// a step. How many entries that were.
    pub fn keep(&self, _ids: &[ShardId]) -> u64 {
        todo!()
    }

    /// The account of a step; `None` where it never began here, or ended too long ago.
    pub fn ledger(&self, _epoch: Epoch) -> Option<EpochLedger> {
        todo!()
    }
}

impl Service for Node {
    fn look_up(&self, _wanted: &[Selection]) -> Result<Vec<Outgoing>, StoreError> {
        todo!()
    }

    fn receive(&self, _id: ShardId, _meta: Meta) -> Result<Incoming, StoreError> {
        todo!()
    }

    fn remove(&self, _ids: &[ShardId]) -> Removed {
        todo!()
    }

    fn clear_buffer(&self, _ids: Option<&[ShardId]>) -> u64 {
        todo!()
    }

    fn begin_epoch(&self, _epoch: Epoch, _claimant: Claimant) -> Result<(), StoreError> {
        todo!()
    }

    fn claim(&self, _epoch: Epoch, _claimant: Claimant, _ids: &[ShardId]) -> Result<Claimed, StoreError> {
        todo!()
    }

    fn end_epoch(&self, _epoch: Epoch) -> EpochLedger {
        todo!()
    }

    fn give_up(&self, _claimant: Claimant) {
        todo!()
    }

    fn stats(&self) -> Stats {
        todo!()
    }
}

/// Stored bytes on their way out. They live as long as this, also when their shard is removed meanwhile.
pub struct Outgoing {}

impl Outgoing {
    /// What they are.
    pub fn meta(&self) -> &Meta {
        todo!()
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        todo!()
    }

    /// Where the [`Checksum`](crate::Checksum) of a whole shard is kept from its first transfer on; `None` of rows of one.
    pub fn checksum(&self) -> Option<&OnceLock<u64>> {
        todo!()
    }

    /// Where processes of this node find them.
    pub fn reference(&self) -> Reference {
        todo!()
    }
}

/// A shard that is being received. Dropped before it is committed, it never was.
pub struct Incoming {}

impl Incoming {
    /// What it is to be.
    pub fn meta(&self) -> &Meta {
        todo!()
    }

    /// The room for its bytes.
    pub fn room(&mut self) -> &mut [u8] {
        todo!()
    }

    /// Stores it, unclaimed. `checksum` is that of the bytes in the room.
    ///
    /// # Errors
    /// [`StoreError::Exists`] where a shard of this name was stored meanwhile.
    pub fn commit(self, _checksum: u64) -> Result<(), StoreError> {
        todo!()
    }
}

/// The bytes of a tensor that was asked for: to be read and to be written, by its holder alone. Its pages are shared with
/// others until they are written to.
pub struct View {}

impl View {
    /// What they are.
    pub fn meta(&self) -> &Meta {
        todo!()
    }

    /// The first byte; valid for reads and writes of `meta().nbytes()` bytes as long as this lives. Aligned to 64 bytes,
    /// unless rows were chosen.
    pub fn data(&self) -> *mut u8 {
        todo!()
    }
}

//! The seams between a node and the wire: what a server asks of a node, and what a node asks of a client.

use std::sync::Arc;

use tundish_shm::Address;

use crate::error::StoreError;
use crate::memory::transfers::{Incoming, Outgoing};
use crate::meta::Meta;
use crate::shard_id::{Rows, Selection, ShardId};
use crate::stats::{Claimed, Dropped, EpochLedger, Kept, Removed, Stats};
use crate::time_limit::TimeLimit;
use crate::{Claimant, Epoch};

/// What a server asks of the node that it serves. No call waits for anything but short locks; those that take time
/// proportional to what they are given say so.
pub trait Service: Send + Sync + 'static {
    /// The bytes of these shards, in order, kept alive by what is returned.
    ///
    /// # Errors
    /// [`StoreError::Missing`] with all that are not there, [`StoreError::Invalid`] for rows that a shard has not got.
    fn look_up(&self, wanted: &[Selection]) -> Result<Vec<Outgoing>, StoreError>;

    /// Allocation to receive a shard into; [`Incoming::commit`] stores it. Making memory takes milliseconds a hundred
    /// megabytes.
    ///
    /// # Errors
    /// [`StoreError::Full`] at the limit, at once: the server asks again as long as it has time_limit.
    /// [`StoreError::TooLarge`], [`StoreError::Exists`] and [`StoreError::Memory`].
    fn receive(&self, id: ShardId, meta: Meta) -> Result<Incoming, StoreError>;

    /// Removes these shards from the storage, and from this process's own buffer. Takes a millisecond or more for ten
    /// thousand. Those that are not there, and repetitions, count for nothing.
    fn remove(&self, ids: &[ShardId]) -> Removed;

    /// Removes what was fetched of these shards, all of it where `None`; how many entries. Time as of `remove`.
    fn clear_buffer(&self, ids: Option<&[ShardId]>) -> u64 {
        self.drop_fetched(ids).entries
    }

    /// As `clear_buffer`; it tells what was kept apart.
    fn drop_fetched(&self, ids: Option<&[ShardId]>) -> Dropped;

    /// From here on fetches belong to this step, and those that belonged to none.
    ///
    /// # Errors
    /// [`StoreError::StepEnded`] where it has ended already, [`StoreError::StepTaken`] where it is another claimant's.
    fn begin_epoch(&self, epoch: Epoch, claimant: Claimant) -> Result<(), StoreError>;

    /// Claims stored shards for a step, with which they end. Time as of `remove`.
    ///
    /// # Errors
    /// As of [`begin_epoch`](Service::begin_epoch).
    fn claim(&self, epoch: Epoch, claimant: Claimant, ids: &[ShardId]) -> Result<Claimed, StoreError>;

    /// Carries these shards over: what was fetched of them, and the shards where they are stored here, no longer end
    /// with a step; of another claimant's step not as long as this one lives. Time as of `remove`.
    fn keep(&self, claimant: Claimant, ids: &[ShardId]) -> Kept;

    /// A step of this claimant's is about to end: what it claimed is given to nobody any more, so that what is fetched for
    /// the next step is nothing that ends with this one.
    fn close_epoch(&self, epoch: Epoch, claimant: Claimant);

    /// Ends a step: drops what it claimed and what was fetched in it. Again, it only tells how it stands.
    fn end_epoch(&self, epoch: Epoch) -> EpochLedger;

    /// The claimant is gone: what it claimed is unclaimed again, what was fetched in its steps is dropped, and what it
    /// kept of others' steps ends with these.
    fn give_up(&self, claimant: Claimant);

    /// How all of it stands.
    fn stats(&self) -> Stats;
}

/// Fetches from owners. Called by several threads at once, for one owner each.
pub trait Transport: Sync {
    /// Fetches these shards from `owner` in one request, into `receiver`.
    ///
    /// Each entry of `wanted` is announced to the receiver, by its index, with [`Receiver::space`] or
    /// [`Receiver::attach`]; what was received into a space counts when [`Receiver::complete`] was told that its bytes
    /// are whole. What was announced may be announced again after a retry, but not what has come.
    ///
    /// # Errors
    /// The receiver's, [`StoreError::Missing`] with `owner`, and whatever becomes of connections.
    fn fetch(
        &self,
        owner: &Arc<str>,
        wanted: &[Selection],
        receiver: &mut dyn Receiver,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(), StoreError>;
}

/// Takes what a transport fetches.
pub trait Receiver {
    /// Allocation for the bytes of what was wanted at `index`, of which the owner says that they are a `meta`.
    ///
    /// # Errors
    /// [`StoreError::Mismatch`] where that is not what was declared, [`StoreError::Full`] at the limit when time_limit
    /// ends.
    fn space(&mut self, index: usize, meta: &Meta, time_limit: &mut TimeLimit<'_>) -> Result<&mut [u8], StoreError>;

    /// The space at `index` holds what its owner sent, whole and checked.
    ///
    /// # Errors
    /// [`StoreError::StepEnded`] and [`StoreError::Drained`] where nobody may have it any more.
    fn complete(&mut self, index: usize) -> Result<(), StoreError>;

    /// The bytes of what was wanted at `index` lie in memory of this node. What the reference says is checked, not
    /// believed.
    ///
    /// # Errors
    /// As of `space` and `complete`, and [`StoreError::Memory`] where that memory cannot be reached: the transport then
    /// asks for the bytes.
    fn attach(
        &mut self,
        index: usize,
        meta: &Meta,
        reference: &Reference,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(), StoreError>;
}

/// A part of a segment, for processes of the same node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reference {
    /// The segment.
    pub address: Address,
    /// Where the part begins in its data.
    pub offset: u64,
    /// Bytes of the part.
    pub len: u64,
}

/// A shard, or rows of one, as a handle names it.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The address that its owner serves at.
    pub owner: Arc<str>,
    /// Which shard.
    pub id: ShardId,
    /// Which rows of it; all where `None`.
    pub rows: Option<Rows>,
    /// What is expected: of the rows alone, where rows are chosen.
    pub meta: Meta,
}

impl Wanted {
    pub(crate) fn selection(&self) -> Selection {
        Selection { id: self.id.clone(), rows: self.rows.clone() }
    }
}

//! Slabs: shared-memory segments that hold tensors one behind the other.
//!
//! A [`Slab`] owns its segment and gives it back to its pool when nothing in this process refers to it.
//!
//! Invariants: an [`Allocation`] is exclusive until its shard is stored or kept, and from then on nobody writes to it.
//! Space is given out once: it is used again with the whole slab.
#![allow(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use tundish_shm::{PrivateMapping, Segment, SegmentAddress, ShmError};

use crate::error::StoreError;
use crate::memory::slab_pool::{Reservation, SlabPool};
use crate::time_limit::TimeLimit;

/// Every tensor begins at a multiple of so many bytes, and takes such a multiple.
pub(crate) const ALIGNMENT: u64 = 64;

/// A segment that holds tensors.
pub(crate) struct Slab {
    /// Taken out when it is given back.
    segment: Option<Segment>,
    pool: Arc<SlabPool>,
    /// Bytes that are given out, from the first on.
    taken: AtomicU64,
}

/// The position of a tensor in a slab.
#[derive(Clone, Debug)]
pub(crate) struct SlabRange {
    pub(crate) slab: Arc<Slab>,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Slab {
    /// Publishes the segment. Its first `taken` bytes are given out already.
    fn new(mut segment: Segment, pool: &Arc<SlabPool>, taken: u64) -> Result<Arc<Self>, ShmError> {
        let capacity = segment.capacity();
        let published = segment.publish(capacity, &[]);
        let slab = Slab { segment: Some(segment), pool: Arc::clone(pool), taken: taken.into() };
        published.map(|()| Arc::new(slab))
    }

    fn segment(&self) -> &Segment {
        self.segment.as_ref().expect("taken out when the slab is dropped")
    }

    pub(crate) fn address(&self) -> SegmentAddress {
        self.segment().address()
    }

    pub(crate) fn private_mapping(&self, bytes: Range<usize>) -> Result<PrivateMapping, ShmError> {
        self.segment().private(bytes)
    }

    /// Gives out `len` bytes; `None` if fewer are left.
    fn give_out(&self, len: u64) -> Option<u64> {
        let capacity = self.segment().capacity() as u64;
        let fits = |taken: u64| Some(taken + len).filter(|end| *end <= capacity);
        self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()
    }
}

impl fmt::Debug for Slab {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Slab").field("segment", &self.segment).finish_non_exhaustive()
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if let Some(segment) = self.segment.take() {
            self.pool.give_back(segment);
        }
    }
}

impl SlabRange {
    /// The bytes. Nobody writes to them any more.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: within the segment, which lives as long as the slab; only spaces are written to.
        unsafe { std::slice::from_raw_parts(self.start(), self.len as usize) }
    }

    /// The first byte.
    pub(crate) fn start(&self) -> *mut u8 {
        self.slab.segment().data().wrapping_add(self.offset as usize)
    }
}

/// Space in a slab, to be filled.
#[derive(Debug)]
pub(crate) struct Allocation(SlabRange);

impl Allocation {
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: within the segment, which lives as long as the slab, and given out to this space alone.
        unsafe { std::slice::from_raw_parts_mut(self.0.start(), self.0.len as usize) }
    }

    /// Copies as many bytes as it has space for.
    ///
    /// # Safety
    /// They can be read.
    pub(crate) unsafe fn copy_from(&mut self, source: *const u8) {
        // SAFETY: the caller's promise, and as of `bytes`; the memory of a segment is nobody's source.
        unsafe { std::ptr::copy(source, self.0.start(), self.0.len as usize) };
    }

    /// From here on it is only read.
    pub(crate) fn into_range(self) -> SlabRange {
        self.0
    }
}

/// Fills a fresh slab before it is published: called with entries and their offsets, and the bytes of all.
pub(crate) type Prepare<'a> =
    &'a mut dyn FnMut(&mut Segment, &[(usize, u64)], u64, Option<&mut TimeLimit<'_>>) -> Result<(), StoreError>;

/// Tensors that share a slab, with their offsets.
struct Group {
    members: Vec<(usize, u64)>,
    space: u64,
}

impl Group {
    fn new() -> Self {
        Group { members: Vec::new(), space: 0 }
    }

    fn add(&mut self, index: usize, size: u64) {
        self.members.push((index, self.space));
        self.space += size.next_multiple_of(ALIGNMENT);
    }
}

/// Bytes that a tensor takes in a slab.
pub(crate) fn padded(size: u64) -> u64 {
    size.next_multiple_of(ALIGNMENT)
}

/// Allocates spaces of these sizes, none of them 0: all or none. Large ones get slabs of their own, smaller ones share
/// slabs, and the rest goes to the open slab.
///
/// # Errors
/// The errors of [`SlabPool::reserve`], and [`StoreError::Memory`].
pub(crate) fn allocate(
    pool: &Arc<SlabPool>,
    sizes: &[u64],
    mut time_limit: Option<&mut TimeLimit<'_>>,
    prepare: Prepare<'_>,
) -> Result<Vec<Allocation>, StoreError> {
    let total: u64 = sizes.iter().map(|size| padded(*size)).sum();
    let shared = pool.shared_space(total);
    let (groups, rest) = group_by_slab(sizes, shared);
    let mut spaces: Vec<Option<Allocation>> = sizes.iter().map(|_| None).collect();
    let mut place = |slab: &Arc<Slab>, start: u64, group: &Group| {
        for (index, offset) in &group.members {
            let place = SlabRange { slab: Arc::clone(slab), offset: start + offset, len: sizes[*index] };
            spaces[*index] = Some(Allocation(place));
        }
    };
    let alone: u64 = groups.iter().map(|group| SlabPool::size_for(group.space)).sum();
    let opened = pool.open.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
    let fits = opened.and_then(|slab| slab.give_out(rest.space).map(|start| (slab, start)));
    let mut reservation;
    match fits {
        Some((slab, start)) => {
            place(&slab, start, &rest);
            reservation = pool.reserve(alone, time_limit.as_deref_mut())?;
        }
        None if rest.members.is_empty() => reservation = pool.reserve(alone, time_limit.as_deref_mut())?,
        None => {
            // A slab that later tensors share; or, if that does not fit, one as large as needed.
            let enough = alone + SlabPool::size_for(rest.space);
            let (reserved, space) = match pool.reserve(alone + SlabPool::size_for(shared.max(rest.space)), None) {
                Ok(reserved) => (reserved, shared.max(rest.space)),
                Err(StoreError::Full { .. } | StoreError::TooLarge { .. }) => {
                    (pool.reserve(enough, time_limit.as_deref_mut())?, rest.space)
                }
                Err(other) => return Err(other),
            };
            reservation = reserved;
            let taken = match reservation.take(space, time_limit.as_deref_mut()) {
                // The system has less than the limit allows.
                Err(StoreError::Memory(_)) if space > rest.space => {
                    reservation.take(rest.space, time_limit.as_deref_mut())?
                }
                taken => taken?,
            };
            let slab = Slab::new(taken, pool, 0)?;
            let start = slab.give_out(rest.space).expect("it was made for these");
            place(&slab, start, &rest);
            *pool.open.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&slab);
        }
    }
    for group in &groups {
        let slab = own_slab(&mut reservation, group, time_limit.as_deref_mut(), prepare)?;
        place(&slab, 0, group);
    }
    Ok(spaces.into_iter().map(|space| space.expect("each is in a group")).collect())
}

/// A slab for the tensors of one group.
fn own_slab(
    reservation: &mut Reservation,
    group: &Group,
    mut time_limit: Option<&mut TimeLimit<'_>>,
    prepare: Prepare<'_>,
) -> Result<Arc<Slab>, StoreError> {
    let mut segment = reservation.take(group.space, time_limit.as_deref_mut())?;
    let prepared = prepare(&mut segment, &group.members, group.space, time_limit);
    let capacity = segment.capacity() as u64;
    let slab = Slab::new(segment, reservation.pool(), capacity)?;
    prepared.map(|()| slab)
}

/// Groups of about `shared` bytes, in order, and the rest.
fn group_by_slab(sizes: &[u64], shared: u64) -> (Vec<Group>, Group) {
    let mut groups = Vec::new();
    let mut rest = Group::new();
    for (index, size) in sizes.iter().enumerate() {
        if *size >= shared {
            let mut alone = Group::new();
            alone.add(index, *size);
            groups.push(alone);
            continue;
        }
        rest.add(index, *size);
        if rest.space >= shared {
            groups.push(std::mem::replace(&mut rest, Group::new()));
        }
    }
    (groups, rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_ask_at_once_get_different_bytes() {
        let pool = SlabPool::new("storage", 64 << 20);
        let segment = pool.reserve(32 << 20, None).unwrap().take(16 << 20, None).unwrap();
        let slab = Slab::new(segment, &pool, 0).unwrap();
        let take_all = || std::iter::from_fn(|| slab.give_out(ALIGNMENT)).collect::<Vec<_>>();
        let mut given: Vec<u64> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(take_all)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        given.sort_unstable();
        let expected: Vec<u64> = (0..(16 << 20)).step_by(ALIGNMENT as usize).collect();
        assert_eq!(given[..expected.len()], expected);
        assert!(given.windows(2).all(|two| two[0] < two[1]));
    }
}

//! Slabs: segments that hold tensors, one behind the other.
//!
//! A [`Slab`] owns its segment and gives it back to its pool when nothing here refers to it. What always holds: each
//! byte of it is given out once, so that who has a room has it alone until its shard is stored or kept; from then on
//! nobody writes to it.
#![allow(unsafe_code)]

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use tundish_shm::warm::{self, WarmCopy};
use tundish_shm::{Address, Segment, ShmError};

use crate::error::StoreError;
use crate::patience::Patience;
use crate::pool::{Pool, Reservation};

/// Every tensor begins at a multiple of so many bytes, and takes such a multiple.
pub(crate) const ALIGNMENT: u64 = 64;

/// A segment that holds tensors.
pub(crate) struct Slab {
    /// Taken out when it is given back.
    segment: Option<Segment>,
    pool: Arc<Pool>,
    /// Where the room begins that nobody has.
    next: AtomicU64,
}

/// Where a tensor lies in a slab.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) slab: Arc<Slab>,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Slab {
    /// Others may be told of it from here on.
    fn new(mut segment: Segment, pool: &Arc<Pool>) -> Result<Arc<Self>, ShmError> {
        let capacity = segment.capacity();
        let published = segment.publish(capacity, &[]);
        let slab = Slab { segment: Some(segment), pool: Arc::clone(pool), next: AtomicU64::new(0) };
        published.map(|()| Arc::new(slab))
    }

    fn segment(&self) -> &Segment {
        self.segment.as_ref().expect("taken out when the slab is dropped")
    }

    pub(crate) fn address(&self) -> Address {
        self.segment().address()
    }

    pub(crate) fn copy(&self, bytes: Range<usize>) -> Result<WarmCopy, ShmError> {
        warm::copy_of(self.segment(), bytes)
    }

    /// Gives out the next `len` bytes; `None` where so many are not left.
    fn give_out(&self, len: u64) -> Option<u64> {
        let capacity = self.segment().capacity() as u64;
        let further = |next: u64| next.checked_add(len).filter(|end| *end <= capacity);
        self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, further).ok()
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

impl Place {
    /// The bytes, of what nobody writes to any more.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: within the segment, which lives as long as the slab; only rooms are written to.
        unsafe { std::slice::from_raw_parts(self.start(), self.len as usize) }
    }

    /// The first byte.
    pub(crate) fn start(&self) -> *mut u8 {
        self.slab.segment().data().wrapping_add(self.offset as usize)
    }
}

/// Room in a slab, that one has alone.
#[derive(Debug)]
pub(crate) struct Room(Place);

impl Room {
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: within the segment, which lives as long as the slab, and given out to this room alone.
        unsafe { std::slice::from_raw_parts_mut(self.0.start(), self.0.len as usize) }
    }

    /// Copies as many bytes as it has room for.
    ///
    /// # Safety
    /// They can be read.
    pub(crate) unsafe fn copy_from(&mut self, source: *const u8) {
        // SAFETY: the caller's promise, and as of `bytes`; the memory of a segment is nobody's source.
        unsafe { std::ptr::copy(source, self.0.start(), self.0.len as usize) };
    }

    /// From here on it is only read.
    pub(crate) fn into_place(self) -> Place {
        self.0
    }
}

/// What is done with a fresh slab before others may be told of it: entries with their offsets, and the bytes of all.
pub(crate) type Prepare<'a> =
    &'a mut dyn FnMut(&mut Segment, &[(usize, u64)], u64, Option<&mut Patience<'_>>) -> Result<(), StoreError>;

/// Tensors that get a slab of their own, or that share the open one.
struct Group {
    members: Vec<(usize, u64)>,
    room: u64,
}

impl Group {
    fn new() -> Self {
        Group { members: Vec::new(), room: 0 }
    }

    fn add(&mut self, index: usize, size: u64) {
        self.members.push((index, self.room));
        self.room += size.next_multiple_of(ALIGNMENT);
    }
}

/// Bytes that a tensor takes in a slab.
pub(crate) fn taken(size: u64) -> u64 {
    size.next_multiple_of(ALIGNMENT)
}

/// Rooms of these sizes, none of them 0, all or none: the large ones in slabs of their own, several of the others in
/// one, what is left over in the slab that is open.
///
/// # Errors
/// As of [`Pool::reserve`], and [`StoreError::Memory`].
pub(crate) fn rooms(
    pool: &Arc<Pool>,
    sizes: &[u64],
    mut patience: Option<&mut Patience<'_>>,
    prepare: Prepare<'_>,
) -> Result<Vec<Room>, StoreError> {
    let total: u64 = sizes.iter().map(|size| taken(*size)).sum();
    let shared = pool.shared_room(total);
    let (groups, rest) = arrange(sizes, shared);
    let mut rooms: Vec<Option<Room>> = sizes.iter().map(|_| None).collect();
    let mut place = |slab: &Arc<Slab>, start: u64, group: &Group| {
        for (index, offset) in &group.members {
            let place = Place { slab: Arc::clone(slab), offset: start + offset, len: sizes[*index] };
            rooms[*index] = Some(Room(place));
        }
    };
    let alone: u64 = groups.iter().map(|group| Pool::size_for(group.room)).sum();
    let opened = pool.open.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
    let fits = opened.and_then(|slab| slab.give_out(rest.room).map(|start| (slab, start)));
    let mut reservation;
    match fits {
        Some((slab, start)) => {
            reservation = pool.reserve(alone, patience.as_deref_mut())?;
            place(&slab, start, &rest);
        }
        None if rest.members.is_empty() => reservation = pool.reserve(alone, patience.as_deref_mut())?,
        None => {
            // A slab to be shared by what comes later, or where that does not fit, none larger than needed.
            let enough = alone + Pool::size_for(rest.room);
            let (reserved, room) = match pool.reserve(alone + Pool::size_for(shared.max(rest.room)), None) {
                Ok(reserved) => (reserved, shared.max(rest.room)),
                Err(StoreError::Full { .. } | StoreError::TooLarge { .. }) => {
                    (pool.reserve(enough, patience.as_deref_mut())?, rest.room)
                }
                Err(other) => return Err(other),
            };
            reservation = reserved;
            let taken = match reservation.take(room, patience.as_deref_mut()) {
                // The system has less than the limit allows.
                Err(StoreError::Memory(_)) if room > rest.room => {
                    reservation.take(rest.room, patience.as_deref_mut())?
                }
                taken => taken?,
            };
            let slab = Slab::new(taken, pool)?;
            let start = slab.give_out(rest.room).expect("it was made for these");
            place(&slab, start, &rest);
            *pool.open.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&slab);
        }
    }
    for group in &groups {
        let slab = alone_in(&mut reservation, group, patience.as_deref_mut(), prepare)?;
        place(&slab, 0, group);
    }
    Ok(rooms.into_iter().map(|room| room.expect("each is in a group")).collect())
}

/// A slab that is filled by these alone.
fn alone_in(
    reservation: &mut Reservation,
    group: &Group,
    mut patience: Option<&mut Patience<'_>>,
    prepare: Prepare<'_>,
) -> Result<Arc<Slab>, StoreError> {
    let mut segment = reservation.take(group.room, patience.as_deref_mut())?;
    let prepared = prepare(&mut segment, &group.members, group.room, patience);
    let slab = Slab::new(segment, reservation.pool())?;
    slab.next.store(u64::MAX, Ordering::Relaxed);
    prepared.map(|()| slab)
}

/// Groups of about `shared` bytes, in order; and what is left, less than that.
fn arrange(sizes: &[u64], shared: u64) -> (Vec<Group>, Group) {
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
        if rest.room >= shared {
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
        let pool = Pool::new("storage", 64 << 20);
        let segment = pool.reserve(32 << 20, None).unwrap().take(16 << 20, None).unwrap();
        let slab = Slab::new(segment, &pool).unwrap();
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

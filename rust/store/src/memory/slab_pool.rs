//! The slabs of one side of a process's store: their recycling, and their limit.
//!
//! A [`SlabPool`] owns an arena, whose segments are the slabs.
//!
//! Invariants:
//!
//! 1. Slabs in use, released slabs with a live view, and reservations are together never above the limit. Idle slabs
//!    are freed before the limit is passed with them.
//! 2. A slab goes back to the arena when nothing in this process refers to it, and is used again when no view of it
//!    lives in any process.
//! 3. In a child made by `fork` nothing is counted or given back: a slab is only unmapped there.

use std::cell::Cell;
use std::process;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use rustix::param::page_size;
use tundish_shm::arena::{Arena, ArenaPurpose};
use tundish_shm::{DATA_START, Segment, ShmError};

use crate::error::StoreError;
use crate::memory::slab::Slab;
use crate::stats::MemoryStats;
use crate::time_limit::TimeLimit;

/// Slabs for many small tensors have sizes between these.
const SMALLEST: u64 = 256 << 10;
const LARGEST: u64 = 64 << 20;

/// Such a slab is this part of the memory in use: there are few slabs, and none holds much of the memory.
const PART_IN_USE: u64 = 8;

/// And at most this part of the limit.
const PART_OF_LIMIT: u64 = 16;

/// The slabs of one side of a process's store.
pub(crate) struct SlabPool {
    name: &'static str,
    process: u32,
    arena: Arena,
    state: Mutex<State>,
    freed: Condvar,
    /// The slab that small tensors go to now.
    pub(crate) open: Mutex<Weak<Slab>>,
}

struct State {
    limit: u64,
    used: u64,
    high_water: u64,
    /// The smallest idle memory since the last `trim`; `None` if no slab was taken.
    least_idle: Option<u64>,
}

/// Bytes that were set aside. They are released when this is dropped.
pub(crate) struct Reservation {
    pool: Arc<SlabPool>,
    bytes: u64,
}

impl SlabPool {
    pub(crate) fn new(name: &'static str, limit: u64) -> Arc<Self> {
        let state = State { limit, used: 0, high_water: 0, least_idle: None };
        // The pool limits the idle memory, not the arena.
        let arena = Arena::new(ArenaPurpose::Slabs, usize::MAX);
        Arc::new(SlabPool {
            name,
            process: process::id(),
            arena,
            state: Mutex::new(state),
            freed: Condvar::new(),
            open: Mutex::default(),
        })
    }

    /// Bytes that a slab with space for `space` takes.
    pub(crate) fn size_for(space: u64) -> u64 {
        (space + DATA_START as u64).next_multiple_of(page_size() as u64)
    }

    /// The space that a slab for many small tensors gets, where `asked` more bytes are to be stored.
    pub(crate) fn shared_space(&self, asked: u64) -> u64 {
        let state = self.lock();
        let part = ((state.used + asked) / PART_IN_USE).next_power_of_two().clamp(SMALLEST, LARGEST);
        part.min(state.limit / PART_OF_LIMIT).max(2 * DATA_START as u64) - DATA_START as u64
    }

    /// Sets bytes aside; with `time_limit` it waits for them.
    ///
    /// # Errors
    /// [`StoreError::Full`], [`StoreError::TooLarge`], and the errors of `time_limit`.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        bytes: u64,
        mut time_limit: Option<&mut TimeLimit<'_>>,
    ) -> Result<Reservation, StoreError> {
        loop {
            let (mut state, mut escaped) = self.lock_with_escaped();
            if escaped > 0 && state.used + escaped + bytes > state.limit {
                drop(state);
                // Counts anew which views have ended.
                self.arena.stats();
                (state, escaped) = self.lock_with_escaped();
            }
            let (used, limit) = (state.used, state.limit);
            if bytes > limit {
                return Err(StoreError::TooLarge { side: self.name, asked: bytes, limit });
            }
            // A reservation of nothing does not wait.
            if bytes == 0 || used + escaped + bytes <= limit {
                state.used += bytes;
                state.high_water = state.high_water.max(state.used);
                return Ok(Reservation { pool: Arc::clone(self), bytes });
            }
            let full = StoreError::Full { side: self.name, asked: bytes, used, escaped, limit };
            let Some(time_limit) = time_limit.as_deref_mut().filter(|time_limit| !time_limit.is_over()) else {
                return Err(full);
            };
            // Views of other processes end without a word, so it never sleeps for long.
            drop(self.freed.wait_timeout(state, time_limit.next_wait()).unwrap_or_else(PoisonError::into_inner));
            time_limit.check_cancelled()?;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state and the escaped bytes. A slab that is being given back counts as used, as escaped, or as both, never
    /// as neither: it escapes before it is released.
    fn lock_with_escaped(&self) -> (MutexGuard<'_, State>, u64) {
        let state = self.lock();
        let escaped = self.arena.last_stats().escaped_bytes as u64;
        (state, escaped)
    }

    fn release(&self, bytes: u64) {
        if self.process == process::id() {
            self.lock().used -= bytes;
            self.freed.notify_all();
        }
    }

    /// Takes back the segment of a slab.
    pub(crate) fn give_back(&self, segment: Segment) {
        let bytes = segment.size() as u64;
        if self.process != process::id() {
            return;
        }
        self.note_idle();
        self.arena.give_back(segment);
        self.release(bytes);
    }

    /// Frees the memory that was idle ever since the last call.
    pub(crate) fn trim(&self) {
        let idle = self.arena.stats().cached_bytes as u64;
        let unused = self.lock().least_idle.take().unwrap_or(idle).min(idle);
        if unused > 0 {
            self.arena.trim(usize::try_from(idle - unused).unwrap_or(usize::MAX));
        }
    }

    fn note_idle(&self) {
        let mut state = self.lock();
        let idle = self.arena.last_stats().cached_bytes as u64;
        state.least_idle = Some(state.least_idle.map_or(idle, |least| least.min(idle)));
    }

    /// Frees all idle memory.
    pub(crate) fn free_idle(&self) {
        self.arena.trim(0);
    }

    /// Drops the parent's idle memory in a child made by `fork`.
    pub(crate) fn forget(&self) {
        self.arena.forget();
    }

    pub(crate) fn set_limit(&self, limit: u64) {
        self.lock().limit = limit;
        self.freed.notify_all();
    }

    pub(crate) fn memory_stats(&self) -> MemoryStats {
        let arena = self.arena.stats();
        let state = self.lock();
        MemoryStats {
            limit_bytes: state.limit,
            used_bytes: state.used,
            escaped_bytes: arena.escaped_bytes as u64,
            idle_bytes: arena.cached_bytes as u64,
            high_water_bytes: state.high_water,
        }
    }

    /// Frees idle memory until it fits, with the memory in use but for `spare` bytes, within the limit.
    fn make_room(&self, spare: u64) {
        let (state, escaped) = self.lock_with_escaped();
        let left = (state.limit + spare).saturating_sub(state.used + escaped);
        drop(state);
        self.arena.trim(usize::try_from(left).unwrap_or(usize::MAX));
    }
}

impl Reservation {
    /// A segment with space for `space` bytes, out of the reserved bytes.
    ///
    /// # Errors
    /// [`StoreError::Memory`] where the system has none, and the errors of `time_limit`.
    pub(crate) fn take(&mut self, space: u64, time_limit: Option<&mut TimeLimit<'_>>) -> Result<Segment, StoreError> {
        let len =
            usize::try_from(space).map_err(|_| StoreError::Invalid(format!("{space} bytes exceed any memory")))?;
        let set_aside = SlabPool::size_for(space).min(self.bytes);
        let (mut time_limit, failure) = (time_limit, Cell::new(None));
        let mut check_cancelled = || {
            let checked = time_limit.as_deref_mut().map_or(Ok(()), TimeLimit::check_cancelled);
            checked.map_err(|error| {
                failure.set(Some(error));
                ShmError::Interrupted
            })
        };
        let segment = loop {
            // An idle segment that is used again was counted before; a fresh one comes beside the idle ones.
            self.pool.make_room(set_aside);
            let taken = match self.pool.arena.take_kept(len) {
                Some(kept) => Ok(kept),
                None => {
                    self.pool.make_room(0);
                    self.pool.arena.take(len, &mut check_cancelled)
                }
            };
            let segment = taken.map_err(|error| failure.take().unwrap_or_else(|| error.into()))?;
            if self.adds(segment.size() as u64 - set_aside) {
                break segment;
            }
            // A kept one that is larger than was set aside, where each byte counts; others may bring more of them.
            self.pool.arena.give_back(segment);
            self.pool.arena.trim(0);
        };
        self.bytes -= set_aside;
        self.pool.make_room(0);
        self.pool.note_idle();
        Ok(segment)
    }

    /// Counts bytes that were not set aside; `false` where the limit does not allow them.
    fn adds(&self, bytes: u64) -> bool {
        let (mut state, escaped) = self.pool.lock_with_escaped();
        let fits = bytes == 0 || state.used + escaped + bytes <= state.limit;
        if fits {
            state.used += bytes;
            state.high_water = state.high_water.max(state.used);
        }
        fits
    }

    pub(crate) fn pool(&self) -> &Arc<SlabPool> {
        &self.pool
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.pool.release(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::slab::{Allocation, SlabRange, allocate};

    const LIMIT: u64 = 8 << 20;

    fn places(pool: &Arc<SlabPool>, sizes: &[u64]) -> Result<Vec<SlabRange>, StoreError> {
        let spaces = allocate(pool, sizes, None, &mut |_, _, _, _| Ok(()))?;
        Ok(spaces.into_iter().map(Allocation::into_range).collect())
    }

    #[test]
    fn idle_memory_goes_back_to_the_system() {
        let pool = SlabPool::new("storage", LIMIT);
        drop(places(&pool, &[1 << 20]).unwrap());
        let idle = pool.memory_stats().idle_bytes;
        assert!(idle > 1 << 20);
        pool.trim();
        assert_eq!(pool.memory_stats().idle_bytes, idle, "it was in use just now");
        pool.trim();
        assert_eq!(pool.memory_stats().idle_bytes, 0);
    }

    #[test]
    fn memory_of_one_large_step_is_freed_though_small_ones_follow() {
        let pool = SlabPool::new("storage", LIMIT);
        drop(places(&pool, &[1 << 20, 1 << 20, 1 << 20]).unwrap());
        pool.trim();
        for _ in 0..2 {
            for _ in 0..3 {
                drop(places(&pool, &[1 << 20]).unwrap());
            }
            pool.trim();
        }
        let idle = pool.memory_stats().idle_bytes;
        assert!(idle > 1 << 20 && idle < 2 << 20, "what the small ones use again stays: {idle}");
    }

    #[test]
    fn small_ones_share_a_slab_and_large_ones_have_one_each() {
        let pool = SlabPool::new("storage", 1 << 30);
        let first = places(&pool, &[100, 3 << 20, 200, 300 << 10]).unwrap();
        let is_one = |a: &SlabRange, b: &SlabRange| Arc::ptr_eq(&a.slab, &b.slab);
        assert!(is_one(&first[0], &first[2]) && !is_one(&first[0], &first[1]) && !is_one(&first[1], &first[3]));
        assert_eq!((first[0].offset, first[2].offset % 64), (0, 0));
        // A later allocation goes into the space that is left.
        let later = places(&pool, &[50]).unwrap();
        assert!(is_one(&first[0], &later[0]) && later[0].offset >= first[2].offset + 200);
        // Many small ones take few slabs.
        let many = places(&pool, &vec![10_000; 20_000]).unwrap();
        let mut slabs: Vec<_> = many.iter().map(|place| Arc::as_ptr(&place.slab)).collect();
        slabs.dedup();
        assert!(slabs.len() < 12, "{}", slabs.len());
        assert!(pool.memory_stats().used_bytes < 20_000 * 10_048 + (20 << 20));
    }

    #[test]
    fn tensors_of_one_slab_do_not_overlap() {
        let pool = SlabPool::new("storage", 1 << 30);
        let sizes: Vec<u64> = (1..600).map(|index| index * 97 % 5000 + 1).collect();
        let mut ranges: Vec<_> = places(&pool, &sizes)
            .unwrap()
            .iter()
            .zip(&sizes)
            .map(|(place, size)| {
                assert_eq!(place.len, *size);
                (place.start().addr(), place.start().addr() + place.len as usize)
            })
            .collect();
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
    }

    #[test]
    fn a_limit_is_reached_to_the_page_by_fresh_memory_and_by_used() {
        let pool = SlabPool::new("storage", LIMIT);
        // Of what is kept, the larger ones are no better than fresh ones where each byte counts.
        drop(places(&pool, &[2_200_000]).unwrap());
        let all: Vec<_> = (0..4).map(|_| places(&pool, &[2_000_000]).unwrap()).collect();
        let memory = pool.memory_stats();
        assert!(memory.used_bytes + memory.idle_bytes <= LIMIT, "{memory:?}");
        assert!(matches!(places(&pool, &[2_000_000]), Err(StoreError::Full { .. })));
        drop(all);
        assert_eq!(pool.memory_stats().used_bytes, 0);
        assert!(pool.memory_stats().idle_bytes <= LIMIT);
    }

    #[test]
    fn unusable_idle_memory_is_freed_before_fresh_memory_is_made() {
        let pool = SlabPool::new("storage", LIMIT);
        drop(places(&pool, &[3 << 20]).unwrap());
        let _larger = places(&pool, &[6 << 20]).unwrap();
        let most = pool.arena.stats().peak_bytes as u64;
        assert!(most <= LIMIT, "{most}");
    }

    #[test]
    fn the_high_water_mark_is_the_most_that_was_ever_in_use() {
        let pool = SlabPool::new("storage", LIMIT);
        let used_and_highest = || (pool.memory_stats().used_bytes, pool.memory_stats().high_water_bytes);
        assert_eq!(used_and_highest(), (0, 0));
        let first = places(&pool, &[1 << 20]).unwrap();
        let (one, highest) = used_and_highest();
        assert!(one > 1 << 20 && highest == one);
        let second = places(&pool, &[1 << 20]).unwrap();
        assert_eq!(used_and_highest(), (2 * one, 2 * one));
        drop((first, second));
        assert_eq!(used_and_highest(), (0, 2 * one), "it stays");
        drop(places(&pool, &[1 << 20]).unwrap());
        assert_eq!(used_and_highest(), (0, 2 * one), "until more is in use");
    }

    #[test]
    fn a_slab_that_is_larger_than_was_asked_for_counts_whole_in_the_high_water_mark() {
        let pool = SlabPool::new("storage", LIMIT);
        drop(places(&pool, &[2_200_000]).unwrap());
        let _other = places(&pool, &[1 << 20]).unwrap();
        let larger = pool.memory_stats().idle_bytes;
        let before = pool.memory_stats();
        let _reused = places(&pool, &[2_000_000]).unwrap();
        let after = pool.memory_stats();
        assert_eq!(
            (after.idle_bytes, after.used_bytes),
            (0, before.used_bytes + larger),
            "the kept one was used again"
        );
        assert_eq!(after.high_water_bytes, after.used_bytes);
    }
}

//! Keeps segments that were given back for the next use: fresh pages cost fifteen to twenty times a copy into used
//! ones.
//!
//! Invariants:
//!
//! 1. A segment is used again only when no reader is expected any more, and no view of it lives in any
//!    process.
//! 2. Kept segments, idle or with a living view, are bounded in bytes and in number; the oldest is dropped
//!    first. A segment that waits for its reader is never dropped.
//! 3. The process that made an arena uses it. A child made by `fork` drops what it inherited, and changes none of it.
//! 4. The lock is never held while memory is reserved or freed, which takes milliseconds a gigabyte.

use std::collections::VecDeque;
use std::process;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::ShmError;
use crate::memory::{CheckCancelled, DATA_START, Writers};
use crate::memory_limits;
use crate::process::PerProcess;
use crate::segment::Segment;
use crate::segment::attachment;

/// Segments that are kept at most: each takes a descriptor, and many systems allow a process 1024.
const MAX_KEPT: usize = 128;

/// A kept slab serves a request that is smaller by at most one part in so many.
const SLACK_OF_SLABS: usize = 4;

/// An arena keeps this part of the memory by default.
const PART_OF_MEMORY: u64 = 16;

/// Sizes of messages are rounded up to one of so many sizes between two powers of two.
const CLASSES: usize = 8;

/// The smallest segment of a message, so that small messages use each other's segments.
const SMALLEST_MESSAGE: usize = 64 << 10;

static ARRAYS: PerProcess<Arena> = PerProcess::new(|| Arena::new(ArenaPurpose::Arrays, default_limit()));

/// Bytes that an arena keeps by default: a sixteenth of the memory that the process can have.
pub fn default_limit() -> usize {
    memory_limits::total().map_or(1 << 30, |total| usize::try_from(total / PART_OF_MEMORY).unwrap_or(usize::MAX))
}

/// The use of an arena's segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArenaPurpose {
    /// Written by their owner alone and read by many; they take hardly more than their data.
    Arrays,
    /// Written by their owner, then by their one receiver; of any sizes.
    Messages,
    /// Used like arrays, with sizes that vary from one use to the next: a kept segment may be larger than needed.
    Slabs,
}

/// Bytes of an arena's segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaStats {
    /// In use, or sent to a reader that has not opened them.
    pub in_use_bytes: usize,
    /// Given back, and kept for the next use.
    pub cached_bytes: usize,
    /// Given back while a view of them lived, and kept until the view ends.
    pub escaped_bytes: usize,
    /// The most that all of them ever were together; in the arena of arrays with the attached bytes of other processes.
    pub peak_bytes: usize,
}

impl ArenaStats {
    /// The counts as one flat record of names and values.
    pub fn record(&self) -> [(&'static str, usize); 4] {
        [
            ("in_use_bytes", self.in_use_bytes),
            ("cached_bytes", self.cached_bytes),
            ("escaped_bytes", self.escaped_bytes),
            ("peak_bytes", self.peak_bytes),
        ]
    }
}

/// The shared memory that arrays of this process take, those of others among it, as one flat record.
pub fn array_stats() -> [(&'static str, usize); 4] {
    let mut record = Arena::of_arrays().stats().record();
    let in_use_bytes = record[0].1;
    record[0] = ("mapped_bytes", in_use_bytes + attachment::attached_bytes());
    record
}

/// Counts a new attachment to another process's array in the peak.
pub fn count_attached() {
    Arena::of_arrays().lock().update_peak();
}

/// Segments for one use, by one process.
#[derive(Debug)]
pub struct Arena {
    purpose: ArenaPurpose,
    process: u32,
    state: Mutex<State>,
}

/// Bytes of a named array, which is not in the arena; they count as in use as long as this lives.
#[derive(Debug)]
pub struct CountedBytes {
    process: u32,
    bytes: usize,
}

impl CountedBytes {
    /// Adds `bytes` to the statistics of the arena of arrays.
    pub fn new(bytes: usize) -> Self {
        let mut state = Arena::of_arrays().lock();
        state.stats.in_use_bytes += bytes;
        state.update_peak();
        CountedBytes { process: process::id(), bytes }
    }
}

impl Drop for CountedBytes {
    fn drop(&mut self) {
        // A child made by `fork` counts nothing that its parent made.
        if self.process == process::id() {
            Arena::of_arrays().lock().stats.in_use_bytes -= self.bytes;
        }
    }
}

#[derive(Debug, Default)]
struct State {
    limit: usize,
    /// Whether escaped segments are dropped if too many are kept, or memory is missing for a new one.
    forgets_escaped: bool,
    /// Whether the peak counts what this process has attached to.
    counts_attached: bool,
    /// Nobody uses them; the one that was used last is at the end.
    idle: VecDeque<Segment>,
    /// Given back by their owner before their reader has opened them.
    sent: VecDeque<Segment>,
    /// Given back while a view of them lives.
    escaped: VecDeque<Segment>,
    stats: ArenaStats,
}

impl Arena {
    /// An arena that keeps up to `limit` bytes.
    pub fn new(purpose: ArenaPurpose, limit: usize) -> Self {
        // Slabs that others still read count against their owner's limit, so none of them is forgotten.
        let forgets_escaped = purpose != ArenaPurpose::Slabs;
        let counts_attached = purpose == ArenaPurpose::Arrays;
        let state = State { limit, forgets_escaped, counts_attached, ..State::default() };
        Arena { purpose, process: process::id(), state: Mutex::new(state) }
    }

    /// The arena of this process's arrays.
    pub fn of_arrays() -> &'static Arena {
        ARRAYS.get()
    }

    /// In a child made by `fork`: drops the segments that the parent's arena of arrays kept.
    pub fn forget_inherited() {
        if let Some(inherited) = ARRAYS.inherited() {
            inherited.forget();
        }
    }

    /// In a child made by `fork`: drops the segments that the parent's arena kept.
    pub fn forget(&self) {
        // If a thread of the parent held the lock, the state may be half-changed.
        if self.process != process::id()
            && let Ok(mut state) = self.state.try_lock()
        {
            let forgotten = std::mem::take(&mut *state);
            drop(forgotten);
        }
    }

    /// Returns a segment with room for `len` bytes, kept or fresh. The bytes of a kept one are not defined.
    ///
    /// # Errors
    /// [`ShmError::NoHeadroom`] where no more memory is left, [`ShmError::Io`] where the kernel refuses, and
    /// [`ShmError::Invalid`] in a child of the process that made the arena.
    pub fn take(&self, len: usize, check_cancelled: CheckCancelled<'_>) -> Result<Segment, ShmError> {
        if self.process != process::id() {
            let reason = "an arena belongs to the process that made it; make one after the fork";
            return Err(ShmError::Invalid(reason.to_owned()));
        }
        if let Some(kept) = self.take_kept(len) {
            return Ok(kept);
        }
        let segment = self.make(len, check_cancelled)?;
        self.lock().count_in(&segment);
        Ok(segment)
    }

    /// Like [`take`](Self::take), but never makes a segment; `None` if no kept one fits `len` bytes.
    pub fn take_kept(&self, len: usize) -> Option<Segment> {
        if self.process != process::id() {
            return None;
        }
        let mut state = self.lock();
        let (found, released) = state.find(self.purpose, len);
        found.iter().for_each(|segment| state.count_in(segment));
        drop(state);
        drop(released);
        found
    }

    fn make(&self, len: usize, check_cancelled: CheckCancelled<'_>) -> Result<Segment, ShmError> {
        let (capacity, writers) = match self.purpose {
            ArenaPurpose::Arrays => (len, Writers::Present),
            // Others do not write to slabs, but the kernel empties no segment that is sealed against writing.
            ArenaPurpose::Slabs => (len, Writers::All),
            ArenaPurpose::Messages => (rounded(len), Writers::All),
        };
        let made = Segment::create(capacity, writers, check_cancelled);
        let mut segment = match made {
            // Kept segments may have the memory or descriptors that are missing.
            Err(ShmError::NoHeadroom { .. } | ShmError::Io { .. }) if self.drop_kept() > 0 => {
                Segment::create(capacity, writers, check_cancelled)?
            }
            made => made?,
        };
        if self.purpose == ArenaPurpose::Messages {
            segment.seal()?;
            segment.populate(segment.capacity());
        }
        Ok(segment)
    }

    /// Takes back a segment that no further reader will attach to.
    pub fn give_back(&self, segment: Segment) {
        self.take_back(segment, |state, mut segment| {
            if segment.reclaim() {
                state.keep(segment);
            } else {
                state.let_escape(segment);
            }
        });
    }

    /// Takes back a segment that was sent: it is used again after its receiver has opened and dropped it.
    pub fn give_sent(&self, mut segment: Segment) {
        segment.mark_sent();
        self.take_back(segment, |state, segment| {
            state.stats.in_use_bytes += segment.size();
            state.sent.push_back(segment);
        });
    }

    fn take_back(&self, segment: Segment, place: impl FnOnce(&mut State, Segment)) {
        if self.process != process::id() {
            // A child of the process that made the arena: a thread of the parent may hold the lock.
            return;
        }
        let mut state = self.lock();
        state.stats.in_use_bytes -= segment.size();
        place(&mut state, segment);
        let released = state.release_surplus();
        drop(state);
        drop(released);
    }

    /// Keeps up to `limit` bytes from here on.
    pub fn set_limit(&self, limit: usize) {
        let mut state = self.lock();
        state.limit = limit;
        let released = state.release_surplus();
        drop(state);
        drop(released);
    }

    /// Drops idle segments, the oldest first, until they have at most `most` bytes.
    pub fn trim(&self, most: usize) {
        let mut released = Vec::new();
        let mut state = self.lock();
        while state.stats.cached_bytes > most
            && let Some(oldest) = state.idle.pop_front()
        {
            state.stats.cached_bytes -= oldest.size();
            released.push(oldest);
        }
        drop(state);
        drop(released);
    }

    /// Drops all idle segments, and escaped ones if they may be forgotten. Returns their number.
    fn drop_kept(&self) -> usize {
        let mut state = self.lock();
        let mut released = std::mem::take(&mut state.idle);
        state.stats.cached_bytes = 0;
        if state.forgets_escaped {
            released.append(&mut state.escaped);
            state.stats.escaped_bytes = 0;
        }
        drop(state);
        released.len()
    }

    /// Returns the bytes at the last update: views of some escaped segments may have ended since.
    pub fn last_stats(&self) -> ArenaStats {
        self.lock().stats
    }

    /// Returns the bytes, after checking which views have ended.
    pub fn stats(&self) -> ArenaStats {
        let mut state = self.lock();
        state.settle();
        let released = state.release_surplus();
        let stats = state.stats;
        drop(state);
        drop(released);
        stats
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// A kept segment for `len` bytes, and segments that are to be dropped without the lock.
    fn find(&mut self, purpose: ArenaPurpose, len: usize) -> (Option<Segment>, Vec<Segment>) {
        let mut found = self.take_idle(purpose, len);
        if found.is_none() {
            self.settle();
            found = self.take_idle(purpose, len);
        }
        (found, self.release_surplus())
    }

    /// Takes the smallest idle segment that fits; of several the one that was used last, which is warm.
    fn take_idle(&mut self, purpose: ArenaPurpose, len: usize) -> Option<Segment> {
        let most = DATA_START + largest_for(purpose, len);
        let fits = |segment: &&Segment| segment.capacity() >= len && segment.size() <= most;
        let newest_first = self.idle.iter().rev().filter(fits);
        let wanted = newest_first.min_by_key(|segment| segment.size())?.address().identity;
        let place = self.idle.iter().position(|segment| segment.address().identity == wanted)?;
        let segment = self.idle.remove(place)?;
        self.stats.cached_bytes -= segment.size();
        Some(segment)
    }

    /// Checks which receivers have opened their segments, and which views have ended.
    fn settle(&mut self) {
        for segment in std::mem::take(&mut self.sent) {
            if segment.is_acknowledged() {
                self.stats.in_use_bytes -= segment.size();
                self.let_escape(segment);
            } else {
                self.sent.push_back(segment);
            }
        }
        for mut segment in std::mem::take(&mut self.escaped) {
            self.stats.escaped_bytes -= segment.size();
            if segment.reclaim() {
                self.keep(segment);
            } else {
                self.let_escape(segment);
            }
        }
    }

    fn keep(&mut self, segment: Segment) {
        self.stats.cached_bytes += segment.size();
        self.idle.push_back(segment);
    }

    fn let_escape(&mut self, segment: Segment) {
        self.stats.escaped_bytes += segment.size();
        self.escaped.push_back(segment);
    }

    /// Takes out segments until the limits are kept: first one that alone is too large, then the oldest.
    fn release_surplus(&mut self) -> Vec<Segment> {
        let mut released = Vec::new();
        while self.stats.cached_bytes + self.stats.escaped_bytes > self.limit
            || self.idle.len() + if self.forgets_escaped { self.escaped.len() } else { 0 } > MAX_KEPT
        {
            let Some((segment, bytes)) = self.take_next_to_drop() else { break };
            *bytes -= segment.size();
            released.push(segment);
        }
        released
    }

    /// Takes out the segment that goes first; returns it with the count that it was part of.
    fn take_next_to_drop(&mut self) -> Option<(Segment, &mut usize)> {
        let limit = self.limit;
        let is_too_large = |segment: &Segment| segment.size() > limit;
        if let Some(place) = self.idle.iter().position(is_too_large) {
            return Some((self.idle.remove(place)?, &mut self.stats.cached_bytes));
        }
        if let Some(place) = self.escaped.iter().position(is_too_large) {
            return Some((self.escaped.remove(place)?, &mut self.stats.escaped_bytes));
        }
        if let Some(oldest) = self.idle.pop_front() {
            return Some((oldest, &mut self.stats.cached_bytes));
        }
        Some((self.escaped.pop_front()?, &mut self.stats.escaped_bytes))
    }

    fn count_in(&mut self, segment: &Segment) {
        self.stats.in_use_bytes += segment.size();
        self.update_peak();
    }

    fn update_peak(&mut self) {
        let ArenaStats { in_use_bytes, cached_bytes, escaped_bytes, peak_bytes } = self.stats;
        let attached_bytes = if self.counts_attached { attachment::attached_bytes() } else { 0 };
        self.stats.peak_bytes = peak_bytes.max(in_use_bytes + cached_bytes + escaped_bytes + attached_bytes);
    }
}

/// The room that a message of `len` bytes gets.
fn rounded(len: usize) -> usize {
    let unit = (len.max(SMALLEST_MESSAGE).next_power_of_two() / 2 / CLASSES).max(DATA_START);
    // A size larger than any memory is refused when the segment is made.
    len.max(SMALLEST_MESSAGE).checked_next_multiple_of(unit).unwrap_or(len)
}

/// The largest segment that is not wasted on `len` bytes.
fn largest_for(purpose: ArenaPurpose, len: usize) -> usize {
    match purpose {
        ArenaPurpose::Arrays => len.saturating_add(len / 32).saturating_add(rustix::param::page_size()),
        ArenaPurpose::Messages => rounded(len).saturating_mul(2),
        ArenaPurpose::Slabs => len.saturating_add(len / SLACK_OF_SLABS).saturating_add(rustix::param::page_size()),
    }
}

#[cfg(test)]
mod tests;

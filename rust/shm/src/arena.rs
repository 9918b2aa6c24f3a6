//! Keeps segments that were given back for the next use: fresh pages cost fifteen to twenty times a copy into used
//! ones.
//!
//! Invariants:
//!
//! 1. A segment is used again only when its last reader came, or none is to come, and no view of it lives in any
//!    process.
//! 2. Segments that are kept, idle or with a view alive somewhere, are bounded in bytes and in number; the oldest goes
//!    first. A segment whose reader is still to come is never dropped.
//! 3. The process that made an arena uses it. A child made by `fork` drops what it inherited, and changes none of it.
//! 4. The lock is never held while memory is reserved or freed, which takes milliseconds a gigabyte.

use std::collections::VecDeque;
use std::process;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::ShmError;
use crate::memory_file::{DATA_START, GoOn, Writers};
use crate::memory_limits;
use crate::per_process::PerProcess;
use crate::segment::Segment;

/// Segments that are kept at most: each takes a descriptor, of which many systems allow a process 1024.
const MOST_KEPT: usize = 128;

/// A slab that is kept is used for what is smaller by up to one part in so many.
const SLACK_OF_SLABS: usize = 4;

/// An arena keeps this part of the memory by default.
const PART_OF_MEMORY: u64 = 16;

/// Sizes of messages are rounded up to one of so many between two powers of two.
const CLASSES: usize = 8;

/// No message takes less, so that small ones of any sizes find each other's segments.
const SMALLEST_MESSAGE: usize = 64 << 10;

static ARRAYS: PerProcess<Arena> = PerProcess::new(|| Arena::new(Use::Arrays, default_limit()));

/// Bytes that an arena keeps where nobody says another number: a sixteenth of the memory that the process can have.
pub fn default_limit() -> usize {
    memory_limits::total().map_or(1 << 30, |total| usize::try_from(total / PART_OF_MEMORY).unwrap_or(usize::MAX))
}

/// What an arena's segments are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Written by their owner alone and read by many; they take hardly more than their data.
    Arrays,
    /// Written by their owner and then by the one who receives them, of any sizes, one after the other.
    Messages,
    /// As arrays, of sizes that vary from one use to the next; what a kept one has too much is there already.
    Slabs,
}

/// Bytes of an arena's segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaStats {
    /// In use, or sent to a reader that is still to come.
    pub in_use: usize,
    /// Given back, and kept for the next use.
    pub cached: usize,
    /// Given back while a view of them lived somewhere, and kept until that ends.
    pub escaped: usize,
    /// The most that all of them ever were together.
    pub peak: usize,
}

/// Segments for one use, by one process.
#[derive(Debug)]
pub struct Arena {
    purpose: Use,
    process: u32,
    state: Mutex<State>,
}

/// Bytes in use by arrays of this process that the arena has not, as those with a name; counted as long as it lives.
#[derive(Debug)]
pub struct Counted {
    process: u32,
    bytes: usize,
}

impl Counted {
    /// Counts `bytes` among those of the arena of arrays.
    pub fn new(bytes: usize) -> Self {
        let mut state = Arena::of_arrays().lock();
        state.stats.in_use += bytes;
        state.saw_peak();
        Counted { process: process::id(), bytes }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        // A child made by `fork` counts nothing that its parent made.
        if self.process == process::id() {
            Arena::of_arrays().lock().stats.in_use -= self.bytes;
        }
    }
}

#[derive(Debug, Default)]
struct State {
    limit: usize,
    /// Whether what has escaped is let go of where too many segments are kept, or something is missing for a new one.
    forgets_escaped: bool,
    /// Nobody uses them; the one that was used last is at the end.
    idle: VecDeque<Segment>,
    /// Given back by their owner, with a reader to come.
    sent: VecDeque<Segment>,
    /// Given back, with a view alive somewhere.
    escaped: VecDeque<Segment>,
    stats: ArenaStats,
}

impl Arena {
    /// An arena that keeps up to `limit` bytes.
    pub fn new(purpose: Use, limit: usize) -> Self {
        // Bytes that others still look at count against the limits of anyone who has slabs: none of those is forgotten.
        let forgets_escaped = purpose != Use::Slabs;
        let state = State { limit, forgets_escaped, ..State::default() };
        Arena { purpose, process: process::id(), state: Mutex::new(state) }
    }

    /// That of this process's arrays.
    pub fn of_arrays() -> &'static Arena {
        ARRAYS.get()
    }

    /// Lets go of what the arena of the parent's arrays kept at the fork, and would keep alive here. For a child.
    pub fn forget_inherited() {
        if let Some(inherited) = ARRAYS.inherited() {
            inherited.forget();
        }
    }

    /// Lets go of what it kept at the fork, and would keep alive here. For a child of the process that made it.
    pub fn forget(&self) {
        // Where a thread of the parent was at it there is nothing to be trusted.
        if self.process != process::id()
            && let Ok(mut state) = self.state.try_lock()
        {
            let forgotten = std::mem::take(&mut *state);
            drop(forgotten);
        }
    }

    /// A segment with room for `len` bytes, kept or fresh. What lies in a kept one is not defined.
    ///
    /// # Errors
    /// [`ShmError::NoHeadroom`] where no more memory is left, [`ShmError::Io`] where the kernel refuses, and
    /// [`ShmError::Invalid`] in a child of the process that made the arena.
    pub fn take(&self, len: usize, huge: bool, go_on: GoOn<'_>) -> Result<Segment, ShmError> {
        if self.process != process::id() {
            let reason = "an arena belongs to the process that made it; make one after the fork";
            return Err(ShmError::Invalid(reason.to_owned()));
        }
        if let Some(kept) = self.take_kept(len, huge) {
            return Ok(kept);
        }
        let segment = self.make(len, huge, go_on)?;
        self.lock().count_in(&segment);
        Ok(segment)
    }

    /// As [`take`](Self::take), of those that are kept alone; `None` where none is of use for `len` bytes.
    pub fn take_kept(&self, len: usize, huge: bool) -> Option<Segment> {
        if self.process != process::id() {
            return None;
        }
        let mut state = self.lock();
        let (found, released) = state.find(self.purpose, len, huge);
        found.iter().for_each(|segment| state.count_in(segment));
        drop(state);
        drop(released);
        found
    }

    fn make(&self, len: usize, huge: bool, go_on: GoOn<'_>) -> Result<Segment, ShmError> {
        let (capacity, writers) = match self.purpose {
            Use::Arrays => (len, Writers::Present),
            // Not for others to write to: the kernel empties no segment that is sealed against that.
            Use::Slabs => (len, Writers::All),
            Use::Messages => (rounded(len), Writers::All),
        };
        let made = Segment::create(capacity, writers, huge, go_on);
        let mut segment = match made {
            // What is kept may be what is missing: memory, descriptors, huge pages.
            Err(ShmError::NoHeadroom { .. } | ShmError::Io { .. }) if self.let_go() > 0 => {
                Segment::create(capacity, writers, huge, go_on)?
            }
            made => made?,
        };
        if self.purpose == Use::Messages {
            segment.seal()?;
            segment.populate(segment.capacity());
        }
        Ok(segment)
    }

    /// Takes back a segment for which no reader is to come any more.
    pub fn give_back(&self, segment: Segment) {
        self.take_back(segment, |state, mut segment| {
            if segment.reclaim() {
                state.keep(segment);
            } else {
                state.let_escape(segment);
            }
        });
    }

    /// Takes back a segment that was sent: it is used again when its reader has come, and gone.
    pub fn give_sent(&self, mut segment: Segment) {
        segment.send();
        self.take_back(segment, |state, segment| {
            state.stats.in_use += segment.size();
            state.sent.push_back(segment);
        });
    }

    fn take_back(&self, segment: Segment, place: impl FnOnce(&mut State, Segment)) {
        if self.process != process::id() {
            // The parent's, and its lock may be held by a thread that this process does not have.
            return;
        }
        let mut state = self.lock();
        state.stats.in_use -= segment.size();
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

    /// Lets go of what is idle, the oldest first, until no more than `most` bytes are.
    pub fn trim(&self, most: usize) {
        let mut released = Vec::new();
        let mut state = self.lock();
        while state.stats.cached > most
            && let Some(oldest) = state.idle.pop_front()
        {
            state.stats.cached -= oldest.size();
            released.push(oldest);
        }
        drop(state);
        drop(released);
    }

    /// Lets go of what is idle, and, where that may be forgotten, of what has a view somewhere, which takes descriptors
    /// and addresses here; returns how many segments.
    fn let_go(&self) -> usize {
        let mut state = self.lock();
        let mut released = std::mem::take(&mut state.idle);
        state.stats.cached = 0;
        if state.forgets_escaped {
            released.append(&mut state.escaped);
            state.stats.escaped = 0;
        }
        drop(state);
        released.len()
    }

    /// Bytes, as they were last looked at: some of what counts as escaped may have ended.
    pub fn last_stats(&self) -> ArenaStats {
        self.lock().stats
    }

    /// Bytes, after a look at whose views have ended.
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
    /// A kept segment for `len` bytes, and what has to be let go of without the lock.
    fn find(&mut self, purpose: Use, len: usize, huge: bool) -> (Option<Segment>, Vec<Segment>) {
        let mut found = self.cut(purpose, len, huge);
        if found.is_none() {
            self.settle();
            found = self.cut(purpose, len, huge);
        }
        (found, self.release_surplus())
    }

    /// Takes the smallest idle segment that fits; of several the one that was used last, which is warm.
    fn cut(&mut self, purpose: Use, len: usize, huge: bool) -> Option<Segment> {
        let most = DATA_START + largest_for(purpose, len);
        let fits = |segment: &&Segment| {
            segment.capacity() >= len && (huge || segment.size() <= most) && segment.is_huge() == huge
        };
        let newest_first = self.idle.iter().rev().filter(fits);
        let wanted = newest_first.min_by_key(|segment| segment.size())?.address().identity;
        let place = self.idle.iter().position(|segment| segment.address().identity == wanted)?;
        let segment = self.idle.remove(place)?;
        self.stats.cached -= segment.size();
        Some(segment)
    }

    /// Looks whose readers have come, and whose views have ended.
    fn settle(&mut self) {
        for segment in std::mem::take(&mut self.sent) {
            if segment.is_acknowledged() {
                self.stats.in_use -= segment.size();
                self.let_escape(segment);
            } else {
                self.sent.push_back(segment);
            }
        }
        for mut segment in std::mem::take(&mut self.escaped) {
            self.stats.escaped -= segment.size();
            if segment.reclaim() {
                self.keep(segment);
            } else {
                self.let_escape(segment);
            }
        }
    }

    fn keep(&mut self, segment: Segment) {
        self.stats.cached += segment.size();
        self.idle.push_back(segment);
    }

    fn let_escape(&mut self, segment: Segment) {
        self.stats.escaped += segment.size();
        self.escaped.push_back(segment);
    }

    /// What has to go so that no more is kept than may be: first what alone is too large, then the oldest.
    fn release_surplus(&mut self) -> Vec<Segment> {
        let mut released = Vec::new();
        while self.stats.cached + self.stats.escaped > self.limit
            || self.idle.len() + if self.forgets_escaped { self.escaped.len() } else { 0 } > MOST_KEPT
        {
            let Some((segment, bytes)) = self.least_wanted() else { break };
            *bytes -= segment.size();
            released.push(segment);
        }
        released
    }

    /// Takes off the lists what goes first, and says which count it was part of.
    fn least_wanted(&mut self) -> Option<(Segment, &mut usize)> {
        let limit = self.limit;
        let is_too_large = |segment: &Segment| segment.size() > limit;
        if let Some(place) = self.idle.iter().position(is_too_large) {
            return Some((self.idle.remove(place)?, &mut self.stats.cached));
        }
        if let Some(place) = self.escaped.iter().position(is_too_large) {
            return Some((self.escaped.remove(place)?, &mut self.stats.escaped));
        }
        if let Some(oldest) = self.idle.pop_front() {
            return Some((oldest, &mut self.stats.cached));
        }
        Some((self.escaped.pop_front()?, &mut self.stats.escaped))
    }

    fn count_in(&mut self, segment: &Segment) {
        self.stats.in_use += segment.size();
        self.saw_peak();
    }

    fn saw_peak(&mut self) {
        let ArenaStats { in_use, cached, escaped, peak } = self.stats;
        self.stats.peak = peak.max(in_use + cached + escaped);
    }
}

/// The room that a message of `len` bytes gets.
fn rounded(len: usize) -> usize {
    let unit = (len.max(SMALLEST_MESSAGE).next_power_of_two() / 2 / CLASSES).max(DATA_START);
    // What is larger than any memory is refused when it is made.
    len.max(SMALLEST_MESSAGE).checked_next_multiple_of(unit).unwrap_or(len)
}

/// The largest segment that is not wasted on `len` bytes.
fn largest_for(purpose: Use, len: usize) -> usize {
    match purpose {
        Use::Arrays => len.saturating_add(len / 32).saturating_add(rustix::param::page_size()),
        Use::Messages => rounded(len).saturating_mul(2),
        Use::Slabs => len.saturating_add(len / SLACK_OF_SLABS).saturating_add(rustix::param::page_size()),
    }
}

#[cfg(test)]
mod tests;

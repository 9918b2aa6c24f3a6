//! Shared votes: processes of one node agree within microseconds, as long as none of them fails.
//!
//! A [`SharedVotes`] is sealed memory without a name that all members map. In each round every member casts a vote. The
//! round succeeds once all votes are there and equal. It is deferred if a member gives up waiting or casts another
//! vote: the members then decide it in another way. The rules are in `protocol`.
#![allow(unsafe_code)]

mod protocol;

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::OFlags;

pub use self::protocol::RoundState;
use self::protocol::{MAX_MEMBERS, VOTE_WORDS, VoteWords};
use crate::error::ShmError;
use crate::memory::mapping::{Access, Mapping};
use crate::memory::memory_file::{self, Writers};
use crate::process::futex;
use crate::segment::header;
use crate::task_queue::{SpinHistory, TimeLimit, atomic};

/// The first word; its last byte is the version of this layout.
const MAGIC: u64 = u64::from_le_bytes(*b"tundivt\x01");

// Offsets of the words. The words that all members change have a cache line of their own.
const AT_MAGIC: usize = 0;
const AT_IDENTITY: usize = 8;
const AT_MEMBERS: usize = 16;
const AT_NEWEST: usize = 64;
const AT_LAST_SUCCESS: usize = 72;
const AT_WAKE_WORD: usize = 80;
const AT_SLOTS: usize = 128;
/// Bytes of a member's slot: whether it has joined, then its vote.
const SLOT: usize = 64;
const VOTE_IN_SLOT: usize = 8;

/// Where another process finds the memory: the process that made it, its descriptor there, and a random identity.
pub type MemoryAddress = (u32, i32, u64);

/// The memory in which the members vote, as one of them maps it.
#[derive(Debug)]
pub struct SharedVotes {
    map: Mapping,
    members: usize,
    identity: u64,
    /// The descriptor of the process that made it, until all have joined.
    memory: Mutex<Option<OwnedFd>>,
    have_all_joined: AtomicBool,
    spin: SpinHistory,
}

impl SharedVotes {
    /// Create the memory for so many members.
    ///
    /// # Errors
    /// [`ShmError::Invalid`] for 0 or too many members, [`ShmError::Io`] where the system makes no such memory.
    pub fn create(members: usize) -> Result<Self, ShmError> {
        let size = size_for(members)?;
        let memory = memory_file::create()?;
        memory_file::reserve(memory.as_fd(), size, Writers::All, &mut || Ok(()))?;
        memory_file::seal(memory.as_fd(), Writers::All)?;
        let identity = header::random_identity("a shared vote")?;
        let map = Mapping::new(&memory, size, Access::Write)?;
        map.word(AT_IDENTITY).store(identity, Ordering::Relaxed);
        map.word(AT_MEMBERS).store(members as u64, Ordering::Relaxed);
        map.word(AT_MAGIC).store(MAGIC, Ordering::Release);
        Ok(Self::over(map, members, identity, Some(memory)))
    }

    /// Map the memory at `address`, made for so many members.
    ///
    /// # Errors
    /// [`ShmError::NotASegment`] where something else is at the address by now, [`ShmError::Io`] where its maker is
    /// dead or refuses this process.
    pub fn open((maker, descriptor, identity): MemoryAddress, members: usize) -> Result<Self, ShmError> {
        let size = size_for(members)?;
        let memory = memory_file::open_of(maker, descriptor, OFlags::RDWR)?;
        let refuse = |reason: &str| ShmError::NotASegment {
            segment: format!("the shared votes of process {maker}"),
            reason: reason.to_owned(),
        };
        if !memory_file::keeps_its_length(memory.as_fd()) || memory_file::status(memory.as_fd())?.st_size != size as i64
        {
            return Err(refuse("it is not sealed, or has another length"));
        }
        let map = Mapping::new(&memory, size, Access::Write)?;
        let found = [AT_MAGIC, AT_IDENTITY, AT_MEMBERS].map(|at| map.word(at).load(Ordering::Acquire));
        if found != [MAGIC, identity, members as u64] {
            return Err(refuse("it belongs to other votes"));
        }
        Ok(Self::over(map, members, identity, None))
    }

    fn over(map: Mapping, members: usize, identity: u64, memory: Option<OwnedFd>) -> Self {
        SharedVotes {
            map,
            members,
            identity,
            memory: Mutex::new(memory),
            have_all_joined: AtomicBool::new(false),
            spin: SpinHistory::default(),
        }
    }

    /// Where others find it; `None` if it was opened here, or all have joined.
    pub fn address(&self) -> Option<MemoryAddress> {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.as_ref().map(|memory| (process::id(), memory.as_raw_fd(), self.identity))
    }

    /// Say that `member` will vote here; once.
    ///
    /// # Panics
    /// When there is no such member, as in all methods below.
    pub fn join(&self, member: usize) {
        self.has_joined(member).store(1, Ordering::Release);
    }

    /// Whether all members have joined.
    pub fn have_all_joined(&self) -> bool {
        if !self.have_all_joined.load(Ordering::Relaxed) {
            if !(0..self.members).all(|member| self.has_joined(member).load(Ordering::Acquire) == 1) {
                return false;
            }
            self.have_all_joined.store(true, Ordering::Relaxed);
            // No other process opens it any more.
            *self.memory.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
        true
    }

    /// Cast the vote of `member` in round `number`, counted from zero; once.
    pub fn cast(&self, member: usize, number: u64, shared_vote: [u64; VOTE_WORDS]) -> RoundState {
        protocol::cast(self, member, number + 1, &shared_vote)
    }

    /// Wait until round `number`, in which this member cast its vote, is decided, or for `longest`.
    ///
    /// Give some tens of milliseconds: a member that decides the round may be killed before it wakes the others.
    pub fn wait(&self, number: u64, longest: Duration) -> RoundState {
        let mut goes_on = || true;
        let limit = TimeLimit::new(Some(longest), None, &mut goes_on);
        let started = self.spin.begin();
        self.spin.spin_until(&started, &limit, || protocol::state_of(self, number + 1) != RoundState::Open);
        let state = loop {
            let seen = self.wake_word().load(Ordering::Acquire);
            let state = protocol::state_of(self, number + 1);
            if state != RoundState::Open || limit.is_over() {
                break state;
            }
            futex::sleep(self.wake_word(), seen, limit.next_sleep());
        };
        self.spin.end(&started);
        state
    }

    /// Defer round `number` unless it is decided. Never returns that it is open.
    pub fn give_up(&self, number: u64) -> RoundState {
        protocol::give_up(self, number + 1)
    }

    fn has_joined(&self, member: usize) -> &AtomicU64 {
        self.map.word(self.slot(member))
    }

    fn slot(&self, member: usize) -> usize {
        assert!(member < self.members, "member {member} of {}", self.members);
        AT_SLOTS + member * SLOT
    }

    fn wake_word(&self) -> &AtomicU32 {
        // SAFETY: mapped, aligned, and used as an atomic everywhere; the map lives as long as `self`.
        unsafe { AtomicU32::from_ptr(self.map.start().add(AT_WAKE_WORD).cast()) }
    }
}

impl VoteWords for SharedVotes {
    fn members(&self) -> usize {
        self.members
    }

    fn newest(&self) -> &AtomicU64 {
        self.map.word(AT_NEWEST)
    }

    fn last_success(&self) -> &AtomicU64 {
        self.map.word(AT_LAST_SUCCESS)
    }

    fn shared_vote(&self, member: usize) -> &[AtomicU64; VOTE_WORDS] {
        let start = self.slot(member) + VOTE_IN_SLOT;
        // SAFETY: within the slot, aligned, and every access to these words, in whichever process, is atomic.
        unsafe { &*self.map.start().add(start).cast() }
    }

    fn wake_all(&self) {
        self.wake_word().fetch_add(1, Ordering::AcqRel);
        futex::wake_all(self.wake_word());
    }
}

fn size_for(members: usize) -> Result<usize, ShmError> {
    if members == 0 || members > MAX_MEMBERS {
        return Err(ShmError::Invalid(format!("1 to {MAX_MEMBERS} members can share votes, not {members}")));
    }
    Ok((AT_SLOTS + members * SLOT).next_multiple_of(rustix::param::page_size()))
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    const VOTE: [u64; 4] = [1, 2, 3, 4];
    const LONG: Duration = Duration::from_secs(20);

    /// The memory as each of its members maps it.
    fn joined_by(count: usize) -> Vec<SharedVotes> {
        let first = SharedVotes::create(count).unwrap();
        let address = first.address().unwrap();
        let others: Vec<_> = (1..count).map(|_| SharedVotes::open(address, count).unwrap()).collect();
        let members: Vec<_> = std::iter::once(first).chain(others).collect();
        assert!(!members[0].have_all_joined());
        members.iter().enumerate().for_each(|(member, each)| each.join(member));
        assert!(members.iter().all(SharedVotes::have_all_joined));
        assert_eq!(members[0].address(), None);
        members
    }

    #[test]
    fn rounds_succeed_if_all_agree_and_are_deferred_otherwise() {
        let members = joined_by(3);
        let both = Barrier::new(3);
        thread::scope(|scope| {
            for (member, mine) in members.iter().enumerate() {
                let both = &both;
                scope.spawn(move || {
                    for number in 0..3000 {
                        let is_odd_one = number % 3 == member as u64;
                        let kind = number % 10;
                        let state = if kind == 4 && is_odd_one {
                            mine.give_up(number)
                        } else {
                            let shared_vote = if kind == 7 && is_odd_one { [0; 4] } else { VOTE };
                            match mine.cast(member, number, shared_vote) {
                                RoundState::Open => mine.wait(number, LONG),
                                decided => decided,
                            }
                        };
                        let expected =
                            if kind == 4 || kind == 7 { RoundState::Deferred } else { RoundState::Succeeded };
                        assert_eq!(state, expected, "round {number} of member {member}");
                        if number % 100 == 0 {
                            both.wait();
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn a_late_member_learns_how_a_round_ended() {
        let members = joined_by(2);
        assert_eq!(members[0].cast(0, 0, VOTE), RoundState::Open);
        assert_eq!(members[1].cast(1, 0, VOTE), RoundState::Succeeded);
        // The second member goes on alone, and the first has not checked since.
        for number in 1..5 {
            assert_eq!(members[1].cast(1, number, VOTE), RoundState::Open);
            assert_eq!(members[1].wait(number, Duration::from_millis(1)), RoundState::Open);
            assert_eq!(members[1].give_up(number), RoundState::Deferred);
        }
        assert_eq!(members[0].give_up(0), RoundState::Succeeded);
        for number in 1..5 {
            assert_eq!(members[0].cast(0, number, VOTE), RoundState::Deferred);
        }
        // Numbers that nobody used.
        assert_eq!(members[0].cast(0, 9, VOTE), RoundState::Open);
        assert_eq!(members[1].cast(1, 9, VOTE), RoundState::Succeeded);
        assert_eq!(members[0].wait(9, LONG), RoundState::Succeeded);
    }

    #[test]
    fn other_memory_is_refused() {
        let made = SharedVotes::create(2).unwrap();
        let (process, descriptor, identity) = made.address().unwrap();
        for address in [(process, descriptor, identity ^ 1), (process, 0, identity), (process, i32::MAX, identity)] {
            SharedVotes::open(address, 2).unwrap_err();
        }
        SharedVotes::open((process, descriptor, identity), 3).unwrap_err();
        SharedVotes::create(0).unwrap_err();
        SharedVotes::create(MAX_MEMBERS + 1).unwrap_err();
    }
}

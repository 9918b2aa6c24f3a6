//! shared votes: where processes of one node agree in some microseconds, as long as all is well.
//!
//! A [`SharedVotes`] is sealed memory without a name that all members map. In each round every member casts a shared vote;
//! once all are there and equal the round went well, for all of them. Where anything else happens (somebody gives up
//! waiting, or brings something else) it is to be decided elsewhere, which all of them see, too. The rules are in
//! `protocol`.
#![allow(unsafe_code)]

mod protocol;

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::OFlags;

pub use self::protocol::Standing;
use self::protocol::{MOST_MEMBERS, VOTE_WORDS, Words};
use crate::error::ShmError;
use crate::memory::mapping::{Access, Mapping};
use crate::memory::memory_file::{self, Writers};
use crate::process::futex;
use crate::segment::header;
use crate::task_queue::{Spin, Wait, atomic};

/// Begins every box; the last byte is the version of this layout.
const MAGIC: u64 = u64::from_le_bytes(*b"tundibx\x01");

// Where each word lies. What all change is apart from what nobody does.
const AT_MAGIC: usize = 0;
const AT_IDENTITY: usize = 8;
const AT_MEMBERS: usize = 16;
const AT_NEWEST: usize = 64;
const AT_LAST_WELL: usize = 72;
const AT_BELL: usize = 80;
const AT_SLOTS: usize = 128;
/// Of a member: whether it is there, then its shared vote.
const SLOT: usize = 64;
const BALLOT_IN_SLOT: usize = 8;

/// Where a box is to be found: a process that made it, its descriptor there, and what tells the box from any other.
pub type BoxAddress = (u32, i32, u64);

/// A box, as one member has it.
#[derive(Debug)]
pub struct SharedVotes {
    map: Mapping,
    members: usize,
    identity: u64,
    /// Of anyone who made it, until all have found it.
    memory: Mutex<Option<OwnedFd>>,
    are_all_there: AtomicBool,
    spin: Spin,
}

impl SharedVotes {
    /// A new box for so many members.
    ///
    /// # Errors
    /// [`ShmError::Invalid`] for a number that no box can have, [`ShmError::Io`] where the system makes no such memory.
    pub fn create(members: usize) -> Result<Self, ShmError> {
        let size = size_for(members)?;
        let memory = memory_file::create()?;
        memory_file::reserve(memory.as_fd(), size, Writers::All, &mut || Ok(()))?;
        memory_file::seal(memory.as_fd(), Writers::All)?;
        let identity = header::draw_identity("a shared_votes")?;
        let map = Mapping::new(&memory, size, Access::Write)?;
        map.word(AT_IDENTITY).store(identity, Ordering::Relaxed);
        map.word(AT_MEMBERS).store(members as u64, Ordering::Relaxed);
        map.word(AT_MAGIC).store(MAGIC, Ordering::Release);
        Ok(Self::over(map, members, identity, Some(memory)))
    }

    /// The box at `address`, made for so many members.
    ///
    /// # Errors
    /// [`ShmError::NotASegment`] where there is another thing by now, [`ShmError::Io`] where its maker is dead or does
    /// not let this process look.
    pub fn open((maker, descriptor, identity): BoxAddress, members: usize) -> Result<Self, ShmError> {
        let size = size_for(members)?;
        let memory = memory_file::open_of(maker, descriptor, OFlags::RDWR)?;
        let refuse = |reason: &str| ShmError::NotASegment {
            segment: format!("the shared_votes of process {maker}"),
            reason: reason.to_owned(),
        };
        if !memory_file::keeps_its_length(memory.as_fd()) || memory_file::status(memory.as_fd())?.st_size != size as i64
        {
            return Err(refuse("it is not sealed, or has another length"));
        }
        let map = Mapping::new(&memory, size, Access::Write)?;
        let found = [AT_MAGIC, AT_IDENTITY, AT_MEMBERS].map(|at| map.word(at).load(Ordering::Acquire));
        if found != [MAGIC, identity, members as u64] {
            return Err(refuse("it is another one"));
        }
        Ok(Self::over(map, members, identity, None))
    }

    fn over(map: Mapping, members: usize, identity: u64, memory: Option<OwnedFd>) -> Self {
        SharedVotes {
            map,
            members,
            identity,
            memory: Mutex::new(memory),
            are_all_there: AtomicBool::new(false),
            spin: Spin::default(),
        }
    }

    /// Where others find it; `None` of one that was opened, or that all have found.
    pub fn address(&self) -> Option<BoxAddress> {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.as_ref().map(|memory| (process::id(), memory.as_raw_fd(), self.identity))
    }

    /// Say that `member` is there and will use the box; once.
    ///
    /// # Panics
    /// When there is no such member, as in all that follows.
    pub fn join(&self, member: usize) {
        self.is_there(member).store(1, Ordering::Release);
    }

    /// Whether all members are there.
    pub fn are_all_there(&self) -> bool {
        if !self.are_all_there.load(Ordering::Relaxed) {
            if !(0..self.members).all(|member| self.is_there(member).load(Ordering::Acquire) == 1) {
                return false;
            }
            self.are_all_there.store(true, Ordering::Relaxed);
            // Nobody looks for it any more.
            *self.memory.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
        true
    }

    /// Cast the shared vote of `member` in round `number`, counted from zero; once.
    pub fn cast(&self, member: usize, number: u64, shared_vote: [u64; VOTE_WORDS]) -> Standing {
        protocol::cast(self, member, number + 1, &shared_vote)
    }

    /// Wait until round `number`, in which this member cast its shared vote, is decided, or for `longest`, some tens of
    /// milliseconds: anyone who decides it may be killed before it can wake anybody, and one that others have left behind
    /// wakes nobody.
    pub fn wait(&self, number: u64, longest: Duration) -> Standing {
        let mut goes_on = || true;
        let wait = Wait::new(Some(longest), None, &mut goes_on);
        let begun = self.spin.begin();
        self.spin.look(&begun, &wait, || protocol::look(self, number + 1) != Standing::Open);
        let standing = loop {
            let seen = self.wake_word().load(Ordering::Acquire);
            let standing = protocol::look(self, number + 1);
            if standing != Standing::Open || wait.is_over() {
                break standing;
            }
            futex::sleep(self.wake_word(), seen, wait.slice());
        };
        self.spin.end(&begun);
        standing
    }

    /// Have round `number` be decided elsewhere, unless it was decided here. Never open afterwards.
    pub fn give_up(&self, number: u64) -> Standing {
        protocol::give_up(self, number + 1)
    }

    fn is_there(&self, member: usize) -> &AtomicU64 {
        self.map.word(self.slot(member))
    }

    fn slot(&self, member: usize) -> usize {
        assert!(member < self.members, "member {member} of {}", self.members);
        AT_SLOTS + member * SLOT
    }

    fn wake_word(&self) -> &AtomicU32 {
        // SAFETY: mapped, aligned, and used as an atomic everywhere; the map lives as long as `self`.
        unsafe { AtomicU32::from_ptr(self.map.start().add(AT_BELL).cast()) }
    }
}

impl Words for SharedVotes {
    fn members(&self) -> usize {
        self.members
    }

    fn newest(&self) -> &AtomicU64 {
        self.map.word(AT_NEWEST)
    }

    fn last_well(&self) -> &AtomicU64 {
        self.map.word(AT_LAST_WELL)
    }

    fn shared_vote(&self, member: usize) -> &[AtomicU64; VOTE_WORDS] {
        let start = self.slot(member) + BALLOT_IN_SLOT;
        // SAFETY: within the slot, aligned, and every access to these words, in whichever process, is atomic.
        unsafe { &*self.map.start().add(start).cast() }
    }

    fn ring(&self) {
        self.wake_word().fetch_add(1, Ordering::AcqRel);
        futex::ring(self.wake_word());
    }
}

fn size_for(members: usize) -> Result<usize, ShmError> {
    if members == 0 || members > MOST_MEMBERS {
        return Err(ShmError::Invalid(format!("a shared_votes has 1 to {MOST_MEMBERS} members, not {members}")));
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

    /// A box as each of its members has it.
    fn box_of(members: usize) -> Vec<SharedVotes> {
        let first = SharedVotes::create(members).unwrap();
        let address = first.address().unwrap();
        let others: Vec<_> = (1..members).map(|_| SharedVotes::open(address, members).unwrap()).collect();
        let boxes: Vec<_> = std::iter::once(first).chain(others).collect();
        assert!(!boxes[0].are_all_there());
        boxes.iter().enumerate().for_each(|(member, each)| each.join(member));
        assert!(boxes.iter().all(SharedVotes::are_all_there));
        assert_eq!(boxes[0].address(), None);
        boxes
    }

    #[test]
    fn rounds_go_well_where_all_agree_and_elsewhere_where_one_does_not_or_gives_up() {
        let boxes = box_of(3);
        let both = Barrier::new(3);
        thread::scope(|scope| {
            for (member, mine) in boxes.iter().enumerate() {
                let both = &both;
                scope.spawn(move || {
                    for number in 0..3000 {
                        let is_odd_one = number % 3 == member as u64;
                        let kind = number % 10;
                        let standing = if kind == 4 && is_odd_one {
                            mine.give_up(number)
                        } else {
                            let shared_vote = if kind == 7 && is_odd_one { [0; 4] } else { VOTE };
                            match mine.cast(member, number, shared_vote) {
                                Standing::Open => mine.wait(number, LONG),
                                decided => decided,
                            }
                        };
                        let expected = if kind == 4 || kind == 7 { Standing::Elsewhere } else { Standing::Well };
                        assert_eq!(standing, expected, "round {number} of member {member}");
                        if number % 100 == 0 {
                            both.wait();
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn who_comes_late_hears_what_became_of_a_round() {
        let boxes = box_of(2);
        assert_eq!(boxes[0].cast(0, 0, VOTE), Standing::Open);
        assert_eq!(boxes[1].cast(1, 0, VOTE), Standing::Well);
        // The other one goes on alone, and the first has not looked since.
        for number in 1..5 {
            assert_eq!(boxes[1].cast(1, number, VOTE), Standing::Open);
            assert_eq!(boxes[1].wait(number, Duration::from_millis(1)), Standing::Open);
            assert_eq!(boxes[1].give_up(number), Standing::Elsewhere);
        }
        assert_eq!(boxes[0].give_up(0), Standing::Well);
        for number in 1..5 {
            assert_eq!(boxes[0].cast(0, number, VOTE), Standing::Elsewhere);
        }
        // Numbers that nobody used.
        assert_eq!(boxes[0].cast(0, 9, VOTE), Standing::Open);
        assert_eq!(boxes[1].cast(1, 9, VOTE), Standing::Well);
        assert_eq!(boxes[0].wait(9, LONG), Standing::Well);
    }

    #[test]
    fn nothing_else_is_taken_for_a_box() {
        let made = SharedVotes::create(2).unwrap();
        let (process, descriptor, identity) = made.address().unwrap();
        for address in [(process, descriptor, identity ^ 1), (process, 0, identity), (process, i32::MAX, identity)] {
            SharedVotes::open(address, 2).unwrap_err();
        }
        SharedVotes::open((process, descriptor, identity), 3).unwrap_err();
        SharedVotes::create(0).unwrap_err();
        SharedVotes::create(MOST_MEMBERS + 1).unwrap_err();
    }
}

//! The rounds of shared votes, as atomic steps on shared words. A model checks them (`tests/votes_model.rs`).
//!
//! Invariants:
//!
//! 1. A round has one end: the member that moves its word on from "open" decides it for all.
//! 2. A round succeeds only if every member cast its vote in it and all votes are equal. So while a member has not
//!    heard of a round that succeeded, no later one succeeds.
//! 3. A member that is killed between two steps leaves a valid state, but may not have woken the others. So no member
//!    sleeps long.

use super::atomic::{AcqRel, Acquire, AtomicU64, Relaxed};

/// The number of words in a vote.
pub(crate) const VOTE_WORDS: usize = 4;

/// The vote of a member. Equal votes agree.
pub(crate) type SharedVote = [u64; VOTE_WORDS];

/// The largest number that the newest round's word can count.
pub(crate) const MAX_MEMBERS: usize = (1 << COUNT_BITS) - 1;
const COUNT_BITS: u32 = 16;
const PHASE_BITS: u32 = 2;

/// The state of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundState {
    /// Not all members have voted.
    Open,
    /// All members voted and agree.
    Succeeded,
    /// A member gave up or does not agree: the round is decided in another way.
    Deferred,
}

/// The shared words, all zero at first.
pub(crate) trait VoteWords {
    fn members(&self) -> usize;
    /// The newest round, the number of its votes, and its state.
    fn newest(&self) -> &AtomicU64;
    /// The newest round that succeeded before the newest one.
    fn last_success(&self) -> &AtomicU64;
    fn shared_vote(&self, member: usize) -> &[AtomicU64; VOTE_WORDS];
    /// Wake the members that sleep until a round is decided.
    fn wake_all(&self);
}

/// A value of the newest round's word. Rounds are counted from one, since the words begin with zero.
#[derive(Clone, Copy)]
struct Newest {
    round: u64,
    count: u64,
    state: RoundState,
}

impl Newest {
    fn of(word: u64) -> Self {
        let state = match word & ((1 << PHASE_BITS) - 1) {
            0 => RoundState::Open,
            1 => RoundState::Succeeded,
            _ => RoundState::Deferred,
        };
        let count = (word >> PHASE_BITS) & ((1 << COUNT_BITS) - 1);
        Newest { round: word >> (PHASE_BITS + COUNT_BITS), count, state }
    }

    fn word(self) -> u64 {
        let phase = match self.state {
            RoundState::Open => 0,
            RoundState::Succeeded => 1,
            RoundState::Deferred => 2,
        };
        (self.round << (PHASE_BITS + COUNT_BITS)) | (self.count << PHASE_BITS) | phase
    }
}

/// Cast the vote of `member` in a round, once.
pub(crate) fn cast(words: &impl VoteWords, member: usize, round: u64, shared_vote: &SharedVote) -> RoundState {
    // The round before is decided for this member, so no other member decides by its old vote any more.
    for (word, part) in words.shared_vote(member).iter().zip(shared_vote) {
        word.store(*part, Relaxed);
    }
    loop {
        let seen = words.newest().load(Acquire);
        let newest = Newest::of(seen);
        if newest.round > round || (newest.round == round && newest.state != RoundState::Open) {
            return state_of(words, round);
        }
        let count = if newest.round == round { newest.count + 1 } else { 1 };
        let state = match count < words.members() as u64 {
            true => RoundState::Open,
            false if (0..words.members()).all(|other| is_equal(words.shared_vote(other), shared_vote)) => {
                RoundState::Succeeded
            }
            false => RoundState::Deferred,
        };
        if let Some(state) = step(words, seen, Newest { round, count, state }) {
            return state;
        }
    }
}

/// The state of a round that this member takes part in.
pub(crate) fn state_of(words: &impl VoteWords, round: u64) -> RoundState {
    let newest = Newest::of(words.newest().load(Acquire));
    if newest.round < round {
        return RoundState::Open;
    }
    if newest.round == round {
        return newest.state;
    }
    // The other members are further. No later round succeeded, as this member was not in it.
    if words.last_success().load(Acquire) >= round { RoundState::Succeeded } else { RoundState::Deferred }
}

/// Defer a round that is still open; never returns that it is open.
pub(crate) fn give_up(words: &impl VoteWords, round: u64) -> RoundState {
    loop {
        let seen = words.newest().load(Acquire);
        let newest = Newest::of(seen);
        if newest.round > round || (newest.round == round && newest.state != RoundState::Open) {
            return state_of(words, round);
        }
        if let Some(state) = step(words, seen, Newest { round, count: 0, state: RoundState::Deferred }) {
            return state;
        }
    }
}

/// Replace the word `seen` by `next`; `None` where another member changed it first.
fn step(words: &impl VoteWords, seen: u64, next: Newest) -> Option<RoundState> {
    let before = Newest::of(seen);
    if before.state == RoundState::Succeeded {
        // For the members that read the word only after the next round began.
        words.last_success().fetch_max(before.round, AcqRel);
    }
    words.newest().compare_exchange(seen, next.word(), AcqRel, Acquire).ok()?;
    if next.state != RoundState::Open {
        words.wake_all();
    }
    Some(next.state)
}

fn is_equal(cast: &[AtomicU64; VOTE_WORDS], shared_vote: &SharedVote) -> bool {
    cast.iter().zip(shared_vote).all(|(word, part)| word.load(Relaxed) == *part)
}

//! The rounds of shared votes, as steps on its words. A model checks them (`tests/votes_model.rs`).
//!
//! What always holds:
//!
//! 1. A round has one end: anyone who moves its word on from "open" decides for all, and nobody undoes that.
//! 2. It goes well only where every member cast its shared vote in it, and all of these are equal: a member that gave up or
//!    never came is not among them. So while a member has not heard of a round that went well, no later one goes
//!    well.
//! 3. A step is whole or was not made: who is killed between two of them leaves nothing half done but a wake_word that is
//!    not rung, so that nobody may sleep for long.

use super::atomic::{AcqRel, Acquire, AtomicU64, Relaxed};

/// Words of a shared vote.
pub(crate) const VOTE_WORDS: usize = 4;

/// What is cast: equal ones agree.
pub(crate) type SharedVote = [u64; VOTE_WORDS];

/// Members that a box has room for: as many can be counted in its word.
pub(crate) const MOST_MEMBERS: usize = (1 << COUNT_BITS) - 1;
const COUNT_BITS: u32 = 16;
const PHASE_BITS: u32 = 2;

/// How a round stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Not all have cast their shared votes.
    Open,
    /// All have, and agree.
    Well,
    /// It is to be decided in another way: somebody gave up, or does not agree.
    Elsewhere,
}

/// The words of a box, all zero at first.
pub(crate) trait Words {
    fn members(&self) -> usize;
    /// The newest round, how many cast their shared votes in it, and its standing.
    fn newest(&self) -> &AtomicU64;
    /// The newest round that went well of those before the newest one.
    fn last_well(&self) -> &AtomicU64;
    fn shared_vote(&self, member: usize) -> &[AtomicU64; VOTE_WORDS];
    /// Wake all who sleep until a round is decided.
    fn ring(&self);
}

/// A value of the newest round's word. Rounds are counted from one: a box begins with all zero.
#[derive(Clone, Copy)]
struct Newest {
    round: u64,
    count: u64,
    standing: Standing,
}

impl Newest {
    fn of(word: u64) -> Self {
        let standing = match word & ((1 << PHASE_BITS) - 1) {
            0 => Standing::Open,
            1 => Standing::Well,
            _ => Standing::Elsewhere,
        };
        let count = (word >> PHASE_BITS) & ((1 << COUNT_BITS) - 1);
        Newest { round: word >> (PHASE_BITS + COUNT_BITS), count, standing }
    }

    fn word(self) -> u64 {
        let phase = match self.standing {
            Standing::Open => 0,
            Standing::Well => 1,
            Standing::Elsewhere => 2,
        };
        (self.round << (PHASE_BITS + COUNT_BITS)) | (self.count << PHASE_BITS) | phase
    }
}

/// Cast the `shared vote` of `member` in a round, once.
pub(crate) fn cast(words: &impl Words, member: usize, round: u64, shared_vote: &SharedVote) -> Standing {
    // The round before is decided for this member, so anyone who still looks at its old shared vote decides nothing by it.
    for (word, part) in words.shared_vote(member).iter().zip(shared_vote) {
        word.store(*part, Relaxed);
    }
    loop {
        let seen = words.newest().load(Acquire);
        let newest = Newest::of(seen);
        if newest.round > round || (newest.round == round && newest.standing != Standing::Open) {
            return look(words, round);
        }
        let count = if newest.round == round { newest.count + 1 } else { 1 };
        let standing = match count < words.members() as u64 {
            true => Standing::Open,
            false if (0..words.members()).all(|other| is_equal(words.shared_vote(other), shared_vote)) => {
                Standing::Well
            }
            false => Standing::Elsewhere,
        };
        if let Some(standing) = step(words, seen, Newest { round, count, standing }) {
            return standing;
        }
    }
}

/// How a round stands of which this member is.
pub(crate) fn look(words: &impl Words, round: u64) -> Standing {
    let newest = Newest::of(words.newest().load(Acquire));
    if newest.round < round {
        return Standing::Open;
    }
    if newest.round == round {
        return newest.standing;
    }
    // Others are further: nothing went well since then, as this member was not in it.
    if words.last_well().load(Acquire) >= round { Standing::Well } else { Standing::Elsewhere }
}

/// Have a round that is still open be decided elsewhere; never returns that it is open.
pub(crate) fn give_up(words: &impl Words, round: u64) -> Standing {
    loop {
        let seen = words.newest().load(Acquire);
        let newest = Newest::of(seen);
        if newest.round > round || (newest.round == round && newest.standing != Standing::Open) {
            return look(words, round);
        }
        if let Some(standing) = step(words, seen, Newest { round, count: 0, standing: Standing::Elsewhere }) {
            return standing;
        }
    }
}

/// Put `next` in the place of what was `seen`; `None` where another one was faster.
fn step(words: &impl Words, seen: u64, next: Newest) -> Option<Standing> {
    let before = Newest::of(seen);
    if before.standing == Standing::Well {
        // For those who have yet to look, and find that the next one is on.
        words.last_well().fetch_max(before.round, AcqRel);
    }
    words.newest().compare_exchange(seen, next.word(), AcqRel, Acquire).ok()?;
    if next.standing != Standing::Open {
        words.ring();
    }
    Some(next.standing)
}

fn is_equal(cast: &[AtomicU64; VOTE_WORDS], shared_vote: &SharedVote) -> bool {
    cast.iter().zip(shared_vote).all(|(word, part)| word.load(Relaxed) == *part)
}

//! The rounds of shared votes under a model checker: all orders of their steps, and all values that their orderings
//! allow, up to a number of times that a thread is held up in favour of another.
//!
//! The protocol's own source is compiled here over the checker's words.

#![expect(dead_code, reason = "what only the real words need")]

mod atomic {
    pub(crate) use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
    pub(crate) use loom::sync::atomic::AtomicU64;
}
#[path = "../src/votes/protocol.rs"]
mod protocol;

use std::sync::Arc;

use loom::thread;

use atomic::AtomicU64;
use protocol::{RoundState, VOTE_WORDS, VoteWords, cast, give_up, state_of};

struct Memory {
    newest: AtomicU64,
    last_success: AtomicU64,
    shared_votes: Vec<[AtomicU64; VOTE_WORDS]>,
}

impl VoteWords for Memory {
    fn members(&self) -> usize {
        self.shared_votes.len()
    }

    fn newest(&self) -> &AtomicU64 {
        &self.newest
    }

    fn last_success(&self) -> &AtomicU64 {
        &self.last_success
    }

    fn shared_vote(&self, member: usize) -> &[AtomicU64; VOTE_WORDS] {
        &self.shared_votes[member]
    }

    fn wake_all(&self) {}
}

/// The outcome of each member in each round, and its actions in the round.
type Does = fn(&Memory, usize, u64) -> RoundState;

fn run(plans: [[Does; 2]; 2], check: fn([[RoundState; 2]; 2])) {
    let mut builder = loom::model::Builder::new();
    // Times that a thread is held up in favour of the other though it could have gone on.
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let word = || AtomicU64::new(0);
        let words = || core::array::from_fn(|_| word());
        let memory = Arc::new(Memory { newest: word(), last_success: word(), shared_votes: vec![words(), words()] });
        let both = [0, 1].map(|member| {
            let memory = Arc::clone(&memory);
            let [first, second] = plans[member];
            thread::spawn(move || [first(&memory, member, 1), second(&memory, member, 2)])
        });
        check(both.map(|thread| thread.join().unwrap()));
    });
}

fn patient(memory: &Memory, member: usize, round: u64) -> RoundState {
    let mut state = cast(memory, member, round, &[round; VOTE_WORDS]);
    while state == RoundState::Open {
        thread::yield_now();
        state = state_of(memory, round);
    }
    state
}

fn hasty(memory: &Memory, member: usize, round: u64) -> RoundState {
    cast(memory, member, round, &[round; VOTE_WORDS]);
    give_up(memory, round)
}

fn absent(memory: &Memory, _member: usize, round: u64) -> RoundState {
    give_up(memory, round)
}

/// As where Ctrl-C comes before the first step.
fn unheard(_memory: &Memory, _member: usize, _round: u64) -> RoundState {
    RoundState::Deferred
}

fn apart(memory: &Memory, member: usize, round: u64) -> RoundState {
    cast(memory, member, round, &[7 + member as u64; VOTE_WORDS]);
    give_up(memory, round)
}

#[test]
fn rounds_of_patient_members_go_well() {
    run([[patient as Does; 2]; 2], |came_to| assert_eq!(came_to, [[RoundState::Succeeded; 2]; 2]));
}

#[test]
fn all_come_to_the_same_however_soon_one_gives_up() {
    let (patient, hasty): (Does, Does) = (patient, hasty);
    for plans in [[[hasty; 2]; 2], [[patient; 2], [hasty; 2]], [[hasty, patient]; 2]] {
        run(plans, |[one, other]| {
            assert_eq!(one, other);
            assert!(!one.contains(&RoundState::Open));
        });
    }
}

#[test]
fn no_round_goes_well_without_one_or_where_they_do_not_agree() {
    let hasty: Does = hasty;
    for not_well in [absent as Does, apart, unheard] {
        run([[hasty, not_well], [not_well, hasty]], |[one, other]| {
            assert_eq!((one, other), ([RoundState::Deferred; 2], [RoundState::Deferred; 2]));
        });
    }
}

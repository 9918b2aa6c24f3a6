//! The buffer and the storage under a model checker: all orders in which threads can take their locks, up to a number
//! of times that one is held up in favour of another.
//!
//! Their own sources are compiled here over the checker's locks. A wake-up that is lost is a deadlock, which the
//! checker reports.
#![allow(dead_code, reason = "what the models do not need")]

#[path = "../../src/error.rs"]
mod error;
#[path = "../../src/selection.rs"]
mod selection;
#[path = "../../src/shard_id.rs"]
mod shard_id;
#[path = "../../src/stats.rs"]
mod stats;
#[path = "../../src/tensor_meta.rs"]
mod tensor_meta;

// The sources name it `crate::entries`.
#[path = "entries_over_loom.rs"]
mod entries;

use std::sync::Arc;
use std::time::Duration;

use loom::thread;

use entries::fetch_buffer::{BufferLookup, CallStep, FetchBuffer, InFlight, Outcome, ShardKey};
use entries::storage::Storage;
use error::StoreError;
use selection::Selection;
use shard_id::ShardId;

type Step = u64;
type Claimant = u64;

/// Stands for the bytes of a fetched shard.
type Payload = u32;

const BYTES: u64 = 64;

/// Explore with at most three preemptions of threads that could have gone on.
fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 10_000;
    builder.check(model);
}

fn key() -> ShardKey {
    ShardKey { id: ShardId::numbered(1, 1), owner: "owner".into(), rows: Selection::All }
}

fn ask(buffer: &FetchBuffer<Payload>, call_step: &CallStep) -> Result<BufferLookup<Payload>, StoreError> {
    Ok(buffer.look_up(call_step, &[key()], true)?.remove(0))
}

fn lead(buffer: &FetchBuffer<Payload>, call_step: &CallStep) -> Arc<InFlight<Payload>> {
    match ask(buffer, call_step) {
        Ok(BufferLookup::Miss(in_flight)) => in_flight,
        other => panic!("nobody asked before: {other:?}"),
    }
}

fn wait(in_flight: &InFlight<Payload>) -> Outcome<Payload> {
    loop {
        if let Some(outcome) = in_flight.wait(Duration::MAX) {
            return outcome;
        }
    }
}

/// Asks until it has it, as a consumer does; fetches it where nobody does. How often it fetched.
fn get(buffer: &FetchBuffer<Payload>, call_step: &CallStep, payload: Payload) -> Result<(Payload, u32), StoreError> {
    let mut fetched = 0;
    loop {
        match ask(buffer, call_step)? {
            BufferLookup::Hit(payload, _) => return Ok((payload, fetched)),
            BufferLookup::Miss(in_flight) => {
                fetched += 1;
                buffer.insert(&in_flight, payload, BYTES)?;
            }
            BufferLookup::Pending(in_flight) => match wait(&in_flight) {
                Outcome::Arrived(payload, _) => return Ok((payload, fetched)),
                Outcome::Failed(error) => return Err(error),
                Outcome::Again => {}
            },
        }
    }
}

/// Bytes and entries, fetches under way, and those that came late.
fn counts_of(buffer: &FetchBuffer<Payload>) -> ((u64, u64), u64, u64) {
    let state = buffer.lock();
    for (_, step_entries) in state.by_step.iter() {
        assert_eq!(
            step_entries.step_counts.added_bytes,
            step_entries.step_counts.freed_bytes + step_entries.step_counts.held_bytes
        );
    }
    (state.by_step.held(), state.counts.in_flight, state.counts.late)
}

#[test]
fn a_shard_that_arrives_while_its_step_is_drained_is_drained_or_refused() {
    check(|| {
        let buffer = Arc::new(FetchBuffer::new());
        buffer.begin(7, 0).unwrap();
        let call_step = buffer.call_step();
        let in_flight = lead(&buffer, &call_step);
        let drain = thread::spawn({
            let buffer = Arc::clone(&buffer);
            move || buffer.end(7).map_or(0, |step_entries| step_entries.step_counts.num_entries)
        });
        let inserted = buffer.insert(&in_flight, 5, BYTES);
        let drained = drain.join().unwrap();
        match inserted {
            Ok(()) => assert_eq!((drained, counts_of(&buffer)), (1, ((0, 0), 0, 0))),
            Err(StoreError::StepEnded { step: 7 }) => {
                assert_eq!((drained, counts_of(&buffer)), (0, ((0, 0), 0, 1)));
            }
            Err(other) => panic!("{other}"),
        }
        assert!(matches!(ask(&buffer, &call_step), Err(StoreError::StepEnded { step: 7 })));
    });
}

#[test]
fn a_shard_that_arrives_during_its_removal_is_removed_or_refused() {
    for all in [false, true] {
        check(move || {
            let buffer = Arc::new(FetchBuffer::new());
            let call_step = buffer.call_step();
            let in_flight = lead(&buffer, &call_step);
            let remover = thread::spawn({
                let buffer = Arc::clone(&buffer);
                move || match all {
                    true => buffer.flush().iter().map(|step_entries| step_entries.step_counts.num_entries).sum(),
                    false => buffer.remove(&[key().id]).iter().flatten().map(|of_shard| of_shard.len() as u64).sum(),
                }
            });
            let inserted = buffer.insert(&in_flight, 5, BYTES);
            let removed = remover.join().unwrap();
            match inserted {
                Ok(()) => assert_eq!((removed, counts_of(&buffer)), (1, ((0, 0), 0, 0))),
                Err(StoreError::Drained { .. }) => assert_eq!((removed, counts_of(&buffer)), (0, ((0, 0), 0, 1))),
                Err(other) => panic!("{other}"),
            }
            // A later lookup misses, and leads a new fetch.
            drop(lead(&buffer, &call_step));
        });
    }
}

#[test]
fn one_fetches_and_all_have_it() {
    check(|| {
        let buffer = Arc::new(FetchBuffer::new());
        let call_step = buffer.call_step();
        let others: Vec<_> = (1..3)
            .map(|payload| {
                let (buffer, call_step) = (Arc::clone(&buffer), call_step.clone());
                thread::spawn(move || get(&buffer, &call_step, payload).unwrap())
            })
            .collect();
        let mut got = vec![get(&buffer, &call_step, 0).unwrap()];
        got.extend(others.into_iter().map(|other| other.join().unwrap()));
        assert!(got.iter().all(|(payload, _)| *payload == got[0].0));
        assert_eq!(got.iter().map(|(_, fetched)| fetched).sum::<u32>(), 1);
        assert_eq!(counts_of(&buffer), ((BYTES, 1), 0, 0));
    });
}

#[test]
fn a_failure_reaches_waiting_threads_and_no_later_call() {
    check(|| {
        let buffer = Arc::new(FetchBuffer::new());
        let call_step = buffer.call_step();
        let in_flight = lead(&buffer, &call_step);
        let other = thread::spawn({
            let (buffer, call_step) = (Arc::clone(&buffer), call_step.clone());
            move || get(&buffer, &call_step, 5)
        });
        buffer.fail(&in_flight, Outcome::Failed(StoreError::Invalid("broken".to_owned())));
        match other.join().unwrap() {
            Ok((5, 1)) => assert_eq!(counts_of(&buffer), ((BYTES, 1), 0, 0)),
            Err(StoreError::Invalid(reason)) => {
                assert_eq!((reason.as_str(), counts_of(&buffer)), ("broken", ((0, 0), 0, 0)))
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(get(&buffer, &call_step, 5).unwrap().0, 5);
    });
}

#[test]
fn a_waiting_thread_fetches_itself_if_the_fetcher_gives_up() {
    check(|| {
        let buffer = Arc::new(FetchBuffer::new());
        let call_step = buffer.call_step();
        let in_flight = lead(&buffer, &call_step);
        let other = thread::spawn({
            let (buffer, call_step) = (Arc::clone(&buffer), call_step.clone());
            move || get(&buffer, &call_step, 5).unwrap()
        });
        buffer.fail(&in_flight, Outcome::Again);
        assert_eq!(other.join().unwrap(), (5, 1));
        assert_eq!(counts_of(&buffer), ((BYTES, 1), 0, 0));
    });
}

#[test]
fn a_waiting_thread_learns_of_a_removal() {
    check(|| {
        let buffer = Arc::new(FetchBuffer::new());
        let call_step = buffer.call_step();
        let in_flight = lead(&buffer, &call_step);
        let Ok(BufferLookup::Pending(pending)) = ask(&buffer, &call_step) else { panic!("it is under way") };
        let remover = thread::spawn({
            let buffer = Arc::clone(&buffer);
            move || drop(buffer.remove(&[key().id]))
        });
        let waiter = thread::spawn(move || wait(&pending));
        let inserted = buffer.insert(&in_flight, 5, BYTES);
        remover.join().unwrap();
        match (inserted, waiter.join().unwrap()) {
            (Ok(()), Outcome::Arrived(5, Selection::All)) => {}
            (Err(StoreError::Drained { .. }), Outcome::Failed(StoreError::Drained { .. })) => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(counts_of(&buffer).0, (0, 0));
    });
}

#[test]
fn a_waiting_thread_learns_of_a_removal_before_the_fetch_ends() {
    check(|| {
        let buffer = Arc::new(FetchBuffer::new());
        let call_step = buffer.call_step();
        let in_flight = lead(&buffer, &call_step);
        let Ok(BufferLookup::Pending(pending)) = ask(&buffer, &call_step) else { panic!("it is under way") };
        let waiter = thread::spawn(move || wait(&pending));
        drop(buffer.remove(&[key().id]));
        assert!(matches!(waiter.join().unwrap(), Outcome::Failed(StoreError::Drained { .. })));
        assert!(matches!(buffer.insert(&in_flight, 5, BYTES), Err(StoreError::Drained { .. })));
        assert_eq!(counts_of(&buffer), ((0, 0), 0, 1));
    });
}

#[test]
fn a_repeated_question_is_not_counted_again() {
    check(|| {
        let buffer = FetchBuffer::new();
        let call_step = buffer.call_step();
        let in_flight = lead(&buffer, &call_step);
        assert!(matches!(buffer.look_up(&call_step, &[key()], false).unwrap()[..], [BufferLookup::Pending(_)]));
        buffer.insert(&in_flight, 5, BYTES).unwrap();
        assert!(matches!(
            buffer.look_up(&call_step, &[key()], false).unwrap()[..],
            [BufferLookup::Hit(5, Selection::All)]
        ));
        let counts = buffer.lock().counts;
        assert_eq!((counts.hits, counts.misses), (0, 1));
        assert!(matches!(ask(&buffer, &call_step), Ok(BufferLookup::Hit(..))));
        assert_eq!(buffer.lock().counts.hits, 1);
        // But what has to be fetched is.
        drop(buffer.flush());
        assert!(matches!(buffer.look_up(&call_step, &[key()], false).unwrap()[..], [BufferLookup::Miss(_)]));
        assert_eq!(buffer.lock().counts.misses, 2);
    });
}

#[test]
fn a_later_step_that_waits_for_an_ended_ones_fetch_fetches_for_itself() {
    check(|| {
        let buffer = Arc::new(FetchBuffer::new());
        buffer.begin(1, 0).unwrap();
        let in_flight = lead(&buffer, &buffer.call_step());
        buffer.begin(2, 0).unwrap();
        let later = buffer.call_step();
        let other = thread::spawn({
            let (buffer, later) = (Arc::clone(&buffer), later.clone());
            move || get(&buffer, &later, 6).unwrap()
        });
        let drain = thread::spawn({
            let buffer = Arc::clone(&buffer);
            move || drop(buffer.end(1))
        });
        let inserted = buffer.insert(&in_flight, 5, BYTES);
        drain.join().unwrap();
        let (payload, fetched) = other.join().unwrap();
        assert!(matches!((payload, fetched), (5, 0) | (6, 1)), "{payload} {fetched}");
        assert!(fetched == 1 || inserted.is_ok());
        assert_eq!(counts_of(&buffer).0, (BYTES * u64::from(fetched), u64::from(fetched)));
        drop(buffer.end(2));
        assert_eq!(counts_of(&buffer).0, (0, 0));
    });
}

#[test]
fn a_later_step_does_not_wait_for_a_fetch_of_an_ended_one() {
    check(|| {
        let buffer = FetchBuffer::new();
        buffer.begin(1, 0).unwrap();
        let in_flight = lead(&buffer, &buffer.call_step());
        buffer.begin(2, 0).unwrap();
        drop(buffer.end(1));
        let later = lead(&buffer, &buffer.call_step());
        assert!(matches!(buffer.insert(&in_flight, 5, BYTES), Err(StoreError::StepEnded { step: 1 })));
        buffer.insert(&later, 6, BYTES).unwrap();
        assert_eq!(counts_of(&buffer), ((BYTES, 1), 0, 1));
    });
}

#[test]
fn the_outcome_of_a_fetch_is_set_once() {
    check(|| {
        let buffer = FetchBuffer::new();
        buffer.begin(1, 0).unwrap();
        let in_flight = lead(&buffer, &buffer.call_step());
        drop(buffer.remove(&[key().id]));
        drop(buffer.end(1));
        buffer.insert(&in_flight, 5, BYTES).unwrap_err();
        assert!(matches!(wait(&in_flight), Outcome::Failed(StoreError::Drained { .. })));
    });
}

#[test]
fn one_of_two_stores_under_one_name_succeeds() {
    check(|| {
        let storage = Arc::new(Storage::<Payload>::new(9));
        let other = thread::spawn({
            let storage = Arc::clone(&storage);
            move || storage.insert(&"name".parse().unwrap(), 1, BYTES).is_ok()
        });
        let mine = storage.insert(&"name".parse().unwrap(), 2, BYTES).is_ok();
        let others = other.join().unwrap();
        assert!(mine != others, "{mine} {others}");
        assert_eq!(storage.get(&["name".parse().unwrap()]).unwrap(), [if mine { 2 } else { 1 }]);
        assert_eq!(storage.lock().by_step.held(), (BYTES, 1));
    });
}

#[test]
fn a_shard_that_is_claimed_while_its_step_ends_is_freed_or_left_unclaimed() {
    check(|| {
        let storage = Arc::new(Storage::<Payload>::new(9));
        let ids = storage.put(vec![(1, BYTES), (2, BYTES)]);
        storage.claim(3, 0, &ids[..1]).unwrap();
        let ending = thread::spawn({
            let storage = Arc::clone(&storage);
            move || storage.end(3).map_or(0, |step_entries| step_entries.step_counts.num_entries)
        });
        let claimed = storage.claim(3, 0, &ids[1..]);
        let ended = ending.join().unwrap();
        let left = storage.lock().by_step.held().1;
        match claimed {
            Ok(claimed) => assert_eq!((claimed.claimed_count, ended, left), (1, 2, 0)),
            Err(StoreError::StepEnded { step: 3 }) => assert_eq!((ended, left), (1, 1)),
            Err(other) => panic!("{other}"),
        }
        assert!(storage.get(&ids[..1]).unwrap_err()[0].was_removed);
        assert_eq!(storage.lock().by_step.ended_step(3).unwrap().step_counts.held_bytes, 0);
    });
}

#[test]
fn a_shard_that_is_looked_up_while_it_is_claimed_and_given_up_is_always_there() {
    check(|| {
        let storage = Arc::new(Storage::<Payload>::new(9));
        let ids = storage.put(vec![(1, BYTES)]);
        let claiming = thread::spawn({
            let (storage, ids) = (Arc::clone(&storage), ids.clone());
            move || {
                storage.claim(3, 0, &ids).unwrap();
                storage.unclaim_all(3);
            }
        });
        assert_eq!(storage.get(&ids).unwrap(), [1]);
        claiming.join().unwrap();
        assert_eq!(storage.lock().by_step.unclaimed().step_counts.held_bytes, BYTES);
    });
}

#[test]
fn a_fetch_under_way_when_a_step_begins_ends_with_it() {
    check(|| {
        let buffer = Arc::new(FetchBuffer::new());
        let in_flight = lead(&buffer, &buffer.call_step());
        let step = thread::spawn({
            let buffer = Arc::clone(&buffer);
            move || buffer.begin(1, 0).unwrap()
        });
        buffer.insert(&in_flight, 5, BYTES).unwrap();
        step.join().unwrap();
        assert_eq!(counts_of(&buffer).0, (BYTES, 1));
        assert_eq!(buffer.end(1).map(|step_entries| step_entries.step_counts.num_entries), Some(1));
        assert_eq!(counts_of(&buffer), ((0, 0), 0, 0));
    });
}

#[test]
fn a_shard_that_is_kept_as_its_step_ends_is_kept_or_freed() {
    check(|| {
        let storage = Arc::new(Storage::new(1));
        let id = storage.put(vec![(5, BYTES)]).remove(0);
        storage.claim(7, 0, std::slice::from_ref(&id)).unwrap();
        let keeper = thread::spawn({
            let (storage, id) = (Arc::clone(&storage), id.clone());
            move || storage.keep(&[id])
        });
        let ended = storage.end(7).map_or(0, |step_entries| step_entries.step_counts.num_entries);
        assert_eq!(ended + keeper.join().unwrap(), 1);
        assert_eq!(storage.has(&id), ended == 0);
    });
}

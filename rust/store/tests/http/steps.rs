//! Steps that a controller begins, claims for and ends over HTTP.

use serde_json::json;
use tundish_store::http::{Client, Server, ServerOptions};
use tundish_store::{ShardId, StoreError};

use crate::common::within;
use crate::controller::Controller;
use crate::raw_http::{Owner, until};

fn ids(names: &[&str]) -> Vec<ShardId> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

fn unclaimed(owner: &Owner) -> u64 {
    owner.store.stats().storage.unclaimed_entries
}

#[test]
fn a_step_ends_with_its_claims_and_fetches() {
    let owner = Owner::new();
    ["a", "b", "c"].iter().for_each(|id| owner.store(id, &[7; 1000]));
    let consumer = Owner::new();
    within(20.0, |time_limit| {
        let mut held = [Controller::new(&owner.address()), Controller::new(&consumer.address())];
        held[1].begin_step(7, time_limit).unwrap();
        let claimed = held[0].claim(7, &ids(&["a", "b", "never"]), time_limit).unwrap();
        assert_eq!((claimed.claimed_count, claimed.total_bytes, claimed.missing), (2, 2048, ids(&["never"])));
        let taken = held[0].claim(8, &ids(&["a"]), time_limit).unwrap();
        assert_eq!((taken.claimed_count, taken.taken), (0, ids(&["a"])));
        let wanted = ["a", "c"].map(|id| owner.wanted(id, 1000));
        consumer.store.fetch(&wanted, &Client::of_sockets(), time_limit).unwrap();
        assert_eq!(consumer.store.stats().buffer.num_entries, 2);

        let step_stats = held.each_mut().map(|held| held.end_step(7, time_limit).unwrap());
        let told = step_stats.map(|step_stats| {
            (step_stats.stored_bytes, step_stats.fetched_bytes, step_stats.held_bytes, step_stats.freed_bytes)
        });
        assert_eq!(told, [(2048, 0, 0, 2048), (0, 2048, 0, 2048)]);
        assert_eq!(held[1].end_step(7, time_limit).unwrap(), step_stats[1], "again, it only tells");
        assert_eq!(consumer.store.stats().buffer.num_entries, 0);
        assert_eq!(owner.store.stats().storage.num_entries, 1);
        let over = held[1].begin_step(7, time_limit).unwrap_err();
        assert!(matches!(over, StoreError::StepEnded { step } if step == 7), "{over}");
        let over = held[0].claim(7, &ids(&["c"]), time_limit).unwrap_err();
        assert!(matches!(over, StoreError::StepEnded { step } if step == 7), "{over}");
    });
}

#[test]
fn the_end_of_a_step_is_a_small_message() {
    let owner = Owner::new();
    let ended = owner.ask("POST", "/step/3/end", "", b"").json();
    assert_eq!((&ended["step"], &ended["has_ended"], &ended["held_bytes"]), (&json!(3), &json!(true), &json!(0)));
    assert_eq!(owner.ask("POST", "/step/3/end", "", b"").status, 200);
}

#[test]
fn claims_last_as_long_as_the_connection_that_they_were_made_on() {
    let owner = Owner::new();
    ["a", "b"].iter().for_each(|id| owner.store(id, b"abc"));
    let address = owner.address();
    within(20.0, |time_limit| {
        let (mut first, mut second) = (Controller::new(&address), Controller::new(&address));
        first.claim(1, &ids(&["a"]), time_limit).unwrap();
        second.claim(2, &ids(&["b"]), time_limit).unwrap();
        assert_eq!(unclaimed(&owner), 0);
        drop(first);
        until("claims are given up with their connection", || unclaimed(&owner) == 1);
        assert_eq!(second.claim(2, &ids(&["b"]), time_limit).unwrap().taken, []);
        let taken = Controller::new(&address).claim(3, &ids(&["a", "b"]), time_limit).unwrap();
        assert_eq!((taken.claimed_count, taken.taken), (1, ids(&["b"])));
    });
}

#[test]
fn a_connection_that_breaks_takes_its_claims_with_it_and_the_next_one_has_another_number() {
    let owner = Owner::new();
    owner.store("a", b"abc");
    let mut held = Controller::new(&owner.address());
    within(20.0, |time_limit| {
        held.claim(1, &ids(&["a"]), time_limit).unwrap();
        let first = held.connection_number();
        let port = owner.server.address().port();
        let Owner { store, server } = owner;
        drop(server);
        until("claims are given up with the server", || store.stats().storage.unclaimed_entries == 1);
        let error = held.end_step(1, time_limit).unwrap_err();
        assert!(matches!(&error, StoreError::Unanswered { .. }), "{error}");
        let again = Server::start(store, "127.0.0.1", port, ServerOptions::default()).unwrap();
        held.claim(2, &ids(&["a"]), time_limit).unwrap();
        assert!(held.connection_number().is_some_and(|number| Some(number) != first));
        drop(again);
    });
}

#[test]
fn kept_shards_outlive_their_step() {
    let owner = Owner::new();
    ["a", "b"].iter().for_each(|id| owner.store(id, b"abc"));
    let mut held = Controller::new(&owner.address());
    within(20.0, |time_limit| {
        held.claim(1, &ids(&["a", "b"]), time_limit).unwrap();
        let kept = held.keep(&ids(&["a", "a", "never"]), time_limit).unwrap();
        assert_eq!((kept.shards, kept.entries), (1, 0));
        held.end_step(1, time_limit).unwrap();
    });
    assert_eq!((owner.store.stats().storage.num_entries, unclaimed(&owner)), (1, 1));
    // Anyone who kept it: its end is nobody's loss.
    drop(held);
    within(20.0, |time_limit| {
        let claimed = Controller::new(&owner.address()).claim(2, &ids(&["a"]), time_limit).unwrap();
        assert_eq!((claimed.claimed_count, claimed.kept), (1, ids(&["a"])));
    });
}

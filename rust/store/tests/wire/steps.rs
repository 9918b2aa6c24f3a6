//! Steps that a controller begins, claims for, and ends from afar.

use serde_json::json;
use tundish_store::http::Client;
use tundish_store::{Service, ShardId, StoreError};

use crate::common::within;
use crate::raw::{Owner, until};

fn ids(names: &[&str]) -> Vec<ShardId> {
    names.iter().map(|name| name.parse().unwrap()).collect()
}

fn unclaimed(owner: &Owner) -> u64 {
    owner.node.stats().storage.unclaimed_entries
}

#[test]
fn a_step_ends_with_what_it_claimed_and_what_was_fetched_in_it() {
    let (owner, client) = (Owner::new(), Client::new());
    ["a", "b", "c"].iter().for_each(|id| owner.store(id, &[7; 1000]));
    let consumer = Owner::new();
    within(20.0, |patience| {
        let mut held = [client.hold(&owner.address()), client.hold(&consumer.address())];
        held[1].begin_epoch(7, patience).unwrap();
        let claimed = held[0].claim(7, &ids(&["a", "b", "never"]), patience).unwrap();
        assert_eq!((claimed.claimed_count, claimed.total_bytes, claimed.missing), (2, 2048, ids(&["never"])));
        let taken = held[0].claim(8, &ids(&["a"]), patience).unwrap();
        assert_eq!((taken.claimed_count, taken.taken), (0, ids(&["a"])));
        let wanted = ["a", "c"].map(|id| owner.wanted(id, 1000));
        consumer.node.fetch(&wanted, &Client::of_sockets(), patience).unwrap();
        assert_eq!(consumer.node.stats().buffer.num_entries, 2);

        let ledgers = held.each_mut().map(|held| held.end_epoch(7, patience).unwrap());
        let told =
            ledgers.map(|ledger| (ledger.stored_bytes, ledger.fetched_bytes, ledger.held_bytes, ledger.freed_bytes));
        assert_eq!(told, [(2048, 0, 0, 2048), (0, 2048, 0, 2048)]);
        assert_eq!(held[1].end_epoch(7, patience).unwrap(), ledgers[1], "again, it only tells");
        assert_eq!(consumer.node.stats().buffer.num_entries, 0);
        assert_eq!(owner.node.stats().storage.num_entries, 1);
        let over = held[1].begin_epoch(7, patience).unwrap_err();
        assert!(matches!(over, StoreError::StepEnded { epoch: 7 }), "{over}");
        let over = held[0].claim(7, &ids(&["c"]), patience).unwrap_err();
        assert!(matches!(over, StoreError::StepEnded { epoch: 7 }), "{over}");
        assert!(held.iter().all(|held| held.is_alive()));
    });
}

#[test]
fn what_a_step_that_is_about_to_end_claimed_is_given_to_nobody_and_is_there_until_then() {
    let (owner, client) = (Owner::new(), Client::new());
    ["a", "b"].iter().for_each(|id| owner.store(id, b"abc"));
    let consumer = Owner::new();
    let missing = |id: &str| {
        within(20.0, |patience| consumer.node.fetch(&[owner.wanted(id, 3)], &Client::of_sockets(), patience))
            .is_err_and(|error| matches!(error, StoreError::Missing { .. }))
    };
    within(20.0, |patience| {
        let (mut held, mut other) = (client.hold(&owner.address()), client.hold(&owner.address()));
        held.claim(7, &ids(&["a"]), patience).unwrap();
        other.close_epoch(7, patience).unwrap();
        assert!(!missing("a"), "who has not claimed closes nothing");
        consumer.node.clear_buffer(None);
        held.close_epoch(7, patience).unwrap();
        assert!(missing("a") && !missing("b"));
        assert_eq!((owner.node.stats().storage.num_entries, unclaimed(&owner)), (2, 1));
        assert_eq!(other.claim(8, &ids(&["a"]), patience).unwrap().taken, ids(&["a"]));
        // It is as it was for all when who claimed it does not end the step.
        drop(held);
        until("claims are given up with their connection", || unclaimed(&owner) == 2);
        assert!(!missing("a"));
    });
}

#[test]
fn the_end_of_a_step_is_a_small_message() {
    let owner = Owner::new();
    let ended = owner.ask("POST", "/epoch/3/end", "", b"").json();
    assert_eq!((&ended["epoch"], &ended["has_ended"], &ended["held_bytes"]), (&json!(3), &json!(true), &json!(0)));
    assert_eq!(owner.ask("POST", "/epoch/3/end", "", b"").status, 200);
}

#[test]
fn claims_last_as_long_as_the_connection_that_they_were_made_on() {
    let (owner, client) = (Owner::new(), Client::new());
    ["a", "b"].iter().for_each(|id| owner.store(id, b"abc"));
    let address = owner.address();
    within(20.0, |patience| {
        let (mut first, mut second) = (client.hold(&address), client.hold(&address));
        first.claim(1, &ids(&["a"]), patience).unwrap();
        second.claim(2, &ids(&["b"]), patience).unwrap();
        assert_eq!(unclaimed(&owner), 0);
        drop(first);
        until("claims are given up with their connection", || unclaimed(&owner) == 1);
        assert_eq!(second.claim(2, &ids(&["b"]), patience).unwrap().taken, []);
        let taken = client.hold(&address).claim(3, &ids(&["a", "b"]), patience).unwrap();
        assert_eq!((taken.claimed_count, taken.taken), (1, ids(&["b"])));
    });
}

#[test]
fn a_connection_that_breaks_says_that_its_claims_are_gone() {
    let owner = Owner::new();
    owner.store("a", b"abc");
    let (client, address) = (Client::new(), owner.address());
    let mut held = client.hold(&address);
    within(20.0, |patience| {
        held.claim(1, &ids(&["a"]), patience).unwrap();
        drop(owner);
        until("the end of a server is seen", || !held.is_alive());
        let error = held.end_epoch(1, patience).unwrap_err();
        assert!(matches!(&error, StoreError::Unanswered { reason, .. } if reason.contains("given up")), "{error}");
        // Nothing is claimed any more: it is merely not there.
        let error = held.end_epoch(1, patience).unwrap_err();
        assert!(matches!(&error, StoreError::Unanswered { reason, .. } if !reason.contains("given up")), "{error}");
    });
}

#[test]
fn what_is_kept_from_afar_outlives_its_step() {
    let (owner, client) = (Owner::new(), Client::new());
    ["a", "b"].iter().for_each(|id| owner.store(id, b"abc"));
    let mut held = client.hold(&owner.address());
    within(20.0, |patience| {
        held.claim(1, &ids(&["a", "b"]), patience).unwrap();
        let kept = held.keep(&ids(&["a", "a", "never"]), patience).unwrap();
        assert_eq!((kept.shards, kept.entries), (1, 0));
        held.end_epoch(1, patience).unwrap();
    });
    assert_eq!((owner.node.stats().storage.num_entries, unclaimed(&owner)), (1, 1));
    // Whoever kept it: its end is nobody's loss.
    drop(held);
    within(20.0, |patience| {
        let claimed = client.hold(&owner.address()).claim(2, &ids(&["a"]), patience).unwrap();
        assert_eq!((claimed.claimed_count, claimed.kept), (1, ids(&["a"])));
    });
}

#[test]
fn what_one_keeps_of_anothers_step_ends_with_both() {
    let (owner, consumer, client) = (Owner::new(), Owner::new(), Client::new());
    ["a", "b", "c"].iter().for_each(|id| owner.store(id, b"abc"));
    let addresses = [owner.address(), consumer.address()];
    let entries = || (owner.node.stats().storage.num_entries, consumer.node.stats().buffer.num_entries);
    within(20.0, |patience| {
        let (mut step, mut keeper) =
            (addresses.each_ref().map(|one| client.hold(one)), addresses.each_ref().map(|one| client.hold(one)));
        step[1].begin_epoch(1, patience).unwrap();
        step[0].claim(1, &ids(&["a", "b", "c"]), patience).unwrap();
        let wanted = ["a", "b", "c"].map(|id| owner.wanted(id, 3));
        consumer.node.fetch(&wanted, &client, patience).unwrap();
        let kept = keeper.each_mut().map(|held| held.keep(&ids(&["a", "b"]), patience).unwrap());
        assert_eq!(kept.map(|kept| (kept.shards, kept.entries)), [(2, 0), (0, 2)]);
        // A third one claims it anew, whose it is from here on.
        let mut third = client.hold(&owner.address());
        assert_eq!(third.claim(2, &ids(&["b"]), patience).unwrap().kept, ids(&["b"]));
        step.iter_mut().for_each(|held| _ = held.end_epoch(1, patience).unwrap());
        assert_eq!(entries(), (2, 2));
        drop(keeper);
        until("what was kept ends with who kept it", || entries() == (1, 0));
        assert_eq!(unclaimed(&owner), 0);
    });
}

#[test]
fn what_is_kept_no_longer_is_its_steps_again_while_that_is_under_way() {
    let (owner, client) = (Owner::new(), Client::new());
    ["a", "b", "c"].iter().for_each(|id| owner.store(id, b"abc"));
    within(20.0, |patience| {
        let mut step = client.hold(&owner.address());
        step.claim(1, &ids(&["a", "b"]), patience).unwrap();
        let mut second = client.hold(&owner.address());
        second.claim(2, &ids(&["c"]), patience).unwrap();
        let mut keepers = [client.hold(&owner.address()), client.hold(&owner.address())];
        keepers.iter_mut().for_each(|held| _ = held.keep(&ids(&["a"]), patience).unwrap());
        let [one, other] = keepers;
        drop(one);
        assert_eq!(unclaimed(&owner), 1);
        drop(other);
        until("it is the step's again", || unclaimed(&owner) == 0);
        // A step whose claimant is gone takes nothing with it, nor does who kept something of it then.
        let mut keeper = client.hold(&owner.address());
        keeper.keep(&ids(&["b", "c"]), patience).unwrap();
        drop(step);
        until("what was claimed is unclaimed again", || unclaimed(&owner) == 3);
        drop(keeper);
        until("the keeper is gone", || unclaimed(&owner) == 2);
        second.end_epoch(2, patience).unwrap();
        assert_eq!((owner.node.stats().storage.num_entries, unclaimed(&owner)), (2, 2));
    });
}

#[test]
fn a_step_is_flushed_alone() {
    let (owner, consumer, client) = (Owner::new(), Owner::new(), Client::new());
    ["a", "b"].iter().for_each(|id| owner.store(id, b"abc"));
    let wanted = ["a", "b"].map(|id| owner.wanted(id, 3));
    within(20.0, |patience| {
        consumer.node.fetch(&wanted[..1], &client, patience).unwrap();
        let mut held = client.hold(&consumer.address());
        held.keep(&ids(&["a"]), patience).unwrap();
        held.begin_epoch(1, patience).unwrap();
        consumer.node.fetch(&wanted[1..], &client, patience).unwrap();
        // Others have no part in it.
        assert_eq!(client.hold(&consumer.address()).flush_epoch(1, patience).unwrap(), 0);
        assert_eq!([1, 1, 2].map(|epoch| held.flush_epoch(epoch, patience).unwrap()), [1, 0, 0]);
        // It goes on.
        consumer.node.fetch(&wanted, &client, patience).unwrap();
        let dropped = consumer.ask("DELETE", "/buffer/clear", "", br#"{"shard_ids": ["a", "b"]}"#).json();
        assert_eq!((&dropped["cleared_count"], &dropped["kept_count"]), (&json!(2), &json!(1)));
        assert_eq!(held.end_epoch(1, patience).unwrap().freed_bytes, 3 * 64);
    });
}

#[test]
fn a_step_that_is_flushed_is_no_newer_for_that() {
    let (consumer, client) = (Owner::new(), Client::new());
    within(20.0, |patience| {
        let mut held = client.hold(&consumer.address());
        (1..=3).for_each(|epoch| held.begin_epoch(epoch, patience).unwrap());
        held.flush_epoch(1, patience).unwrap();
        held.end_epoch(3, patience).unwrap();
        assert_eq!(consumer.node.current_epoch(), Some(2));
    });
}

#[test]
fn what_one_keeps_of_the_step_of_somebody_who_is_gone_is_dropped_by_consumers_with_who_keeps_it() {
    let (owner, consumer, client) = (Owner::new(), Owner::new(), Client::new());
    owner.store("a", b"abc");
    let (mut step, mut keeper) = (client.hold(&consumer.address()), client.hold(&consumer.address()));
    within(20.0, |patience| {
        step.begin_epoch(1, patience).unwrap();
        consumer.node.fetch(&[owner.wanted("a", 3)], &client, patience).unwrap();
        assert_eq!(keeper.keep(&ids(&["a"]), patience).unwrap().entries, 1);
    });
    drop(step);
    until("its step is over", || consumer.node.current_epoch().is_none());
    assert_eq!(consumer.node.stats().buffer.num_entries, 1);
    drop(keeper);
    until("nobody keeps it", || consumer.node.stats().buffer.num_entries == 0);
}

#[test]
fn long_lists_of_names_go_in_several_requests() {
    let (owner, consumer, client) = (Owner::new(), Owner::new(), Client::new());
    // One request has room for a quarter of a million.
    let ids: Vec<ShardId> = (0..270_000).map(|counter| ShardId::numbered(7, counter)).collect();
    let there = [&ids[0], &ids[269_999]].map(ShardId::to_string);
    there.iter().for_each(|id| owner.store(id, b"abc"));
    within(60.0, |patience| {
        let wanted = there.each_ref().map(|id| owner.wanted(id, 3));
        consumer.node.fetch(&wanted, &client, patience).unwrap();
        assert_eq!(client.clear_buffer(&consumer.address(), Some(&ids), patience).unwrap(), 2);
        let mut held = client.hold(&owner.address());
        let claimed = held.claim(1, &ids, patience).unwrap();
        assert_eq!((claimed.claimed_count, claimed.total_bytes), (2, 128));
        assert_eq!(claimed.missing, ids[1..269_999]);
        let removed = client.remove(&owner.address(), &ids, patience).unwrap();
        assert_eq!((removed.cleared_count, removed.num_tensors, removed.total_bytes), (2, 2, 128));
    });
}

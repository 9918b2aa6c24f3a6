//! Protocols with a missing or misplaced step: the model must find a loss in each of them.
//!
//! They are made by changing the log of a run that went well, so that the protocol itself needs no switches.

use std::collections::{BTreeMap, BTreeSet};

use crate::losses::{QUICK, THOROUGH};
use crate::model::{Change, ModelDisk, World};
use crate::run::Call;
use crate::{cut_in, life, oracle};

/// Whether cutting the power shows that something is wrong, in this call or in one of the next.
fn is_found_wanting(world: &World, calls: &[Call]) -> Option<String> {
    let care = [QUICK, THOROUGH];
    care.into_iter().find_map(|care| calls.iter().take(4).find_map(|call| cut_in(world, call, care).err()))
}

/// The run without the change at `at`.
fn without(world: &World, calls: &[Call], at: usize) -> (World, Vec<Call>) {
    let mut world = world.clone();
    world.log.remove(at);
    let shift = |length: usize| if length > at { length - 1 } else { length };
    let calls = calls.iter().map(|call| Call { first: shift(call.first), end: shift(call.end), ..call.clone() });
    (world, calls.collect())
}

/// The change before a sync, which the sync is for.
fn role(call: &str, log: &[Change], at: usize) -> String {
    let before = log[..at].iter().rev().find(|change| !matches!(change, Change::Write(..) | Change::Length(..)));
    format!("{call}: {}, {}", before.map(Change::describe).unwrap_or_default(), log[at].describe())
}

#[test]
fn every_sync_is_missed() {
    let run = life();
    let world = run.disk.world().clone();
    let mut found: BTreeMap<String, Option<String>> = BTreeMap::new();
    // An abandoned save and a root that is only opened again have nothing to lose.
    let calls = run.calls.iter().enumerate().filter(|(_, call)| !["give", "open"].contains(&call.verb()));
    for (number, call) in calls {
        for at in (call.first..call.end).filter(|&at| world.log[at].is_sync()) {
            let role = role(call.verb(), &world.log, at);
            let is_tried = !NOT_MISSED.contains(&role.as_str());
            let found = found.entry(role).or_default();
            if found.is_none() && is_tried {
                let (world, calls) = without(&world, &run.calls, at);
                *found = is_found_wanting(&world, &calls[number..]);
            }
        }
    }
    add_recoveries_of_killed(&world, &run.calls, &mut found);
    let not_missed: BTreeSet<&str> =
        found.iter().filter(|(_, violation)| violation.is_none()).map(|(role, _)| role.as_str()).collect();
    for (role, violation) in &found {
        println!("{role}: {}", violation.as_deref().unwrap_or("not missed"));
    }
    assert_eq!(not_missed, BTreeSet::from(NOT_MISSED));
    assert!(found.len() > 25);
}

/// The names of what is set aside and that of the intent are durable for the next save; here there is none. Where
/// the killed owner had come so far that nothing was left to set aside, nothing is to be made durable. And whatever the
/// writer does for the folders, who publishes does it again: writers on other machines cannot do it for him. A new name
/// and the intent are made durable again with the link that changes next; a full disk may have no room for a link.
const NOT_MISSED: [&str; 6] = [
    "discard: +.discard-after-, sync root",
    "publish: -.KIND-.incomplete +KIND-, sync root",
    "recover: -.discard-after-, sync root",
    "recover: sync root, sync root",
    "write: sync file, sync folder",
    "write: sync folder, sync folder",
];

/// The same of the recovery that follows a kill, whose changes before it are not durable yet.
fn add_recoveries_of_killed(world: &World, calls: &[Call], found: &mut BTreeMap<String, Option<String>>) {
    for call in calls.iter().filter(|call| call.before != call.after) {
        for length in call.first + 1..=call.end {
            let disk = ModelDisk::new(world.at(length));
            let (after, root) = oracle::check_recovery(&disk, &call.allowed(length)).unwrap();
            let world = disk.world().clone();
            drop(root);
            let before = [&call.before, &call.after].into_iter().find(|state| *state != after).unwrap();
            let recovery = Call {
                what: "recover".into(),
                first: length,
                end: world.log.len(),
                before: before.clone(),
                after: after.clone(),
            };
            for at in (length..world.log.len()).filter(|&at| world.log[at].is_sync()) {
                let role = role(recovery.verb(), &world.log[length..], at - length);
                let is_tried = !NOT_MISSED.contains(&role.as_str());
                let found = found.entry(role).or_default();
                if found.is_none() && is_tried {
                    let (world, calls) = without(&world, std::slice::from_ref(&recovery), at);
                    *found = is_found_wanting(&world, &calls);
                }
            }
        }
    }
}

/// The run with the change at `from` made at `to`, earlier or later in the same call.
fn moved(world: &World, from: usize, to: usize) -> World {
    let mut world = world.clone();
    let change = world.log.remove(from);
    world.log.insert(to, change);
    world
}

/// Where in a call a change is described so.
fn position(world: &World, call: &Call, description: &str) -> usize {
    (call.first..call.end)
        .find(|&at| world.log[at].describe() == description)
        .unwrap_or_else(|| panic!("no {description:?} in {}", call.what))
}

#[test]
fn every_step_out_of_turn_is_found() {
    let run = life();
    let world = run.disk.world().clone();
    let number = |what: &str| run.calls.iter().position(|call| call.what == what).unwrap();
    let name = "-.KIND-.incomplete +KIND-";
    let pointer = "-.KIND-latest.incomplete +KIND-latest";
    // The moved folder, and the one that it replaces.
    for (what, change, to) in [
        ("publish hf-1", name, "+tundish.json"),
        ("publish hf-1", name, "sync folder"),
        ("publish hf-1", name, pointer),
        ("remove hf-1", "-config.json", "-KIND- +.KIND-.removed-"),
        ("make room by hf-3", "-config.json", "-KIND- +.KIND-.removed-"),
        ("discard after 1", "-KIND- +discarded-KIND-", "+.discard-after-"),
        ("discard after 1", "-.discard-after-", "-KIND- +discarded-KIND-"),
    ] {
        let calls = &run.calls[number(what)..];
        let (from, to_place) = (position(&world, &calls[0], change), position(&world, &calls[0], to));
        let violation = is_found_wanting(&moved(&world, from, to_place), calls);
        println!("{what}: {change} where {to} was: {violation:?}");
        assert!(violation.is_some(), "{what}: {change} where {to} was is not found");
    }
}

#[test]
fn overwriting_in_two_steps_is_found() {
    let run = life();
    let mut world = run.disk.world().clone();
    let is_overwriting = |call: &&Call| {
        (call.first..call.end)
            .any(|at| call.verb() == "publish" && world.log[at].describe() == "+.KIND-.incomplete +KIND-")
    };
    let mut call = run.calls.iter().find(is_overwriting).unwrap().clone();
    let at = position(&world, &call, "+.KIND-.incomplete +KIND-");
    let Change::Names(names) = world.log[at].clone() else { panic!("an exchange changes names") };
    let (folder, name, _) = names[1].clone();
    // The old one goes, then the new one comes.
    world.log.splice(at..=at, [Change::Names(vec![(folder, name, None)]), Change::Names(names)]);
    call.end += 1;
    let violation = is_found_wanting(&world, &[call]);
    println!("{violation:?}");
    assert!(violation.is_some());
}

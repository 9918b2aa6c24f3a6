//! Power cuts at every point of a root's life, on a model of its disk.
//!
//! The method is that of "All File Systems Are Not Created Equal" (Pillai et al., OSDI 2014): a run of the real
//! protocol is logged. Every prefix of the log is taken, with all that a file system may make of what was not synced.
//! The real recovery has to make the old or the new state of it, bit by bit.

mod broken;
#[path = "../support/common/mod.rs"]
mod common;
mod losses;
mod model;
mod oracle;
mod run;

use std::collections::HashSet;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use tundish_commit::CheckpointKind;

use losses::{Care, QUICK, after_power_cut, is_soak, thorough};
use model::{ModelDisk, Node, Nodes, World};
use run::{Call, Run, State};

/// The calls of a long life of a root.
fn life() -> Run {
    let mut run = Run::new();
    run.save(CheckpointKind::Hf, 1, 1);
    run.save(CheckpointKind::Dcp, 1, 1);
    run.save(CheckpointKind::Hf, 2, 1);
    run.remove(CheckpointKind::Hf, 1);
    run.save(CheckpointKind::Hf, 2, 2);
    run.give_up(CheckpointKind::Dcp, 2);
    run.save(CheckpointKind::Dcp, 2, 1);
    run.reopen();
    run.save(CheckpointKind::Dcp, 3, 1);
    run.remove(CheckpointKind::Dcp, 1);
    run.discard_after(1);
    run.save(CheckpointKind::Hf, 2, 1);
    run.save(CheckpointKind::Dcp, 2, 2);
    run.save(CheckpointKind::Dcp, 2, 3);
    run.discard_after(1);
    run.save_both(3, 1);
    run.save_both(4, 1);
    run.make_room(CheckpointKind::Hf, 3);
    run.save(CheckpointKind::Dcp, 5, 1);
    run.make_room(CheckpointKind::Dcp, 3);
    run
}

/// A hash of the reachable contents.
fn fingerprint(nodes: &Nodes) -> u64 {
    fn add(nodes: &Nodes, number: usize, hasher: &mut DefaultHasher) {
        match &*nodes[number] {
            Node::File(bytes) => (0, bytes).hash(hasher),
            Node::Link(target) => (1, target).hash(hasher),
            Node::Folder(names) => {
                (2, names.len()).hash(hasher);
                for (name, &inner) in names.iter().filter(|(name, _)| *name != ".owner") {
                    name.hash(hasher);
                    add(nodes, inner, hasher);
                }
            }
        }
    }
    let mut hasher = DefaultHasher::new();
    add(nodes, 0, &mut hasher);
    hasher.finish()
}

/// Looks at a disk that may hold one of several states.
type Visitor<'v, 'a> = &'v mut dyn FnMut(Nodes, &[&'a State]) -> Result<(), String>;

/// The distinct disks that a machine may find after a power cut during a call, each with the states that it may hold.
fn visit_cuts<'a>(world: &World, call: &'a Call, care: Care, visit: Visitor<'_, 'a>) -> Result<usize, String> {
    let mut seen = HashSet::new();
    for length in call.first + 1..=call.end {
        let allowed = call.allowed(length);
        let mut violation = None;
        after_power_cut(world, length, care, &mut |nodes| {
            if violation.is_none() && seen.insert((fingerprint(&nodes), allowed.len())) {
                violation = visit(nodes, &allowed).err();
            }
        });
        if let Some(violation) = violation {
            let change = world.log[length - 1].describe();
            return Err(format!("{}, after change {} ({change}): {violation}", call.what, length - call.first));
        }
    }
    Ok(seen.len())
}

/// Cuts the power after every change of a call, and opens the root on each disk that may be left.
fn cut_in(world: &World, call: &Call, care: Care) -> Result<usize, String> {
    visit_cuts(world, call, care, &mut |nodes, allowed| {
        oracle::check_untouched(&nodes, allowed)?;
        oracle::check_recovery(&ModelDisk::new(World::new(nodes)), allowed).map(|_| ())
    })
}

/// Opens the root on a disk, and cuts the power after every change that this makes.
fn cut_in_recovery(disk: &ModelDisk, what: String, allowed: &[&State]) -> Result<usize, String> {
    let first = disk.length();
    let (after, root) = oracle::check_recovery(disk, allowed)?;
    let world = disk.world().clone();
    drop(root);
    let before = allowed.iter().find(|state| **state != after).unwrap_or(&after);
    let call = Call { what, first, end: world.log.len(), before: (*before).clone(), after: after.clone() };
    cut_in(&world, &call, QUICK)
}

#[test]
fn after_any_power_cut_the_old_or_the_new_state_is_there() {
    let run = life();
    let world = run.disk.world().clone();
    let mut states = 0;
    for call in &run.calls {
        let count = visit_cuts(&world, call, thorough(), &mut |nodes, allowed| {
            oracle::check_untouched(&nodes, allowed)?;
            let disk = ModelDisk::new(World::new(nodes));
            let (state, root) = oracle::check_recovery(&disk, allowed)?;
            drop(root);
            // A repaired root needs no repair.
            let again = run::open(&disk).map_err(|error| error.to_string())?;
            let recovered = again.recovered();
            if !recovered.repaired.is_empty() || !recovered.removed.is_empty() || !recovered.set_aside.is_empty() {
                return Err(format!("there was more to mend: {recovered:?}"));
            }
            oracle::check_life_goes_on(&disk, &again, state)
        });
        let count = count.unwrap_or_else(|violation| panic!("{violation}"));
        println!("{count:6} {}", call.what);
        states += count;
    }
    println!("{states} states");
    assert!(states >= 10_000, "only {states} states");
}

#[test]
fn a_recovery_survives_a_power_cut() {
    let run = life();
    let world = run.disk.world().clone();
    let every = if is_soak() { 5 } else { 200 };
    let mut states = 0;
    for call in &run.calls {
        let mut number = 0;
        let outcome = visit_cuts(&world, call, thorough(), &mut |nodes, allowed| {
            number += 1;
            if number % every == 0 {
                states += cut_in_recovery(&ModelDisk::new(World::new(nodes)), "opened again".into(), allowed)?;
            }
            Ok(())
        });
        outcome.unwrap_or_else(|violation| panic!("{violation}"));
    }
    println!("{states} states");
    assert!(states >= 1_000, "only {states} states");
}

#[test]
fn a_recovery_after_a_kill_survives_a_power_cut() {
    let run = life();
    let world = run.disk.world().clone();
    let mut states = 0;
    for call in &run.calls {
        // Many calls are alike: every fourth change of each will do, others here than there.
        let changes_nothing = call.before == call.after;
        let stride = if is_soak() { 2 } else { 4 };
        let is_tried = |length: &usize| *length == call.end || !changes_nothing && length.is_multiple_of(stride);
        for length in (call.first + 1..=call.end).filter(is_tried) {
            let disk = ModelDisk::new(world.at(length));
            let what = format!("killed in {} after change {}, and opened again", call.what, length - call.first);
            states += cut_in_recovery(&disk, what, &call.allowed(length)).unwrap_or_else(|found| panic!("{found}"));
        }
    }
    println!("{states} states");
    assert!(states >= 1_000, "only {states} states");
}

/// The owner was killed, perhaps because its disk was full, which it still is.
#[test]
fn a_full_disk_is_opened_and_makes_room() {
    let run = life();
    let world = run.disk.world().clone();
    let mut removed = 0;
    for call in run.calls.iter().filter(|call| ["publish", "remove", "make", "discard"].contains(&call.verb())) {
        for length in call.first + 1..=call.end {
            let context = format!("killed in {} after change {}", call.what, length - call.first);
            let disk = ModelDisk::new(world.at(length));
            disk.world().is_full = true;
            let root = run::open(&disk).unwrap_or_else(|error| panic!("{context}: {error}"));
            let listed = root.list().unwrap();
            for checkpoint in &listed {
                let (kind, step) = (checkpoint.kind, checkpoint.step);
                if listed.iter().all(|other| other.kind != kind || other.step <= step) {
                    continue;
                }
                root.remove(kind, step).unwrap_or_else(|error| panic!("{context}: {error}"));
                removed += 1;
                oracle::check_visible(&disk.world().nodes, &call.allowed(length))
                    .unwrap_or_else(|found| panic!("{context}: {found}"));
            }
            drop(root);
            let again = run::open(&disk).unwrap_or_else(|error| panic!("{context}: {error}"));
            assert!(again.recovered().failed.is_empty(), "{context}: {:?}", again.recovered());
        }
    }
    println!("{removed} removed");
    assert!(removed > 50);
}

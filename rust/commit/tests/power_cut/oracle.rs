//! The conditions on a disk after a power cut, before and after the root is opened again.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;

use tundish_commit::CheckpointKind;
use tundish_commit::root::Root;

use crate::model::{ModelDisk, Node, Nodes, World};
use crate::run::{State, Version, contents, manifest, open, write_files};

type Names = BTreeMap<OsString, usize>;

fn folder(nodes: &Nodes, number: usize) -> Option<&Names> {
    match &*nodes[number] {
        Node::Folder(names) => Some(names),
        _ => None,
    }
}

/// All files below a folder, by their relative names; `None` where something else lies there.
fn files(nodes: &Nodes, number: usize) -> Option<BTreeMap<String, &[u8]>> {
    let mut found = BTreeMap::new();
    for (name, &inner) in folder(nodes, number)? {
        let name = name.to_str()?;
        match &*nodes[inner] {
            Node::File(bytes) => {
                found.insert(name.to_owned(), bytes.as_slice());
            }
            Node::Folder(_) => {
                found.extend(files(nodes, inner)?.into_iter().map(|(file, bytes)| (format!("{name}/{file}"), bytes)));
            }
            Node::Link(_) => return None,
        }
    }
    Some(found)
}

/// Whether a folder holds a save bit by bit, and nothing else.
fn is_exactly(nodes: &Nodes, number: usize, kind: CheckpointKind, step: u64, version: Version) -> bool {
    let manifest = tundish_commit::add_manifest_checksum(&manifest(kind, step, version)).unwrap();
    let contents = contents(kind, step, version);
    let mut expected: BTreeMap<String, &[u8]> =
        contents.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.as_slice())).collect();
    expected.insert("tundish.json".into(), manifest.as_bytes());
    files(nodes, number) == Some(expected)
}

fn kind_and_step(name: &str) -> Option<(CheckpointKind, u64)> {
    let (kind, step) = name.split_once('-')?;
    Some((kind.parse().ok()?, step.parse().ok()?))
}

fn newest(state: &State, kind: CheckpointKind) -> Option<String> {
    let steps = state.published.keys().filter(|(other, _)| *other == kind);
    steps.max().map(|(kind, step)| format!("{kind}-{step}"))
}

/// Whether a name leads to a checkpoint as one of the states holds it.
fn is_whole(nodes: &Nodes, allowed: &[&State], name: &str) -> bool {
    let names = folder(nodes, 0).unwrap();
    let (Some(&number), Some((kind, step))) = (names.get(&OsString::from(name)), kind_and_step(name)) else {
        return false;
    };
    let mut versions = allowed.iter().filter_map(|state| state.published.get(&(kind, step)));
    versions.any(|&version| is_exactly(nodes, number, kind, step, version))
}

/// Checks that every visible checkpoint is whole, and that every link leads to one.
pub fn check_visible(nodes: &Nodes, allowed: &[&State]) -> Result<(), String> {
    for (name, &number) in folder(nodes, 0).unwrap() {
        let name = name.to_str().unwrap();
        if kind_and_step(name).is_some() && !is_whole(nodes, allowed, name) {
            return Err(format!("{name} is visible and not whole"));
        }
        if let Node::Link(target) = &*nodes[number]
            && !name.starts_with('.')
            && !is_whole(nodes, allowed, target.to_str().unwrap())
        {
            return Err(format!("{name} leads to {target:?}, which is not whole"));
        }
    }
    Ok(())
}

/// Checks what a reader finds in the root before it is opened again.
pub fn check_untouched(nodes: &Nodes, allowed: &[&State]) -> Result<(), String> {
    check_visible(nodes, allowed)?;
    let names = folder(nodes, 0).unwrap();
    let is_whole = |name: &str| is_whole(nodes, allowed, name);
    for kind in CheckpointKind::ALL {
        let target = match names.get(&OsString::from(format!("{kind}-latest"))).map(|&number| &*nodes[number]) {
            None => None,
            Some(Node::Link(target)) => Some(target.to_str().unwrap().to_owned()),
            Some(other) => return Err(format!("{kind}-latest is {other:?}")),
        };
        if !allowed.iter().any(|state| newest(state, kind) == target) {
            return Err(format!("{kind}-latest leads to {target:?}"));
        }
        if let Some(target) = target
            && !is_whole(&target)
        {
            return Err(format!("{kind}-latest leads to {target}, which is not whole"));
        }
    }
    if allowed.iter().all(|state| !state.published.is_empty())
        && !names.keys().any(|name| is_whole(name.to_str().unwrap()))
    {
        return Err("there was a checkpoint, and there is none".into());
    }
    Ok(())
}

/// Opens the root on a disk and checks what it makes of it; returns which of the allowed states that is.
pub fn check_recovery<'a>(disk: &ModelDisk, allowed: &[&'a State]) -> Result<(&'a State, Root<ModelDisk>), String> {
    let root = open(disk).map_err(|error| format!("it cannot be opened: {error}"))?;
    let recovered = root.recovered();
    if !recovered.failed.is_empty() || !recovered.ignored.is_empty() || !recovered.live.is_empty() {
        return Err(format!("not all was understood: {recovered:?}"));
    }
    let state = matching(&disk.world(), allowed)?;
    check_listing(&root, state)?;
    Ok((state, root))
}

fn matching<'a>(world: &World, allowed: &[&'a State]) -> Result<&'a State, String> {
    let nodes = &world.nodes;
    let names = folder(nodes, 0).unwrap();
    let held: BTreeMap<String, usize> =
        names.iter().map(|(name, &number)| (name.to_str().unwrap().to_owned(), number)).collect();
    let mut reasons = Vec::new();
    for &state in allowed {
        match differs(nodes, &held, state) {
            None => return Ok(state),
            Some(reason) => reasons.push(reason),
        }
    }
    Err(format!("neither the old nor the new state: {}", reasons.join("; ")))
}

/// Checks what the root says of itself.
fn check_listing(root: &Root<ModelDisk>, state: &State) -> Result<(), String> {
    let listed = root.list().map_err(|error| error.to_string())?;
    let listed: Vec<_> = listed.into_iter().map(|checkpoint| (checkpoint.kind, checkpoint.step)).collect();
    if !listed.iter().eq(state.published.keys()) {
        return Err(format!("it lists {listed:?}"));
    }
    Ok(())
}

/// How what the root holds differs from a state.
fn differs(nodes: &Nodes, held: &BTreeMap<String, usize>, state: &State) -> Option<String> {
    let mut expected: BTreeSet<String> = BTreeSet::new();
    for (&(kind, step), &version) in &state.published {
        let name = format!("{kind}-{step}");
        if !held.get(&name).is_some_and(|&number| is_exactly(nodes, number, kind, step, version)) {
            return Some(format!("{name} is not there as saved"));
        }
        expected.insert(name);
    }
    for (name, &(kind, step, version)) in &state.set_aside {
        if !held.get(name).is_some_and(|&number| is_exactly(nodes, number, kind, step, version)) {
            return Some(format!("{name} is not there as set aside"));
        }
        expected.insert(name.clone());
    }
    for kind in CheckpointKind::ALL {
        let pointer = format!("{kind}-latest");
        let target = held.get(&pointer).map(|&number| (*nodes[number]).clone());
        let right = newest(state, kind).map(|target| Node::Link(target.into()));
        if target != right {
            return Some(format!("{pointer} is {target:?} and not {right:?}"));
        }
        expected.extend(right.map(|_| pointer));
    }
    let unexpected: Vec<_> = held.keys().filter(|name| !expected.contains(*name) && *name != ".owner").collect();
    (!unexpected.is_empty()).then(|| format!("there are also {unexpected:?}"))
}

/// Saves once more, to see that life goes on.
pub fn check_life_goes_on(disk: &ModelDisk, root: &Root<ModelDisk>, state: &State) -> Result<(), String> {
    let kind = CheckpointKind::Hf;
    let step = 1 + state.published.keys().map(|(_, step)| *step).max().unwrap_or(0);
    let mut after = state.clone();
    after.published.insert((kind, step), 3);
    let folder = root.begin(kind, step, false).map_err(|error| format!("the next cannot be begun: {error}"))?;
    write_files(disk, &folder, kind, step, 3);
    root.publish(kind, step, &manifest(kind, step, 3), false)
        .map_err(|error| format!("the next cannot be published: {error}"))?;
    matching(&disk.world(), &[&after])?;
    check_listing(root, &after)
}

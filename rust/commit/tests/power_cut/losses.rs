//! The possible contents of a disk after a power cut.
//!
//! Durable is what was changed before an fsync of the file or folder it was changed in. Everything else may be lost or
//! kept, each change of names for itself and in any order; the bytes of a file may be lost, torn, or there while others
//! are zeros or rubbish of the right length; a symbolic link whose folder was not synced may say nothing. That is more
//! than any one file system in use does; a protocol that comes through it depends on none of them.
//!
//! Where changes are too many to try all combinations, some are tried: those that keep all, none, the first n, all but
//! one and only one, and some that a fixed rule draws.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::model::{Change, Node, Nodes, World, apply};

/// How much is tried.
#[derive(Debug, Clone, Copy)]
pub struct Care {
    /// Up to so many changes of names all combinations of them.
    all_of: usize,
    /// Of more, so many combinations that are drawn.
    drawn: usize,
    /// Whether each file has a fate of its own, or all the same.
    each_file: bool,
}

pub const THOROUGH: Care = Care { all_of: 8, drawn: 100, each_file: true };
/// Hundreds of thousands of states, for `make soak`.
const SOAKING: Care = Care { all_of: 11, drawn: 2000, each_file: true };
pub const QUICK: Care = Care { all_of: 4, drawn: 4, each_file: false };

/// The losses that a whole life is tried with.
pub fn thorough() -> Care {
    if is_soak() { SOAKING } else { THOROUGH }
}

/// Whether this is one of the long runs of `make soak`.
pub fn is_soak() -> bool {
    std::env::var_os("TUNDISH_SOAK").is_some_and(|value| value != "0")
}

/// The fate of unsynced bytes of a file, or of a link.
const FATES: [Fate; 5] = [Fate::Kept, Fate::Lost, Fate::Zeros, Fate::Torn, Fate::Rubbish];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Kept,
    Lost,
    Zeros,
    Torn,
    Rubbish,
}

/// Calls `visit` with everything that the disk may hold when the power is cut after the first `length` changes.
pub fn after_power_cut(world: &World, length: usize, care: Care, visit: &mut dyn FnMut(Nodes)) {
    let log = &world.log[..length];
    let last_sync = last_syncs(log);
    let is_durable = |position: usize, number: &usize| last_sync.get(number).is_some_and(|&sync| sync > position);
    let mut durable = world.before.clone();
    let mut names: Vec<&Change> = Vec::new();
    let mut bytes: BTreeMap<usize, Vec<&Change>> = BTreeMap::new();
    let mut links = Vec::new();
    let mut named = HashSet::new();
    for (position, change) in log.iter().enumerate() {
        match change {
            Change::Names(changes) => {
                let made: Vec<usize> = changes.iter().filter_map(|(_, _, to)| *to).collect();
                if changes.iter().all(|(folder, ..)| is_durable(position, folder)) {
                    apply(&mut durable, change);
                } else {
                    names.push(change);
                    let is_new = |to: &usize| world.made.contains(to) && !named.contains(to);
                    let is_link = |to: &usize| matches!(*world.before[*to], Node::Link(_));
                    links.extend(made.iter().copied().filter(|to| is_new(to) && is_link(to)));
                }
                named.extend(made);
            }
            Change::Write(file, ..) | Change::Length(file, _) if is_durable(position, file) => {
                apply(&mut durable, change);
            }
            Change::Write(file, ..) | Change::Length(file, _) => bytes.entry(*file).or_default().push(change),
            Change::SyncFile(_) | Change::SyncFolder(_) => {}
        }
    }
    let mut trees = HashSet::new();
    for kept in combinations(names.len(), care) {
        let mut nodes = durable.clone();
        names.iter().zip(&kept).filter(|(_, kept)| **kept).for_each(|(change, _)| apply(&mut nodes, change));
        // Unreachable contents may be anything.
        let (mut found, mut names) = (HashSet::new(), DefaultHasher::new());
        find(&nodes, 0, &mut found, &mut names);
        if !trees.insert(names.finish()) {
            continue;
        }
        let bytes: Vec<_> = bytes.iter().filter(|(file, _)| found.contains(file)).collect();
        let links: Vec<_> = links.iter().filter(|link| found.contains(link)).collect();
        for fates in fates(bytes.len() + links.len(), care) {
            let mut nodes = nodes.clone();
            for ((file, changes), &fate) in bytes.iter().zip(&fates) {
                lose(&mut nodes, **file, changes, fate);
            }
            for (&&link, &fate) in links.iter().zip(&fates[bytes.len()..]) {
                if fate != Fate::Kept {
                    nodes[link] = Arc::new(Node::Link("".into()));
                }
            }
            visit(nodes);
        }
    }
}

/// Everything that is reachable from a folder, with its names.
fn find(nodes: &Nodes, number: usize, found: &mut HashSet<usize>, tree: &mut DefaultHasher) {
    found.insert(number);
    number.hash(tree);
    if let Node::Folder(names) = &*nodes[number] {
        names.len().hash(tree);
        for (name, &inner) in names {
            name.hash(tree);
            find(nodes, inner, found, tree);
        }
    }
}

/// Where each file and folder was last synced.
fn last_syncs(log: &[Change]) -> HashMap<usize, usize> {
    let syncs = log.iter().enumerate().filter_map(|(position, change)| match change {
        Change::SyncFile(number) | Change::SyncFolder(number) => Some((*number, position)),
        _ => None,
    });
    syncs.collect()
}

/// Subsets of `count` changes to keep, each in turn.
fn combinations(count: usize, care: Care) -> Vec<Vec<bool>> {
    if count <= care.all_of {
        return (0..1u32 << count).map(|bits| (0..count).map(|bit| bits >> bit & 1 == 1).collect()).collect();
    }
    let mut all: Vec<Vec<bool>> = (0..=count).map(|first| (0..count).map(|n| n < first).collect()).collect();
    all.extend((0..count).map(|but| (0..count).map(|n| n != but).collect()));
    all.extend((0..count).map(|only| (0..count).map(|n| n == only).collect()));
    // Knuth's multiplicative generator of 64 bits.
    let mut drawn = 1u64;
    for _ in 0..care.drawn {
        let mut kept = Vec::new();
        for _ in 0..count {
            drawn = drawn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            kept.push(drawn >> 63 == 1);
        }
        all.push(kept);
    }
    all
}

/// Fates for `count` files: all the same; then one of them any, all others kept or all others lost.
fn fates(count: usize, care: Care) -> Vec<Vec<Fate>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let mut all: Vec<Vec<Fate>> = FATES.into_iter().map(|fate| vec![fate; count]).collect();
    if count > 1 && care.each_file {
        for other in [Fate::Kept, Fate::Lost] {
            for one in 0..count {
                for fate in FATES.into_iter().filter(|fate| *fate != other) {
                    let mut fates = vec![other; count];
                    fates[one] = fate;
                    all.push(fates);
                }
            }
        }
    }
    all
}

fn lose(nodes: &mut Nodes, file: usize, changes: &[&Change], fate: Fate) {
    if fate == Fate::Lost {
        return;
    }
    let Node::File(old) = (*nodes[file]).clone() else { panic!("bytes are in files") };
    changes.iter().for_each(|change| apply(nodes, change));
    let Node::File(bytes) = Arc::make_mut(&mut nodes[file]) else { panic!("bytes are in files") };
    let new: Vec<usize> = (0..bytes.len()).filter(|&at| old.get(at) != Some(&bytes[at])).collect();
    match fate {
        Fate::Kept | Fate::Lost => {}
        Fate::Zeros => new.iter().for_each(|&at| bytes[at] = 0),
        Fate::Rubbish => new.iter().for_each(|&at| bytes[at] = !bytes[at]),
        Fate::Torn => bytes.truncate(new.get(new.len() / 2).copied().unwrap_or(bytes.len())),
    }
}

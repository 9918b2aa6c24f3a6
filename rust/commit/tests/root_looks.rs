//! What people do to the checkpoints of a root is noticed at the next call, in few looks, whatever the root tells of what
//! lies in it.

#![expect(clippy::disallowed_methods, reason = "the tests play people and writers")]

mod common;
#[macro_use]
mod forwarding;
mod watched;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use common::Mount;
use tundish_commit::root::Root;
use tundish_commit::{CommitError, Kind};
use watched::{WatchedDisk, names, open, put, registered, save};

/// A disk, and what its folders tell of what lies in them.
type Teller = (&'static str, fn() -> WatchedDisk);

const TELLERS: [Teller; 4] = [
    ("all", || WatchedDisk::telling(|listed| listed)),
    ("nothing", || {
        WatchedDisk::telling(|mut listed| {
            listed.iter_mut().for_each(|one| one.number = None);
            listed
        })
    }),
    ("other numbers", || {
        WatchedDisk::telling(|mut listed| {
            listed.iter_mut().for_each(|one| one.number = one.number.map(|number| number + 1_000_000_007));
            listed
        })
    }),
    ("nothing yet of some names", || {
        WatchedDisk::telling(|mut listed| {
            listed.retain(|one| !one.name.to_string_lossy().ends_with(['2', '4', '6']));
            listed
        })
    }),
];

/// What people do to `hf-<step>`.
type Deed = (&'static str, fn(&Path));

const DEEDS: [Deed; 6] = [
    ("removed", |path| fs::remove_dir_all(path).unwrap()),
    ("renamed", |path| fs::rename(path, aside(path)).unwrap()),
    ("replaced by another", |path| {
        fs::rename(path, aside(path)).unwrap();
        let step = path.to_str().unwrap().rsplit('-').next().unwrap().parse().unwrap();
        put(path.parent().unwrap(), Kind::Hf, step);
    }),
    ("replaced by a link to itself", |path| {
        fs::rename(path, aside(path)).unwrap();
        std::os::unix::fs::symlink(aside(path), path).unwrap();
    }),
    ("replaced by a file", |path| {
        fs::remove_dir_all(path).unwrap();
        fs::write(path, "a file").unwrap();
    }),
    ("replaced by one of the other kind", |path| {
        fs::rename(path, aside(path)).unwrap();
        fs::rename(path.with_file_name("dcp-1"), path).unwrap();
    }),
];

fn aside(path: &Path) -> PathBuf {
    path.with_extension("kept")
}

fn hf(steps: &[u64]) -> Vec<String> {
    steps.iter().map(|step| format!("hf-{step}")).collect()
}

/// The names of a kind that are there.
fn of_hf(names: Vec<String>) -> Vec<String> {
    names.into_iter().filter(|name| name.starts_with("hf-")).collect()
}

/// A new root with `hf-1` to `hf-6` in a folder.
fn root_in(folder: &Path, disk: &WatchedDisk) -> Root<WatchedDisk> {
    (1..=6).for_each(|step| put(folder, Kind::Hf, step));
    (1..=2).for_each(|step| put(folder, Kind::Dcp, step));
    let root = open(disk, folder);
    assert_eq!(of_hf(names(&root)), hf(&[1, 2, 3, 4, 5, 6]));
    root
}

/// Every call, the first after the deed, knows of it.
fn check_deeds(scratch: &dyn Fn() -> tempfile::TempDir) {
    for (teller, disk) in TELLERS {
        for (deed, done) in DEEDS {
            let context = format!("{deed}, told {teller}");
            let made = || {
                let folder = scratch();
                let root = root_in(folder.path(), &disk());
                (folder, root)
            };
            // Listed no more.
            let (folder, root) = made();
            for step in [2, 3] {
                done(&folder.path().join(format!("hf-{step}")));
                // The one of the other kind is gone after the first time.
                let _ = fs::create_dir(folder.path().join("dcp-1"));
            }
            assert_eq!(of_hf(names(&root)), hf(&[1, 4, 5, 6]), "{context}");
            // Not the newest any more.
            let (folder, root) = made();
            done(&folder.path().join("hf-6"));
            assert_eq!(root.latest(Kind::Hf).unwrap(), Some(folder.path().join("hf-5")), "{context}");
            // In the way of no lower step.
            let (folder, root) = made();
            done(&folder.path().join("hf-6"));
            let lower = root.begin(Kind::Hf, 4, false).unwrap_err();
            assert!(matches!(lower, CommitError::StepOrder { newest: 5, .. }), "{context}: {lower}");
            root.begin(Kind::Hf, 5, true).unwrap_or_else(|error| panic!("{context}: {error}"));
            // Not recorded.
            let (folder, root) = made();
            done(&folder.path().join("hf-3"));
            save(&root, Kind::Hf, 7, "new");
            assert_eq!(of_hf(registered(folder.path())), hf(&[1, 2, 4, 5, 6, 7]), "{context}");
            // Not removed, whatever lies there now; and no longer recorded.
            let (folder, root) = made();
            let path = folder.path().join("hf-3");
            done(&path);
            let before = fs::symlink_metadata(&path).is_ok();
            let error = root.remove(Kind::Hf, 3).unwrap_err();
            assert!(matches!(error, CommitError::NoSuchCheckpoint { .. }), "{context}: {error}");
            assert_eq!(fs::symlink_metadata(&path).is_ok(), before, "{context}");
            assert_eq!(of_hf(registered(folder.path())), hf(&[1, 2, 4, 5, 6]), "{context}");
            // What is the newest by that stays.
            let (folder, root) = made();
            done(&folder.path().join("hf-6"));
            let error = root.remove(Kind::Hf, 5).unwrap_err();
            assert!(matches!(error, CommitError::CheckpointInUse { .. }), "{context}: {error}");
        }
    }
}

#[test]
fn what_people_do_is_noticed_at_the_next_call() {
    check_deeds(&|| tempfile::tempdir().unwrap());
}

#[test]
fn it_is_noticed_on_other_file_systems_too() {
    if let Some(mount) = Mount::new("tmpfs", "size=64m") {
        check_deeds(&|| tempfile::tempdir_in(&mount.path).unwrap());
        // Numbers of folders on overlayfs are not what a look tells.
        let layers = ["lower", "upper", "work"].map(|name| mount.path.join(name));
        layers.iter().for_each(|layer| fs::create_dir(layer).unwrap());
        let [lower, upper, work] = layers.map(|layer| layer.display().to_string());
        if let Some(overlay) = Mount::new("overlay", &format!("lowerdir={lower},upperdir={upper},workdir={work}")) {
            check_deeds(&|| tempfile::tempdir_in(&overlay.path).unwrap());
        }
    }
}

/// The folder then gives the number of what lies under it.
#[test]
fn what_something_is_mounted_over_is_not_that_checkpoint() {
    let Some(mount) = Mount::new("tmpfs", "size=1m") else { return };
    let folder = tempfile::tempdir().unwrap();
    let root = root_in(folder.path(), &WatchedDisk::new(|_, _| {}));
    let place = folder.path().join("hf-3");
    let run = |command: &str, arguments: &[&Path]| {
        assert!(Command::new(command).args(arguments).status().unwrap().success());
    };
    run("mount", &[Path::new("--bind"), &mount.path, &place]);
    let found = of_hf(names(&root));
    run("umount", &[&place]);
    assert_eq!(found, hf(&[1, 2, 4, 5, 6]));
}

#[test]
fn no_call_looks_at_each_checkpoint() {
    const COUNT: u64 = 300;
    let folder = tempfile::tempdir().unwrap();
    (1..=COUNT).for_each(|step| put(folder.path(), Kind::Hf, step));
    let calls: Arc<Mutex<BTreeMap<&'static str, usize>>> = Arc::default();
    let counted = Arc::clone(&calls);
    let disk = WatchedDisk::new(move |call, _| *counted.lock().unwrap().entry(call).or_default() += 1);
    let root = open(&disk, folder.path());
    if disk_tells_nothing(folder.path()) {
        common::skip("this file system does not tell which file has which name");
        return;
    }
    let during = |what: &str, work: &dyn Fn()| {
        calls.lock().unwrap().clear();
        work();
        let calls = std::mem::take(&mut *calls.lock().unwrap());
        let looks = ["look_at", "list", "list_with_numbers"].map(|call| calls.get(call).copied().unwrap_or_default());
        println!("{what}: {} calls: {calls:?}", calls.values().sum::<usize>());
        looks
    };
    let begun = during("begin", &|| watched::write(&root.begin(Kind::Hf, COUNT + 1, false).unwrap()));
    assert!(begun[0] <= 5 && begun[2] == 0, "{begun:?}");
    let manifest = watched::manifest(Kind::Hf, COUNT + 1, "new");
    let published = during("publish", &|| drop(root.publish(Kind::Hf, COUNT + 1, &manifest, false).unwrap()));
    assert!(published[0] <= 20 && published[2] == 1, "{published:?}");
    let listed = during("list", &|| assert_eq!(root.list().unwrap().len() as u64, COUNT + 1));
    assert_eq!(listed, [0, 0, 1]);
    let latest = during("latest", &|| assert!(root.latest(Kind::Hf).unwrap().is_some()));
    assert_eq!(latest, [1, 0, 0]);
    let removed = during("remove", &|| root.remove(Kind::Hf, 1).unwrap());
    assert!(removed[0] <= 20 && removed[2] == 1, "{removed:?}");
}

fn disk_tells_nothing(path: &Path) -> bool {
    use tundish_commit::disk::{Disk, RealDisk};
    let folder = RealDisk.open_path(path).unwrap();
    RealDisk.list_with_numbers(&folder, path).unwrap().iter().all(|listed| listed.number.is_none())
}

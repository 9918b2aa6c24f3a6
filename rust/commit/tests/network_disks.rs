//! Roots on network file systems: locks may be local to a machine or missing, and `renameat2` may be missing.
//!
//! The other machine is played by another identity on a disk whose locks never meet.

#![expect(clippy::disallowed_methods, reason = "the tests play people and other machines")]

#[macro_use]
#[path = "support/forwarding/mod.rs"]
mod forwarding;
#[path = "support/network_disk/mod.rs"]
mod network_disk;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use network_disk::{
    AFTER_LISTING, ETIMEDOUT, IS_CUT_OFF, LOCAL_LOCKS, LOSES_ANSWER, NO_LOCKS, NO_NEW_RENAMES, NetworkDisk, Outcome,
    REMEMBERED, RENUMBERS,
};
use tundish_commit::root::{HeartbeatTiming, OpenOptions, ProcessIdentity, ReadonlyRoot, Root, read_lock_at};
use tundish_commit::{CheckpointKind, CommitError, RealDisk};

const BEAT: Duration = Duration::from_millis(100);
const STALE: Duration = Duration::from_millis(1500);

/// A process on a machine of that name.
fn on(host: &str, wait: Duration) -> OpenOptions {
    let identity = ProcessIdentity {
        host: host.to_owned(),
        boot_id: format!("boot of {host}"),
        pid_space: "pid:[1]".into(),
        pid: 77,
        started: 5,
        program: String::new(),
    };
    OpenOptions { identity, timing: HeartbeatTiming { beat: BEAT, stale: STALE }, wait }
}

fn open(disk: NetworkDisk, path: &Path, opening: OpenOptions) -> Outcome<Root<NetworkDisk>> {
    Root::open(disk, path, opening, &mut || Ok(()))
}

fn save(root: &Root<NetworkDisk>, step: u64, overwrite: bool) -> Outcome<PathBuf> {
    let folder = root.begin(CheckpointKind::Hf, step, overwrite)?;
    fs::write(folder.join("weights"), [step as u8; 9]).unwrap();
    let manifest = format!(
        r#"{{"format_version": 1, "kind": "hf", "step": {step}, "files": [{{"name": "weights", "size": 9}}]}}"#
    );
    root.publish(CheckpointKind::Hf, step, &manifest, overwrite)
}

#[track_caller]
fn assert_in_use(outcome: Outcome<Root<NetworkDisk>>, by: &str) {
    match outcome {
        Err(CommitError::RootInUse { owner, .. }) => assert_eq!(owner, format!("process 77 on host {by}")),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("a root has two owners"),
    }
}

#[test]
fn a_heartbeat_shows_an_owner_on_another_machine() {
    // Each disk takes seconds, so both are tried at once.
    std::thread::scope(|scope| {
        for disk in [LOCAL_LOCKS, NO_LOCKS] {
            scope.spawn(move || heartbeat_shows_owner(disk));
        }
    });
}

fn heartbeat_shows_owner(disk: NetworkDisk) {
    let folder = tempfile::tempdir().unwrap();
    let one = open(disk, folder.path(), on("one", Duration::ZERO)).unwrap();
    assert_in_use(open(disk, folder.path(), on("other", Duration::ZERO)), "one");
    // The wait is longer than a record without heartbeats counts as live.
    assert_in_use(open(disk, folder.path(), on("other", 2 * STALE)), "one");
    save(&one, 1, false).unwrap();
    // A released root is taken over after one heartbeat, which shows the first of two owners.
    drop(one);
    let begun = Instant::now();
    let other = open(disk, folder.path(), on("other", Duration::ZERO)).unwrap();
    // time: one heartbeat, of which STALE has several; a wait would last that long at least
    assert!(begun.elapsed() < STALE);
    assert_eq!(other.list().unwrap().len(), 1);
}

#[test]
fn an_owner_without_heartbeat_is_replaced_and_notices() {
    let folder = tempfile::tempdir().unwrap();
    let mut stopped = on("one", Duration::ZERO);
    // As if the process were stopped: it writes no heartbeat while the other one waits.
    stopped.timing.beat = Duration::from_secs(2);
    let one = open(LOCAL_LOCKS, folder.path(), stopped).unwrap();
    save(&one, 1, false).unwrap();
    one.begin(CheckpointKind::Hf, 2, false).unwrap();
    let other = open(LOCAL_LOCKS, folder.path(), on("other", Duration::from_secs(60))).unwrap();
    save(&other, 2, false).unwrap();

    let lost = |outcome: Outcome<()>| match outcome {
        Err(CommitError::RootLost { reason, .. }) => assert_eq!(reason, "process 77 on host other took it over"),
        other => panic!("{other:?}"),
    };
    lost(one.begin(CheckpointKind::Hf, 3, false).map(drop));
    lost(one.publish(CheckpointKind::Hf, 2, "{}", false).map(drop));
    lost(one.abandon(CheckpointKind::Hf, 2));
    lost(one.remove(CheckpointKind::Hf, 1));
    lost(one.discard_after(0).map(drop));
    // Neither its heartbeat nor its release overwrites the other's record.
    std::thread::sleep(Duration::from_secs(3));
    drop(one);
    save(&other, 3, false).unwrap();
    assert_in_use(open(LOCAL_LOCKS, folder.path(), on("third", Duration::ZERO)), "other");
}

#[test]
fn one_of_two_machines_that_start_at_once_owns_the_root() {
    for disk in [LOCAL_LOCKS, NO_LOCKS] {
        for _ in 0..10 {
            let folder = tempfile::tempdir().unwrap();
            let start = Barrier::new(2);
            let owners: Vec<_> = std::thread::scope(|scope| {
                let open = |host| {
                    let (start, path) = (&start, folder.path());
                    scope.spawn(move || {
                        start.wait();
                        open(disk, path, on(host, Duration::ZERO))
                    })
                };
                [open("one"), open("other")]
                    .map(|thread| thread.join().unwrap())
                    .into_iter()
                    .filter_map(Result::ok)
                    .collect()
            });
            assert_eq!(owners.len(), 1);
            save(&owners[0], 1, false).unwrap();
        }
    }
}

#[test]
fn without_a_wait_a_live_owner_elsewhere_is_still_detected() {
    let folder = tempfile::tempdir().unwrap();
    for disk in [LOCAL_LOCKS, NO_LOCKS] {
        let owner = open(disk, folder.path(), on("one", Duration::ZERO)).unwrap();
        assert_in_use(open(disk, folder.path(), on("two", Duration::ZERO)), "one");
        // As if it were killed: it releases nothing and writes no heartbeat.
        let record = fs::read(folder.path().join(".owner")).unwrap();
        drop(owner);
        fs::write(folder.path().join(".owner"), record).unwrap();
        let begun = Instant::now();
        drop(open(disk, folder.path(), on("two", Duration::ZERO)).unwrap());
        assert!(begun.elapsed() >= STALE, "{:?}", begun.elapsed());
    }
}

#[test]
fn after_a_reboot_nobody_waits_on_a_local_disk() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_path_buf();
    let stale = Duration::from_secs(100);
    let opening = |host| OpenOptions { timing: HeartbeatTiming { beat: BEAT, stale }, ..on(host, Duration::ZERO) };
    let before = Root::open(RealDisk, &path, opening("one before"), &mut || Ok(())).unwrap();
    // It did not release the root. After a reboot its lock is gone; here this process still holds it and may take it
    // again.
    std::mem::forget(before);
    let begun = Instant::now();
    Root::open(RealDisk, &path, opening("one after"), &mut || Ok(())).unwrap();
    // time: opening takes milliseconds, half of the wait for a live owner is 50 s
    assert!(begun.elapsed() < stale / 2);
}

#[test]
fn the_callback_ends_the_wait() {
    let folder = tempfile::tempdir().unwrap();
    let _one = open(LOCAL_LOCKS, folder.path(), on("one", Duration::ZERO)).unwrap();
    let mut calls = 0;
    let mut on_wait = || {
        calls += 1;
        if calls < 3 { Ok(()) } else { Err(CommitError::Interrupted { path: folder.path().to_path_buf() }) }
    };
    let outcome = Root::open(LOCAL_LOCKS, folder.path(), on("other", Duration::from_secs(60)), &mut on_wait);
    assert!(matches!(outcome, Err(CommitError::Interrupted { .. })));
}

#[test]
fn an_owner_loses_a_root_whose_lock_file_is_removed_or_overwritten() {
    for spoil in [
        (|path| fs::remove_file(path).unwrap()) as fn(PathBuf),
        |path| fs::write(path, "something else").unwrap(),
        |path| {
            fs::copy(&path, path.with_file_name("copy")).unwrap();
            fs::rename(path.with_file_name("copy"), path).unwrap();
        },
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut opening = on("one", Duration::ZERO);
        opening.timing.beat = Duration::from_secs(3600);
        opening.timing.stale = Duration::from_secs(3600);
        let root = Root::open(RealDisk, folder.path(), opening, &mut || Ok(())).unwrap();
        spoil(folder.path().join(".owner"));
        assert!(matches!(root.begin(CheckpointKind::Hf, 1, false), Err(CommitError::RootLost { .. })));
    }
}

#[test]
fn without_locks_a_reader_is_told_that_it_holds_none() {
    let folder = tempfile::tempdir().unwrap();
    let root = open(NO_LOCKS, folder.path(), on("one", Duration::ZERO)).unwrap();
    save(&root, 1, false).unwrap();
    save(&root, 2, false).unwrap();
    let lock = read_lock_at(&NO_LOCKS, &folder.path().join("hf-1")).unwrap();
    assert!(!lock.is_locked());
    assert_eq!(lock.describe().unwrap().0.step, 1);
    root.remove(CheckpointKind::Hf, 1).unwrap();
    root.begin(CheckpointKind::Hf, 3, false).unwrap();
    drop(root);
    // Without locks the folder of a dead attempt is removed: no lock can show a live writer.
    let again = open(NO_LOCKS, folder.path(), on("one", Duration::ZERO)).unwrap();
    assert_eq!(again.recovered().removed.len(), 1);
}

#[test]
fn without_renameat2_checkpoints_are_published_but_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let root = open(NO_NEW_RENAMES, folder.path(), on("one", Duration::ZERO)).unwrap();
    save(&root, 1, false).unwrap();
    let error = save(&root, 1, true).unwrap_err();
    assert!(matches!(&error, CommitError::ExchangeUnsupported { path } if path.ends_with("hf-1")), "{error}");
    assert!(fs::read(folder.path().join("hf-1/weights")).unwrap() == [1; 9]);
    root.abandon(CheckpointKind::Hf, 1).unwrap();

    // A folder that appears meanwhile is not overwritten.
    let attempt = root.begin(CheckpointKind::Hf, 2, false).unwrap();
    fs::create_dir(folder.path().join("hf-2")).unwrap();
    let manifest = r#"{"format_version": 1, "kind": "hf", "step": 2, "files": []}"#;
    assert!(matches!(root.publish(CheckpointKind::Hf, 2, manifest, false), Err(CommitError::StepExists { .. })));
    assert!(attempt.is_dir());
    root.abandon(CheckpointKind::Hf, 2).unwrap();

    save(&root, 3, false).unwrap();
    root.remove(CheckpointKind::Hf, 1).unwrap();
    assert_eq!(root.discard_after(1).unwrap().len(), 2);
    drop(root);
    let names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!names.iter().any(|name| name.to_string_lossy().contains("incomplete")), "{names:?}");
    let watched = ReadonlyRoot::open(NO_NEW_RENAMES, folder.path()).unwrap();
    assert!(watched.list().unwrap().is_empty());
}

#[test]
fn latest_finds_a_checkpoint_that_replaced_the_newest() {
    let folder = tempfile::tempdir().unwrap();
    let root = open(LOCAL_LOCKS, folder.path(), on("one", Duration::ZERO)).unwrap();
    save(&root, 1, false).unwrap();
    let watcher = ReadonlyRoot::open(LOCAL_LOCKS, folder.path()).unwrap();
    AFTER_LISTING.set(Some(Box::new(move || {
        save(&root, 2, false).unwrap();
        root.remove(CheckpointKind::Hf, 1).unwrap();
    })));
    assert_eq!(watcher.latest(CheckpointKind::Hf).unwrap(), Some(folder.path().join("hf-2")));
}

#[test]
fn latest_does_not_wait_for_a_stale_listing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_path_buf();
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        let watcher = ReadonlyRoot::open(LOCAL_LOCKS, &path).unwrap();
        REMEMBERED.set(vec!["hf-1".into(), "hf-2".into()]);
        sender.send(watcher.latest(CheckpointKind::Hf).unwrap()).unwrap();
    });
    assert_eq!(receiver.recv_timeout(Duration::from_secs(10)), Ok(None));
}

/// The rename may have happened, and may not be durable. So the replaced checkpoint is not removed, and the step is not
/// begun again, before the root was opened again.
#[test]
fn a_publication_with_an_unknown_rename_is_not_repeated() {
    for is_replacing in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let root = open(LOCAL_LOCKS, folder.path(), on("one", Duration::ZERO)).unwrap();
        if is_replacing {
            save(&root, 2, false).unwrap();
        }
        let attempt = root.begin(CheckpointKind::Hf, 2, is_replacing).unwrap();
        fs::write(attempt.join("weights"), [7; 9]).unwrap();
        let manifest = r#"{"format_version": 1, "kind": "hf", "step": 2, "files": [{"name": "weights", "size": 9}]}"#;
        LOSES_ANSWER.set(true);
        let error = root.publish(CheckpointKind::Hf, 2, manifest, is_replacing).unwrap_err();
        assert!(
            matches!(&error, CommitError::Io { source, .. } if source.raw_os_error() == Some(ETIMEDOUT)),
            "{error}"
        );
        // A lock that this machine cannot see counts as absent.
        assert!(root.abandon(CheckpointKind::Hf, 2).is_err());
        IS_CUT_OFF.set(false);

        let _ = root.abandon(CheckpointKind::Hf, 2);
        assert!(root.list().unwrap().is_empty());
        let again = root.begin(CheckpointKind::Hf, 2, true).unwrap_err();
        assert!(matches!(again, CommitError::StepExists { .. }), "{again}");
        if is_replacing {
            assert!(fs::read(folder.path().join(".hf-2.incomplete/weights")).unwrap() == [2; 9]);
        }
        drop(root);
        let root = open(LOCAL_LOCKS, folder.path(), on("one", Duration::ZERO)).unwrap();
        assert_eq!(root.list().unwrap().len(), 1);
        assert!(fs::read(folder.path().join("hf-2/weights")).unwrap() == [7; 9]);
        save(&root, 2, true).unwrap();
    }
}

/// Nothing has happened then, and the step can be saved again.
#[test]
fn a_publication_without_a_rename_can_be_repeated() {
    let folder = tempfile::tempdir().unwrap();
    let root = open(LOCAL_LOCKS, folder.path(), on("one", Duration::ZERO)).unwrap();
    let attempt = root.begin(CheckpointKind::Hf, 2, false).unwrap();
    fs::write(attempt.join("weights"), [7; 9]).unwrap();
    let path = folder.path().to_path_buf();
    // After the second listing the name is not checked again before the rename.
    let appear = move || fs::create_dir(path.join("hf-2")).unwrap();
    AFTER_LISTING.set(Some(Box::new(|| AFTER_LISTING.set(Some(Box::new(appear))))));
    let manifest = r#"{"format_version": 1, "kind": "hf", "step": 2, "files": [{"name": "weights", "size": 9}]}"#;
    assert!(matches!(root.publish(CheckpointKind::Hf, 2, manifest, false), Err(CommitError::StepExists { .. })));
    root.abandon(CheckpointKind::Hf, 2).unwrap();
    fs::remove_dir(folder.path().join("hf-2")).unwrap();
    save(&root, 2, false).unwrap();
}

/// As on overlayfs whose layers lie on several file systems, once memory was short.
#[test]
fn a_checkpoint_with_a_new_inode_number_is_still_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let root = open(LOCAL_LOCKS, folder.path(), on("one", Duration::ZERO)).unwrap();
    // One that was found at opening, and one that was published since.
    save(&root, 1, false).unwrap();
    drop(root);
    let root = open(LOCAL_LOCKS, folder.path(), on("one", Duration::ZERO)).unwrap();
    save(&root, 2, false).unwrap();
    let steps = || root.list().unwrap().iter().map(|found| found.step).collect::<Vec<_>>();

    RENUMBERS.set(true);
    assert_eq!(steps(), [1, 2]);
    assert!(matches!(root.begin(CheckpointKind::Hf, 1, false), Err(CommitError::StepOrder { newest: 2, .. })));
    save(&root, 3, false).unwrap();
    assert_eq!(steps(), [1, 2, 3]);
    root.remove(CheckpointKind::Hf, 1).unwrap();
    assert_eq!(steps(), [2, 3]);
    // A folder that people put there is another one, whatever its manifest says.
    fs::rename(path("hf-2"), path("kept")).unwrap();
    fs::create_dir(path("hf-2")).unwrap();
    assert_eq!(steps(), [3]);
    fs::rename(path("hf-3"), path("kept-3")).unwrap();
    fs::create_dir(path("hf-3")).unwrap();
    for name in ["weights", "tundish.json"] {
        fs::copy(path("kept-3").join(name), path("hf-3").join(name)).unwrap();
    }
    assert_eq!(steps(), [0; 0]);
}

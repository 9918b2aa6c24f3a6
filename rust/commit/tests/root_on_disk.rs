//! A root on the real disk: several threads, readers, writers and mounts at once.

#![expect(clippy::disallowed_methods, reason = "the tests play people and writers")]

#[path = "support/common/mod.rs"]
mod common;

use std::fs;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use common::{Mount, entries};
use tundish_commit::disk::{Disk, LockMode, LockOutcome, Room};
use tundish_commit::root::{OpenOptions, ReadonlyRoot, Root, read_lock_at, verify_checkpoint};
use tundish_commit::{CheckpointKind, CommitError, RealDisk, ShardWriter};

const ENOSPC: i32 = 28;
const EROFS: i32 = 30;

fn open(path: &Path) -> Result<Root<RealDisk>, CommitError> {
    Root::open(RealDisk, path, OpenOptions::new(Duration::ZERO), &mut || Ok(()))
}

fn manifest(kind: CheckpointKind, step: u64) -> String {
    format!(
        r#"{{"format_version": 1, "kind": "{kind}", "step": {step}, "files": [{{"name": "inner/weights", "size": 9}}]}}"#
    )
}

fn write(folder: &Path, step: u64) {
    fs::create_dir(folder.join("inner")).unwrap();
    fs::write(folder.join("inner/weights"), [step as u8; 9]).unwrap();
}

fn save(root: &Root<RealDisk>, kind: CheckpointKind, step: u64) -> Result<PathBuf, CommitError> {
    write(&root.begin(kind, step, false)?, step);
    root.publish(kind, step, &manifest(kind, step), false)
}

fn assert_whole(checkpoint: &Path, step: u64) {
    assert_eq!(fs::read(checkpoint.join("inner/weights")).unwrap(), [step as u8; 9]);
    assert!(checkpoint.join("tundish.json").is_file());
}

#[test]
fn both_kinds_are_saved_pruned_and_read_at_once() {
    const STEPS: u64 = 60;
    let folder = tempfile::tempdir().unwrap();
    let root = open(folder.path()).unwrap();
    let over = AtomicBool::new(false);
    let (read, kept) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let savers = CheckpointKind::ALL.map(|kind| {
            let (root, kept) = (&root, &kept);
            scope.spawn(move || {
                for step in 1..=STEPS {
                    save(root, kind, step).unwrap();
                    let old = root.list().unwrap().into_iter().filter(|found| found.kind == kind && found.step < step);
                    for found in old {
                        match root.remove(kind, found.step) {
                            Ok(()) => {}
                            Err(CommitError::CheckpointInUse { .. }) => drop(kept.fetch_add(1, Ordering::Relaxed)),
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
            })
        });
        for kind in CheckpointKind::ALL {
            let (path, over, read) = (folder.path(), &over, &read);
            scope.spawn(move || {
                let watcher = ReadonlyRoot::open(RealDisk, path).unwrap();
                while !over.load(Ordering::Relaxed) {
                    for found in watcher.list().unwrap().into_iter().filter(|found| found.kind == kind) {
                        let Ok(lock) = watcher.read_lock(kind, found.step) else { continue };
                        for _ in 0..3 {
                            assert_whole(lock.path(), found.step);
                            std::thread::yield_now();
                        }
                        read.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        for saver in savers {
            let outcome = saver.join();
            over.store(true, Ordering::Relaxed);
            outcome.unwrap();
        }
    });
    assert!(read.into_inner() > 0);
    println!("{} stayed for a reader", kept.into_inner());
    for kind in CheckpointKind::ALL {
        let newest = root.list().unwrap().into_iter().rfind(|found| found.kind == kind).unwrap();
        assert_eq!(newest.path, folder.path().join(format!("{kind}-{STEPS}")));
    }
    root.list().unwrap().iter().for_each(|found| assert_whole(&found.path, found.step));
}

#[test]
fn the_folder_of_a_live_writer_is_not_removed() {
    let folder = tempfile::tempdir().unwrap();
    let root = open(folder.path()).unwrap();
    let attempt = root.begin(CheckpointKind::Hf, 1, false).unwrap();
    let files = [("weights", 9)];
    let writer = ShardWriter::create(&attempt, &files, false, &mut || ControlFlow::Continue(())).unwrap();
    drop(root);
    // The owner has died; the writer is that of another rank, which has not heard of it.
    let root = open(folder.path()).unwrap();
    assert_eq!(root.recovered().live, [attempt.display().to_string()]);
    assert!(root.recovered().removed.is_empty());
    // The step can be saved again, and this writer cannot write into the new save.
    write(&root.begin(CheckpointKind::Hf, 1, false).unwrap(), 1);
    assert_eq!(entries(&folder.path().join(".hf-1.removed-0")), ["weights"]);
    assert_eq!(entries(&attempt), ["inner"]);
    root.publish(CheckpointKind::Hf, 1, &manifest(CheckpointKind::Hf, 1), false).unwrap();
    drop(root);
    assert_eq!(open(folder.path()).unwrap().recovered().live.len(), 1);
    drop(writer);
    let root = open(folder.path()).unwrap();
    assert_eq!(root.recovered().removed, [folder.path().join(".hf-1.removed-0").display().to_string()]);
    assert_whole(&folder.path().join("hf-1"), 1);
}

#[test]
fn a_leftover_that_cannot_be_removed_does_not_block_opening() {
    let folder = tempfile::tempdir().unwrap();
    let leftover = folder.path().join(".hf-1.incomplete");
    fs::create_dir(&leftover).unwrap();
    let Some(mount) = Mount::new("tmpfs", "size=1m") else { return };
    fs::write(mount.path.join("keep"), "keep").unwrap();
    let inner = leftover.join("mounted");
    fs::create_dir(&inner).unwrap();
    let bind = |command: &str, arguments: &[&Path]| {
        assert!(std::process::Command::new(command).args(arguments).status().unwrap().success());
    };
    bind("mount", &[Path::new("--bind"), &mount.path, &inner]);
    let opened = open(folder.path());
    bind("umount", &[&inner]);
    let root = opened.unwrap();
    assert_eq!(root.recovered().failed.len(), 1, "{:?}", root.recovered());
    assert!(root.recovered().failed[0].contains("mounted"), "{:?}", root.recovered());
    assert_eq!(fs::read_to_string(mount.path.join("keep")).unwrap(), "keep");
    // The step itself can be saved.
    save(&root, CheckpointKind::Hf, 1).unwrap();
}

#[test]
fn a_full_disk_fails_the_save_and_costs_nothing() {
    let Some(mount) = Mount::new("tmpfs", "size=256k") else { return };
    let root = open(&mount.path).unwrap();
    save(&root, CheckpointKind::Hf, 1).unwrap();
    write(&root.begin(CheckpointKind::Hf, 2, false).unwrap(), 2);
    let filler = fill(&mount);
    let error = root.publish(CheckpointKind::Hf, 2, &manifest(CheckpointKind::Hf, 2), false).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(ENOSPC), "{error}");
    root.abandon(CheckpointKind::Hf, 2).unwrap();
    assert_eq!(root.list().unwrap().len(), 1);
    fs::remove_file(&filler).unwrap();
    save(&root, CheckpointKind::Hf, 2).unwrap();
    assert_eq!(entries(&mount.path), [".owner", "hf-1", "hf-2", "hf-latest"]);
}

/// Leaves no room in a file system.
fn fill(mount: &Mount) -> PathBuf {
    let filler = mount.path.join("filler");
    let mut file = fs::File::create(&filler).unwrap();
    while file.write_all(&[1; 4096]).is_ok() {}
    filler
}

#[test]
fn on_a_full_disk_old_checkpoints_make_room() {
    let Some(mount) = Mount::new("tmpfs", "size=256k") else { return };
    let root = open(&mount.path).unwrap();
    (1..=3).for_each(|step| drop(save(&root, CheckpointKind::Hf, step).unwrap()));
    // Its publication was cut short by the full disk, before the link.
    write(&root.begin(CheckpointKind::Hf, 4, false).unwrap(), 4);
    drop(root);
    let sealed = tundish_commit::add_manifest_checksum(&manifest(CheckpointKind::Hf, 4)).unwrap();
    fs::write(mount.path.join(".hf-4.incomplete/tundish.json"), sealed).unwrap();
    fs::rename(mount.path.join(".hf-4.incomplete"), mount.path.join("hf-4")).unwrap();
    let filler = fill(&mount);

    let root = open(&mount.path).unwrap();
    root.remove(CheckpointKind::Hf, 1).unwrap();
    root.remove(CheckpointKind::Hf, 2).unwrap();
    drop(root);
    let root = open(&mount.path).unwrap();
    assert!(root.recovered().failed.is_empty() && root.recovered().repaired.is_empty(), "{:?}", root.recovered());
    assert_eq!(entries(&mount.path), [".owner", "filler", "hf-3", "hf-4", "hf-latest"]);
    assert_eq!(fs::read_link(mount.path.join("hf-latest")).unwrap(), Path::new("hf-4"));
    fs::remove_file(filler).unwrap();
    save(&root, CheckpointKind::Hf, 5).unwrap();
}

#[test]
fn on_a_full_disk_checkpoints_are_set_aside() {
    let Some(mount) = Mount::new("tmpfs", "size=256k") else { return };
    let root = open(&mount.path).unwrap();
    (1..=4).for_each(|step| drop(save(&root, CheckpointKind::Hf, step).unwrap()));
    let filler = fill(&mount);
    assert_eq!(root.discard_after(2).unwrap().len(), 2);
    root.remove(CheckpointKind::Hf, 1).unwrap();
    drop(root);
    fs::remove_file(filler).unwrap();
    open(&mount.path).unwrap();
    let left = [".owner", "discarded-hf-3", "discarded-hf-4", "hf-2", "hf-latest"];
    assert_eq!(entries(&mount.path), left);
    assert_eq!(fs::read_link(mount.path.join("hf-latest")).unwrap(), Path::new("hf-2"));
}

#[test]
fn without_inodes_checkpoints_are_published_and_removed() {
    let Some(mount) = Mount::new("tmpfs", "size=1m,nr_inodes=40") else { return };
    let root = open(&mount.path).unwrap();
    (1..=3).for_each(|step| drop(save(&root, CheckpointKind::Hf, step).unwrap()));
    let room = Room { bytes: 9, files: 4 };
    assert!(root.reserve(CheckpointKind::Hf, 4, false, room).unwrap().files > 4);
    write(&root.begin(CheckpointKind::Hf, 4, false).unwrap(), 4);
    let fillers = (0..).map(|number| mount.path.join(format!("filler-{number}")));
    let fillers: Vec<_> = fillers.take_while(|filler| fs::write(filler, "").is_ok()).collect();
    let free = root.reserve(CheckpointKind::Dcp, 4, false, room).unwrap();
    // The manifest of the other.
    assert_eq!(free.files, 0);
    let error = root.begin(CheckpointKind::Dcp, 4, false).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(ENOSPC), "{error}");
    // Room for the manifest, and for no second link.
    fs::remove_file(&fillers[0]).unwrap();
    root.publish(CheckpointKind::Hf, 4, &manifest(CheckpointKind::Hf, 4), false).unwrap();
    assert_eq!(fs::read_link(mount.path.join("hf-latest")).unwrap(), Path::new("hf-4"));
    root.remove(CheckpointKind::Hf, 1).unwrap();
    assert_eq!(root.reserve(CheckpointKind::Dcp, 4, false, room).unwrap().files, 4);
    root.abandon(CheckpointKind::Dcp, 4).unwrap();
    save(&root, CheckpointKind::Dcp, 4).unwrap();
    assert_eq!(root.list().unwrap().len(), 4);
}

#[test]
fn on_a_full_disk_the_start_removes_leftovers_first() {
    let Some(mount) = Mount::new("tmpfs", "size=256k") else { return };
    save(&open(&mount.path).unwrap(), CheckpointKind::Hf, 1).unwrap();
    fs::create_dir(mount.path.join(".hf-2.incomplete")).unwrap();
    fs::write(mount.path.join(".hf-2.incomplete/model.safetensors"), [1; 9000]).unwrap();
    fs::remove_file(mount.path.join("hf-latest")).unwrap();
    fill(&mount);
    let root = open(&mount.path).unwrap();
    let recovered = root.recovered();
    assert!(recovered.failed.is_empty() && recovered.repaired.len() == 1, "{recovered:?}");
}

#[test]
fn a_root_that_cannot_be_written_is_refused_and_can_be_read() {
    let Some(mount) = Mount::new("tmpfs", "size=1m") else { return };
    save(&open(&mount.path).unwrap(), CheckpointKind::Hf, 1).unwrap();
    mount.remount("ro");
    let error = open(&mount.path).err().unwrap();
    assert_eq!(error.raw_os_error(), Some(EROFS), "{error}");
    let watcher = ReadonlyRoot::open(RealDisk, &mount.path).unwrap();
    assert_eq!(watcher.latest(CheckpointKind::Hf).unwrap(), Some(mount.path.join("hf-1")));
    watcher.read_lock(CheckpointKind::Hf, 1).unwrap();
}

#[test]
fn a_removed_root_fails_later_calls() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("root");
    let root = open(&path).unwrap();
    write(&root.begin(CheckpointKind::Hf, 1, false).unwrap(), 1);
    fs::remove_dir_all(&path).unwrap();
    let lost = |outcome: Result<PathBuf, CommitError>| matches!(outcome, Err(CommitError::RootLost { .. }));
    assert!(lost(root.publish(CheckpointKind::Hf, 1, &manifest(CheckpointKind::Hf, 1), false)));
    assert!(lost(root.begin(CheckpointKind::Hf, 2, false)));
    drop(root);
    assert!(!path.exists());
}

#[test]
fn foreign_manifests_of_any_size_and_kind_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let root = open(folder.path()).unwrap();
    for step in 1..=4 {
        save(&root, CheckpointKind::Hf, step).unwrap();
    }
    drop(root);
    let manifest = |step: u64| folder.path().join(format!("hf-{step}/tundish.json"));
    // A sparse terabyte; a pipe without a writer; a link to a whole checkpoint; a link to itself.
    fs::File::options().write(true).open(manifest(4)).unwrap().set_len(1 << 40).unwrap();
    fs::remove_file(manifest(3)).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(manifest(3)).status().unwrap().success());
    fs::remove_file(manifest(2)).unwrap();
    std::os::unix::fs::symlink("../hf-1/tundish.json", manifest(2)).unwrap();
    std::os::unix::fs::symlink("hf-5", folder.path().join("hf-5")).unwrap();
    let root = open(folder.path()).unwrap();
    let listed: Vec<_> = root.list().unwrap().into_iter().map(|found| found.step).collect();
    assert_eq!(listed, [1]);
    assert_eq!(root.recovered().ignored.len(), 4, "{:?}", root.recovered());
    // Each of them is still in the way of its step, and is set aside with it.
    for step in 2..=4 {
        assert!(matches!(root.begin(CheckpointKind::Hf, step, false), Err(CommitError::StepExists { .. })));
    }
    assert_eq!(root.discard_after(1).unwrap().len(), 3);
    save(&root, CheckpointKind::Hf, 2).unwrap();
}

#[test]
fn a_closed_root_leaves_unfinished_checkpoints_to_the_next_owner() {
    let folder = tempfile::tempdir().unwrap();
    let closed = open(folder.path()).unwrap();
    write(&closed.begin(CheckpointKind::Hf, 1, false).unwrap(), 1);
    closed.close();
    // The closed root still exists, as when Python keeps a reference to it.
    let next = open(folder.path()).unwrap();
    let left = folder.path().join(".hf-1.incomplete").display().to_string();
    assert_eq!((&next.recovered().removed, &next.recovered().live), (&vec![left], &vec![]));
    assert_eq!(entries(folder.path()), [".owner"]);
    drop(closed);
}

#[test]
fn a_survey_gives_the_reason_for_each_damaged_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let root = open(folder.path()).unwrap();
    for step in [1, 2, 3] {
        save(&root, CheckpointKind::Dcp, step).unwrap();
    }
    fs::write(folder.path().join("dcp-2/inner/weights"), [2; 8]).unwrap();
    fs::remove_file(folder.path().join("dcp-3/tundish.json")).unwrap();
    fs::write(folder.path().join("hf-4"), "a file").unwrap();
    let survey = ReadonlyRoot::open(RealDisk, folder.path()).unwrap().survey().unwrap();
    assert_eq!(survey.whole.iter().map(|one| (one.kind, one.step)).collect::<Vec<_>>(), [(CheckpointKind::Dcp, 1)]);
    let damaged: Vec<_> = survey
        .damaged
        .iter()
        .map(|one| (one.kind, one.step, one.path.file_name().unwrap().to_str().unwrap()))
        .collect();
    assert_eq!(
        damaged,
        [(CheckpointKind::Dcp, 2, "dcp-2"), (CheckpointKind::Dcp, 3, "dcp-3"), (CheckpointKind::Hf, 4, "hf-4")]
    );
    let reasons: Vec<_> = survey.damaged.iter().map(|one| one.reason.as_str()).collect();
    assert_eq!(reasons[0], "inner/weights has 8 bytes in the place of 9");
    assert_eq!(reasons[1], "it has no tundish.json");
    assert!(reasons[2].contains("hf-4"), "{reasons:?}");
}

#[test]
fn a_checkpoint_removed_meanwhile_is_not_reported_as_damaged() {
    const ROUNDS: u64 = 300;
    let folder = tempfile::tempdir().unwrap();
    let root = open(folder.path()).unwrap();
    save(&root, CheckpointKind::Hf, 0).unwrap();
    let over = AtomicBool::new(false);
    let verified = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let (path, over, verified) = (folder.path(), &over, &verified);
        for _ in 0..2 {
            scope.spawn(move || {
                let watcher = ReadonlyRoot::open(RealDisk, path).unwrap();
                while !over.load(Ordering::Relaxed) {
                    let survey = watcher.survey().unwrap();
                    assert!(survey.damaged.is_empty(), "{:?}", survey.damaged);
                    for one in survey.whole {
                        match verify_checkpoint(&one.path, &mut |_, _| ControlFlow::Continue(())) {
                            Ok(_) => drop(verified.fetch_add(1, Ordering::Relaxed)),
                            Err(CommitError::NoSuchCheckpoint { .. }) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                }
            });
        }
        for step in 1..=ROUNDS {
            save(&root, CheckpointKind::Hf, step).unwrap();
            // Each is replaced once, then removed, unless it is read just now.
            if root.begin(CheckpointKind::Hf, step, true).is_ok_and(|attempt| {
                write(&attempt, step);
                root.publish(CheckpointKind::Hf, step, &manifest(CheckpointKind::Hf, step), true).is_err()
            }) {
                root.abandon(CheckpointKind::Hf, step).unwrap();
            }
            let _ = root.remove(CheckpointKind::Hf, step - 1);
        }
        over.store(true, Ordering::Relaxed);
    });
    assert!(verified.into_inner() > 0);
}

#[test]
fn a_read_lock_by_path_keeps_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let root = open(folder.path()).unwrap();
    let first = save(&root, CheckpointKind::Dcp, 1).unwrap();
    save(&root, CheckpointKind::Dcp, 2).unwrap();
    let lock = read_lock_at(&RealDisk, &first).unwrap();
    assert!(lock.is_locked());
    let error = root.remove(CheckpointKind::Dcp, 1).unwrap_err();
    assert!(matches!(error, CommitError::CheckpointInUse { .. }), "{error}");
    let (described, files, checksum) = lock.describe().unwrap();
    assert_eq!((described.kind, described.step, described.bytes), (CheckpointKind::Dcp, 1, 9));
    let names = files.into_iter().map(|file| file.name).collect();
    assert!(lock.verify_files(&names, false, &mut |_, _| ControlFlow::Continue(())).unwrap().is_empty());
    let (_, _, other) = read_lock_at(&RealDisk, &folder.path().join("dcp-latest")).unwrap().describe().unwrap();
    assert_ne!(checksum, other);
    drop(lock);
    root.remove(CheckpointKind::Dcp, 1).unwrap();
    let gone = read_lock_at(&RealDisk, &first).unwrap_err();
    assert!(matches!(gone, CommitError::NoSuchCheckpoint { .. }), "{gone}");
    // A folder without a manifest is none, and one that is cut short says so.
    fs::create_dir(folder.path().join("none")).unwrap();
    let none = read_lock_at(&RealDisk, &folder.path().join("none")).unwrap_err();
    assert!(matches!(none, CommitError::NoSuchCheckpoint { .. }), "{none}");
    fs::write(folder.path().join("dcp-2/inner/weights"), [2; 8]).unwrap();
    let lock = read_lock_at(&RealDisk, &folder.path().join("dcp-2")).unwrap();
    let damaged = lock.verify_files(&names, false, &mut |_, _| ControlFlow::Continue(())).unwrap();
    assert_eq!(damaged.into_iter().map(|damage| damage.name).collect::<Vec<_>>(), ["inner/weights"]);
}

#[test]
fn a_root_is_created_only_in_an_existing_parent() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("not mounted/run");
    match open(&missing) {
        Err(CommitError::ParentMissing { path }) => assert_eq!(path, folder.path().join("not mounted")),
        other => panic!("{:?}", other.err()),
    }
    assert!(entries(folder.path()).is_empty());
    open(&folder.path().join("run")).unwrap();
}

#[test]
fn a_checkpoint_is_replaced_after_its_readers_end() {
    let folder = tempfile::tempdir().unwrap();
    let root = open(folder.path()).unwrap();
    save(&root, CheckpointKind::Hf, 1).unwrap();
    write(&root.begin(CheckpointKind::Hf, 1, true).unwrap(), 2);
    let lock = read_lock_at(&RealDisk, &folder.path().join("hf-1")).unwrap();
    for _ in 0..2 {
        let error = root.publish(CheckpointKind::Hf, 1, &manifest(CheckpointKind::Hf, 1), true).unwrap_err();
        assert!(matches!(error, CommitError::CheckpointInUse { .. }), "{error}");
        assert_whole(lock.path(), 1);
    }
    drop(lock);
    assert_whole(&root.publish(CheckpointKind::Hf, 1, &manifest(CheckpointKind::Hf, 1), true).unwrap(), 2);
    assert_eq!(entries(folder.path()), [".owner", "hf-1", "hf-latest"]);
}

#[test]
fn a_locked_checkpoint_is_not_reported_as_missing() {
    let folder = tempfile::tempdir().unwrap();
    let root = open(folder.path()).unwrap();
    let path = save(&root, CheckpointKind::Dcp, 1).unwrap();
    let manifest = path.join("tundish.json");
    let foreign_lock = fs::File::open(&manifest).unwrap();
    assert_eq!(RealDisk.lock_file(&foreign_lock, LockMode::Exclusive, &manifest).unwrap(), LockOutcome::Taken);
    // Each waits for seconds, so both wait at once.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let error = read_lock_at(&RealDisk, &path).unwrap_err();
            assert!(matches!(&error, CommitError::CheckpointLocked { path: locked } if *locked == path), "{error}");
        });
        let error = verify_checkpoint(&path, &mut |_, _| ControlFlow::Continue(())).unwrap_err();
        assert!(matches!(error, CommitError::CheckpointLocked { .. }), "{error}");
    });
    drop(foreign_lock);
    assert!(read_lock_at(&RealDisk, &path).unwrap().is_locked());
}

#[test]
fn a_folder_named_like_a_discard_marker_is_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let root = open(folder.path()).unwrap();
    for step in [1, 2] {
        save(&root, CheckpointKind::Hf, step).unwrap();
    }
    drop(root);
    let intent = folder.path().join(".discard-after-1");
    fs::create_dir(&intent).unwrap();
    let root = open(folder.path()).unwrap();
    assert!(root.recovered().set_aside.is_empty());
    let error = root.discard_after(1).unwrap_err();
    assert!(matches!(&error, CommitError::NameTaken { path, .. } if *path == intent), "{error}");
    save(&root, CheckpointKind::Hf, 3).unwrap();
    fs::remove_dir(&intent).unwrap();
    assert_eq!(root.discard_after(1).unwrap().len(), 2);
    assert_eq!(entries(folder.path()), [".owner", "discarded-hf-2", "discarded-hf-3", "hf-1", "hf-latest"]);
}

#[test]
fn only_a_record_is_read_of_a_lock_file_of_any_size() {
    let folder = tempfile::tempdir().unwrap();
    save(&open(folder.path()).unwrap(), CheckpointKind::Hf, 1).unwrap();
    let owner = folder.path().join(".owner");
    fs::File::options().write(true).open(&owner).unwrap().set_len(1 << 42).unwrap();
    save(&open(folder.path()).unwrap(), CheckpointKind::Hf, 2).unwrap();
    assert_eq!(fs::metadata(&owner).unwrap().len(), 512);
}

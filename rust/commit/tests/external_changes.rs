//! The next call notices what people did to the checkpoints of a root.

#![expect(clippy::disallowed_methods, reason = "the tests play people and writers")]

#[path = "support/common/mod.rs"]
mod common;
#[macro_use]
#[path = "support/forwarding/mod.rs"]
mod forwarding;
#[path = "support/watched_disk/mod.rs"]
mod watched_disk;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::Mount;
use tundish_commit::root::Root;
use tundish_commit::{CheckpointKind, CommitError};
use watched_disk::{WatchedDisk, names, open, put, save};

/// Changes that people make to `hf-<step>`.
type Change = (&'static str, fn(&Path));

const CHANGES: [Change; 6] = [
    ("removed", |path| fs::remove_dir_all(path).unwrap()),
    ("renamed", |path| fs::rename(path, aside(path)).unwrap()),
    ("replaced by another", |path| {
        fs::rename(path, aside(path)).unwrap();
        let step = path.to_str().unwrap().rsplit('-').next().unwrap().parse().unwrap();
        put(path.parent().unwrap(), CheckpointKind::Hf, step);
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
    (1..=6).for_each(|step| put(folder, CheckpointKind::Hf, step));
    (1..=2).for_each(|step| put(folder, CheckpointKind::Dcp, step));
    let root = open(disk, folder);
    assert_eq!(of_hf(names(&root)), hf(&[1, 2, 3, 4, 5, 6]));
    root
}

/// The first call after a change notices it, whichever call it is.
fn check_changes(scratch: &dyn Fn() -> tempfile::TempDir) {
    {
        for (context, change) in CHANGES {
            let made = || {
                let folder = scratch();
                let root = root_in(folder.path(), &WatchedDisk::new(|_, _| {}));
                (folder, root)
            };
            // Listed no more.
            let (folder, root) = made();
            for step in [2, 3] {
                change(&folder.path().join(format!("hf-{step}")));
                // The one of the other kind is gone after the first time.
                let _ = fs::create_dir(folder.path().join("dcp-1"));
            }
            assert_eq!(of_hf(names(&root)), hf(&[1, 4, 5, 6]), "{context}");
            // Not the newest any more.
            let (folder, root) = made();
            change(&folder.path().join("hf-6"));
            assert_eq!(of_hf(names(&root)), hf(&[1, 2, 3, 4, 5]), "{context}");
            // In the way of no lower step.
            let (folder, root) = made();
            change(&folder.path().join("hf-6"));
            let lower = root.begin(CheckpointKind::Hf, 4, false).unwrap_err();
            assert!(matches!(lower, CommitError::StepOrder { newest: 5, .. }), "{context}: {lower}");
            root.begin(CheckpointKind::Hf, 5, true).unwrap_or_else(|error| panic!("{context}: {error}"));
            // Not listed after the next save.
            let (folder, root) = made();
            change(&folder.path().join("hf-3"));
            save(&root, CheckpointKind::Hf, 7, "new");
            assert_eq!(of_hf(names(&root)), hf(&[1, 2, 4, 5, 6, 7]), "{context}");
            // Not removed, whatever lies there now; and no longer listed.
            let (folder, root) = made();
            let path = folder.path().join("hf-3");
            change(&path);
            let before = fs::symlink_metadata(&path).is_ok();
            let error = root.remove(CheckpointKind::Hf, 3).unwrap_err();
            assert!(matches!(error, CommitError::NoSuchCheckpoint { .. }), "{context}: {error}");
            assert_eq!(fs::symlink_metadata(&path).is_ok(), before, "{context}");
            assert_eq!(of_hf(names(&root)), hf(&[1, 2, 4, 5, 6]), "{context}");
            // The newest checkpoint that remains stays.
            let (folder, root) = made();
            change(&folder.path().join("hf-6"));
            let error = root.remove(CheckpointKind::Hf, 5).unwrap_err();
            assert!(matches!(error, CommitError::CheckpointInUse { .. }), "{context}: {error}");
        }
    }
}

#[test]
fn the_next_call_notices_external_changes() {
    check_changes(&|| tempfile::tempdir().unwrap());
}

#[test]
fn external_changes_are_noticed_on_tmpfs_and_overlayfs() {
    if let Some(mount) = Mount::new("tmpfs", "size=64m") {
        check_changes(&|| tempfile::tempdir_in(&mount.path).unwrap());
        // Numbers of folders on overlayfs are not what a look tells.
        let layers = ["lower", "upper", "work"].map(|name| mount.path.join(name));
        layers.iter().for_each(|layer| fs::create_dir(layer).unwrap());
        let [lower, upper, work] = layers.map(|layer| layer.display().to_string());
        if let Some(overlay) = Mount::new("overlay", &format!("lowerdir={lower},upperdir={upper},workdir={work}")) {
            check_changes(&|| tempfile::tempdir_in(&overlay.path).unwrap());
        }
    }
}

/// The folder then gives the number of what lies under it.
#[test]
fn a_mount_over_a_checkpoint_hides_it() {
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

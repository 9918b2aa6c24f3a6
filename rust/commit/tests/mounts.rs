//! Full, read-only and foreign file systems, each mounted for its test. Needs root; says so where it is not.

#![expect(clippy::disallowed_methods, reason = "the tests build what the crate has to cope with")]

mod common;

use std::fs;

use common::{Mount, assert_complete, entries, fill, publish};
use tundish_commit::{CommitError, Folder, sweep};

const ENOSPC: i32 = 28;
const EROFS: i32 = 30;
const EBUSY: i32 = 16;

#[test]
fn a_full_disk_is_reported_with_the_path_and_leaves_nothing() {
    let Some(mount) = Mount::new("tmpfs", "size=1m") else {
        return;
    };
    let target = mount.path.join("plan");
    let folder = Folder::create(&target).unwrap();
    let mut file = folder.create_file("large").unwrap();
    let path = file.path().to_path_buf();
    // Three appends fit; of the fourth the kernel writes a part, which must not pass for the whole.
    let failed = (0..8).find_map(|number| Some((number, file.append(&[1; 300_000]).err()?)));
    let (number, error) = failed.expect("two megabytes do not fit");
    assert_eq!(number, 3);
    assert_eq!(error.raw_os_error(), Some(ENOSPC));
    assert_eq!(error.path(), path);
    assert!(error.to_string().contains("large"), "{error}");
    drop(file);
    let error = folder.publish().unwrap_err();
    assert!(matches!(error, CommitError::Poisoned { .. }), "{error}");
    assert_eq!(error.raw_os_error(), Some(ENOSPC));
    assert!(entries(&mount.path).is_empty());
    publish(&target, 5).unwrap();
    assert_complete(&target, 5);
}

#[test]
fn a_disk_without_room_for_a_folder_is_refused_early() {
    let Some(mount) = Mount::new("tmpfs", "size=1m,nr_inodes=2") else {
        return;
    };
    fs::write(mount.path.join("file"), b"").unwrap();
    let error = Folder::create(mount.path.join("plan")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(ENOSPC));
    assert_eq!(entries(&mount.path), ["file"]);
}

#[test]
fn a_read_only_parent_is_refused_early() {
    let Some(mount) = Mount::new("tmpfs", "size=1m") else {
        return;
    };
    fs::create_dir(mount.path.join(".old.0000000000000001.incomplete")).unwrap();
    mount.remount("ro");
    let error = Folder::create(mount.path.join("plan")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(EROFS), "{error}");
    let report = sweep(&mount.path).unwrap();
    assert!(report.removed.is_empty());
    assert_eq!(report.failed.len(), 1);
    assert_eq!(report.failed[0].raw_os_error(), Some(EROFS));
}

#[test]
fn a_disk_that_becomes_read_only_fails_the_folder() {
    let Some(mount) = Mount::new("tmpfs", "size=1m") else {
        return;
    };
    let target = mount.path.join("plan");
    let folder = Folder::create(&target).unwrap();
    fill(&folder, 1).unwrap();
    mount.remount("ro");
    let error = folder.publish().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(EROFS), "{error}");
    assert!(!target.exists());
    // The folder could not be removed then; the next writer does it.
    assert_eq!(entries(&mount.path).len(), 1);
    mount.remount("rw");
    publish(&target, 2).unwrap();
    assert_eq!(entries(&mount.path), ["plan"]);
    assert_complete(&target, 2);
}

#[test]
fn a_mount_point_cannot_be_a_target() {
    let Some(mount) = Mount::new("tmpfs", "size=1m") else {
        return;
    };
    let error = Folder::create(&mount.path).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(EBUSY), "{error}");
    assert_eq!(error.path(), mount.path);
}

#[test]
fn a_file_system_mounted_in_a_leftover_is_not_emptied() {
    let Some(outer) = Mount::new("tmpfs", "size=1m") else {
        return;
    };
    let Some(inner) = Mount::new("tmpfs", "size=1m") else {
        return;
    };
    fs::write(inner.path.join("precious"), b"keep").unwrap();
    let leftover = outer.path.join(".plan.0000000000000001.incomplete");
    let place = leftover.join("mounted");
    fs::create_dir_all(&place).unwrap();
    let bind = |arguments: [&std::ffi::OsStr; 3]| {
        let status = std::process::Command::new("mount").args(arguments).status();
        assert!(status.unwrap().success());
    };
    bind(["--bind".as_ref(), inner.path.as_ref(), place.as_ref()]);
    let report = sweep(&outer.path).unwrap();
    let survived = fs::read(inner.path.join("precious"));
    let status = std::process::Command::new("umount").arg(&place).status();
    assert!(status.unwrap().success());
    assert_eq!(survived.unwrap(), b"keep");
    assert_eq!(report.failed.len(), 1);
    assert_eq!(sweep(&outer.path).unwrap().removed, [leftover]);
}

#[test]
fn where_locks_may_not_reach_every_writer_only_own_leftovers_are_swept() {
    // Not among the file systems that are known to be local, so it stands for a network file system here.
    let Some(mount) = Mount::new("hugetlbfs", "size=0") else {
        return;
    };
    let foreign = mount.path.join(".plan.0123456789abcdef.incomplete");
    fs::create_dir(&foreign).unwrap();
    let folder = Folder::create(mount.path.join("other")).unwrap();
    assert_eq!(folder.swept().live, std::slice::from_ref(&foreign));
    let own = folder.path().to_path_buf();
    assert_eq!(sweep(&mount.path).unwrap().live.len(), 2);
    drop(folder);
    // A leftover as a dead writer of this machine leaves it.
    fs::create_dir(&own).unwrap();
    let report = sweep(&mount.path).unwrap();
    assert_eq!(report.removed, [own]);
    assert_eq!(report.live, [foreign]);
}

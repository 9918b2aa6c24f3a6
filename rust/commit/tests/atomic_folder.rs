//! A single writer of a folder: publication, refusals, and sweeps.

#![expect(clippy::disallowed_methods, reason = "the tests build what the crate has to cope with")]

#[path = "support/common/mod.rs"]
mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use common::{assert_complete, contents, entries, fill, publish};
use tundish_commit::{AtomicFolder, CommitError, replace_file, sweep};

#[test]
fn child() {
    let Some((role, target, mark)) = common::role() else {
        return;
    };
    match role.as_str() {
        "relative" => {
            std::env::set_current_dir(target.parent().unwrap()).unwrap();
            let folder = AtomicFolder::create("plan").unwrap();
            assert_eq!(folder.target(), target);
            std::env::set_current_dir("/").unwrap();
            fill(&folder, mark).unwrap();
            folder.publish().unwrap();
        }
        "fork" => {
            let folder = AtomicFolder::create(&target).unwrap();
            fill(&folder, mark).unwrap();
            // SAFETY: the child only makes system calls and frees memory, which glibc allows after a fork.
            let process = unsafe { libc::fork() };
            if process == 0 {
                drop(folder);
                // SAFETY: ends the child at once, without the harness's own clean-up.
                unsafe { libc::_exit(0) };
            }
            let mut status = 0;
            // SAFETY: waits for the process that was just made, and writes to a live integer.
            assert_eq!(unsafe { libc::waitpid(process, &mut status, 0) }, process);
            assert_eq!(status, 0);
            folder.publish().unwrap();
        }
        other => panic!("unknown role {other}"),
    }
}

#[test]
fn a_folder_appears_whole_and_alone() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("plan");
    let folder = AtomicFolder::create(&target).unwrap();
    assert_eq!(folder.target(), target);
    fill(&folder, 7).unwrap();
    assert!(!target.exists());
    assert_eq!(folder.path().file_name().unwrap(), common::only_leftover(parent.path()).file_name().unwrap());
    folder.publish().unwrap();
    assert_eq!(entries(parent.path()), ["plan"]);
    assert_complete(&target, 7);
}

#[test]
fn an_empty_directory_is_replaced() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("plan");
    fs::create_dir(&target).unwrap();
    publish(&target, 1).unwrap();
    assert_complete(&target, 1);
}

#[test]
fn a_relative_target_is_fixed_when_the_folder_is_made() {
    let parent = tempfile::tempdir().unwrap();
    let parent = parent.path().canonicalize().unwrap();
    let target = parent.join("plan");
    let status = common::child("relative", &target, 3).status().unwrap();
    assert!(status.success());
    assert_complete(&target, 3);
}

#[test]
fn a_forked_child_does_not_remove_its_parent_s_folder() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("plan");
    let status = common::child("fork", &target, 4).status().unwrap();
    assert!(status.success());
    assert_complete(&target, 4);
}

#[test]
fn modes_are_those_the_umask_leaves() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("plan");
    publish(&target, 1).unwrap();
    let reference = parent.path().join("reference");
    fs::create_dir(&reference).unwrap();
    fs::write(reference.join("file"), b"").unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode();
    assert_eq!(mode(&target), mode(&reference));
    assert_eq!(mode(&target.join("plan.json")), mode(&reference.join("file")));
}

#[test]
fn a_large_file_is_written_in_any_order_of_offsets() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("plan");
    let folder = AtomicFolder::create(&target).unwrap();
    let mut file = folder.create_file("large").unwrap();
    let block: Vec<u8> = (0..20u32 << 20).map(|i| (i ^ (i >> 8)) as u8).collect();
    // Over several windows of early writeback, forwards, in one chunk and in many, then backwards.
    file.append(&block).unwrap();
    for chunk in block.chunks(1_000_003) {
        file.append(chunk).unwrap();
    }
    for start in (0..block.len()).step_by(3 << 20).rev() {
        let end = block.len().min(start + (3 << 20));
        let offset = (2 * block.len() + 5 + start) as u64;
        file.write_at(offset, &block[start..end]).unwrap();
    }
    file.finish().unwrap();
    folder.publish().unwrap();
    let bytes = fs::read(target.join("large")).unwrap();
    assert!(bytes[..block.len()] == block);
    assert!(bytes[block.len()..2 * block.len()] == block);
    assert_eq!(bytes[2 * block.len()..][..5], [0; 5]);
    assert!(bytes[2 * block.len() + 5..] == block);
}

#[test]
fn files_are_written_from_several_threads() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("plan");
    let folder = AtomicFolder::create(&target).unwrap();
    std::thread::scope(|scope| {
        for number in 0..8u8 {
            let folder = &folder;
            scope.spawn(move || {
                let mut file = folder.create_file(&format!("part-{number}")).unwrap();
                for _ in 0..50 {
                    file.append(&[number; 1000]).unwrap();
                }
                file.finish().unwrap();
            });
        }
    });
    folder.publish().unwrap();
    for number in 0..8u8 {
        let bytes = fs::read(target.join(format!("part-{number}"))).unwrap();
        assert!(bytes == vec![number; 50_000]);
    }
}

#[test]
fn a_dropped_folder_removes_itself() {
    let parent = tempfile::tempdir().unwrap();
    let folder = AtomicFolder::create(parent.path().join("plan")).unwrap();
    fill(&folder, 1).unwrap();
    // Users' own tools may have put more there.
    fs::create_dir_all(folder.path().join("inner/deeper")).unwrap();
    fs::write(folder.path().join("inner/deeper/file"), b"x").unwrap();
    drop(folder);
    assert!(entries(parent.path()).is_empty());
}

#[test]
fn an_unfinished_file_keeps_its_folder_from_being_published() {
    for dropped in [true, false] {
        let parent = tempfile::tempdir().unwrap();
        let folder = AtomicFolder::create(parent.path().join("plan")).unwrap();
        folder.create_file("done").unwrap().finish().unwrap();
        let mut file = folder.create_file("open").unwrap();
        file.append(b"x").unwrap();
        let held = (!dropped).then_some(file);
        let error = folder.publish().unwrap_err();
        assert!(matches!(error, CommitError::Unfinished { .. }), "{error}");
        assert_eq!(error.path().file_name().unwrap(), "open");
        assert_eq!(error.raw_os_error(), None);
        assert!(entries(parent.path()).is_empty());
        drop(held);
    }
}

#[test]
fn a_failed_write_is_final() {
    let parent = tempfile::tempdir().unwrap();
    let folder = AtomicFolder::create(parent.path().join("plan")).unwrap();
    let mut other = folder.create_file("other").unwrap();
    let mut file = folder.create_file("file").unwrap();
    // Beyond the largest file of any file system.
    let error = file.write_at(u64::MAX - 1, b"x").unwrap_err();
    assert!(matches!(error, CommitError::Io { .. }), "{error}");
    let repeated = [
        file.append(b"x").unwrap_err(),
        file.finish().unwrap_err(),
        other.append(b"x").unwrap_err(),
        folder.create_file("third").unwrap_err(),
        folder.publish().unwrap_err(),
    ];
    for error in repeated {
        assert!(matches!(error, CommitError::Poisoned { .. }), "{error}");
        assert_eq!(error.path().file_name().unwrap(), "file");
    }
    assert!(entries(parent.path()).is_empty());
}

#[test]
fn a_target_that_exists_is_refused_at_once_and_left_alone() {
    let parent = tempfile::tempdir().unwrap();
    let path = |name: &str| parent.path().join(name);
    fs::create_dir(path("full")).unwrap();
    fs::write(path("full/file"), b"keep").unwrap();
    fs::write(path("file"), b"keep").unwrap();
    fs::create_dir(path("empty")).unwrap();
    symlink(path("empty"), path("link")).unwrap();
    symlink(path("nowhere"), path("dangling")).unwrap();
    let before = entries(parent.path());
    for name in ["full", "file", "link", "dangling", "full/"] {
        let error = AtomicFolder::create(path(name)).unwrap_err();
        assert!(matches!(error, CommitError::TargetExists { .. }), "{error}");
        assert!(error.to_string().contains(name.trim_end_matches('/')));
    }
    assert_eq!(entries(parent.path()), before);
    assert_eq!(fs::read(path("full/file")).unwrap(), b"keep");
}

#[test]
fn a_target_that_appears_meanwhile_wins() {
    let parent = tempfile::tempdir().unwrap();
    let make: [fn(&Path); 4] = [
        |target| publish(target, 9).unwrap(),
        |target| fs::write(target, b"keep").unwrap(),
        |target| symlink("/nowhere", target).unwrap(),
        |target| symlink(target.parent().unwrap(), target).unwrap(),
    ];
    for (number, make) in make.into_iter().enumerate() {
        let target = parent.path().join(number.to_string());
        let folder = AtomicFolder::create(&target).unwrap();
        fill(&folder, 1).unwrap();
        make(&target);
        let before = fs::symlink_metadata(&target).unwrap().ino();
        let error = folder.publish().unwrap_err();
        assert!(matches!(error, CommitError::TargetExists { .. }), "{error}");
        assert_eq!(error.path(), target);
        assert_eq!(fs::symlink_metadata(&target).unwrap().ino(), before);
    }
    assert_complete(&parent.path().join("0"), 9);
    assert_eq!(entries(parent.path()), ["0", "1", "2", "3"]);
}

#[test]
fn a_bad_parent_is_refused() {
    let parent = tempfile::tempdir().unwrap();
    let missing = parent.path().join("missing");
    let error = AtomicFolder::create(missing.join("plan")).unwrap_err();
    assert!(matches!(&error, CommitError::ParentMissing { path } if *path == missing));
    let file = parent.path().join("file");
    fs::write(&file, b"").unwrap();
    let error = AtomicFolder::create(file.join("plan")).unwrap_err();
    assert!(matches!(&error, CommitError::NotADirectory { path } if *path == file));
    assert!(matches!(sweep(&missing), Err(CommitError::ParentMissing { .. })));
    assert_eq!(entries(parent.path()), ["file"]);
}

#[test]
fn a_parent_that_vanishes_is_named() {
    let parent = tempfile::tempdir().unwrap();
    let room = parent.path().join("room");
    fs::create_dir(&room).unwrap();
    let folder = AtomicFolder::create(room.join("plan")).unwrap();
    fill(&folder, 1).unwrap();
    fs::remove_dir_all(&room).unwrap();
    let error = folder.publish().unwrap_err();
    assert!(matches!(&error, CommitError::ParentMissing { path } if *path == room));
    assert!(!room.exists());
}

#[test]
fn bad_names_are_refused() {
    let parent = tempfile::tempdir().unwrap();
    let long = "x".repeat(227);
    let hidden = ".plan.0123456789abcdef.incomplete";
    for name in ["..", "plan/..", "plan/.", "nul\0byte", &long, hidden] {
        let error = AtomicFolder::create(parent.path().join(name)).unwrap_err();
        assert!(matches!(error, CommitError::InvalidName { .. }), "{name}: {error}");
    }
    assert!(matches!(AtomicFolder::create(""), Err(CommitError::InvalidName { .. })));
    assert!(matches!(AtomicFolder::create("/"), Err(CommitError::InvalidName { .. })));

    let target = parent.path().join("x".repeat(226));
    let folder = AtomicFolder::create(&target).unwrap();
    for name in ["", ".", "..", "a/b", "/a", "a/", "./a", "a\0b", "../escape"] {
        let error = folder.create_file(name).unwrap_err();
        assert!(matches!(error, CommitError::InvalidName { .. }), "{name}: {error}");
    }
    let name = "plan.json";
    folder.create_file(name).unwrap().finish().unwrap();
    let error = folder.create_file(name).unwrap_err();
    assert!(matches!(error, CommitError::FileExists { .. }), "{error}");
    // None of these refusals harms the folder.
    folder.publish().unwrap();
    assert_eq!(entries(&target), [name]);
}

#[test]
fn a_file_is_replaced_and_nothing_else_is_touched() {
    let parent = tempfile::tempdir().unwrap();
    let path = |name: &str| parent.path().join(name);
    common::leave_folder(&path(".old.00000000ffffffff.incomplete"));
    fs::write(path("elsewhere"), b"keep").unwrap();
    symlink(path("elsewhere"), path("link.png")).unwrap();
    for (name, bytes) in
        [("new.png", &b"first"[..]), ("new.png", b"second, longer"), ("new.png", b""), ("link.png", b"x")]
    {
        replace_file(path(name), bytes).unwrap();
        assert_eq!(fs::read(path(name)).unwrap(), bytes);
    }
    assert_eq!(fs::read(path("elsewhere")).unwrap(), b"keep");
    assert!(!path("link.png").is_symlink());
    assert_eq!(entries(parent.path()), ["elsewhere", "link.png", "new.png"]);
    fs::write(path("reference"), b"").unwrap();
    let mode = |name: &str| fs::metadata(path(name)).unwrap().mode();
    assert_eq!(mode("new.png"), mode("reference"));
}

#[test]
fn a_file_takes_no_folder_s_place() {
    let parent = tempfile::tempdir().unwrap();
    let taken = parent.path().join("taken");
    fs::create_dir(&taken).unwrap();
    let error = replace_file(&taken, b"x").unwrap_err();
    assert_eq!((error.raw_os_error(), error.path()), (Some(libc::EISDIR), taken.as_path()));
    let missing = parent.path().join("missing");
    let error = replace_file(missing.join("file"), b"x").unwrap_err();
    assert!(matches!(&error, CommitError::ParentMissing { path } if *path == missing));
    let error = replace_file(parent.path().join("nul\0byte"), b"x").unwrap_err();
    assert!(matches!(error, CommitError::InvalidName { .. }), "{error}");
    assert_eq!(entries(parent.path()), ["taken"]);
}

#[test]
fn only_unfinished_folders_are_swept() {
    let parent = tempfile::tempdir().unwrap();
    let outside = parent.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("precious"), b"keep").unwrap();
    let room = parent.path().join("room");
    fs::create_dir(&room).unwrap();

    let leftover = room.join(".plan.00000000ffffffff.incomplete");
    common::leave_folder(&leftover);
    fs::create_dir(leftover.join("inner")).unwrap();
    fs::write(leftover.join("inner/file"), b"x").unwrap();
    symlink(&outside, leftover.join("link")).unwrap();
    symlink(&outside, leftover.join("inner/link")).unwrap();

    let kept = [
        ".plan.0000000000000001.incomplete.d",
        ".plan.000000000000001.incomplete",
        ".plan.000000000000000G.incomplete",
        "plan.0000000000000001.incomplete",
        "..0000000000000001.incomplete",
    ];
    for name in kept {
        common::leave_folder(&room.join(name));
    }
    // Renamed by somebody who may write to the parent.
    fs::create_dir(room.join(".mine.0000000000000001.incomplete")).unwrap();
    fs::write(room.join(".file.0000000000000001.incomplete"), b"x").unwrap();
    symlink(&outside, room.join(".link.0000000000000001.incomplete")).unwrap();
    let before: Vec<_> =
        entries(&room).into_iter().filter(|name| *name != ".plan.00000000ffffffff.incomplete").collect();

    let report = sweep(&room).unwrap();
    assert_eq!(report.removed, [leftover]);
    assert!(report.live.is_empty() && report.failed.is_empty());
    assert_eq!(entries(&room), before);
    assert_eq!(fs::read(outside.join("precious")).unwrap(), b"keep");
}

#[test]
fn folders_of_other_users_are_not_swept() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join(".plan.0000000000000001.incomplete");
    common::leave_folder(&folder);
    if let Err(error) = std::os::unix::fs::chown(&folder, Some(12_345), None) {
        common::skip(&format!("a folder cannot be given to another user here: {error}"));
        return;
    }
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o1777)).unwrap();
    let report = sweep(parent.path()).unwrap();
    assert!(report.removed.is_empty() && report.live.is_empty() && report.failed.is_empty());
    assert!(folder.exists());
}

#[test]
fn the_expected_bytes_differ_between_writers() {
    // The other tests tell writers apart by their bytes.
    assert_ne!(contents(1)[0].1, contents(2)[0].1);
}

#[test]
fn a_hidden_folder_that_was_swapped_is_not_reported_as_published() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("plan");
    let folder = AtomicFolder::create(&target).unwrap();
    fill(&folder, 1).unwrap();
    let hidden = folder.path().to_path_buf();
    fs::rename(&hidden, parent.path().join("taken")).unwrap();
    fs::create_dir(&hidden).unwrap();
    fs::write(hidden.join("plan.json"), "of somebody else").unwrap();
    let error = folder.publish().unwrap_err();
    assert!(matches!(&error, CommitError::NotPublishable { path, .. } if *path == hidden), "{error}");
    assert!(!target.exists());
    // Nothing of theirs is removed either.
    assert_eq!(entries(&hidden), ["plan.json"]);
}

//! Several writers and sweeps at once, each in its own process.

#[path = "support/common/mod.rs"]
mod common;

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use common::{Waiting, assert_complete, child as writer, entries, fill, only_leftover};
use tundish_commit::{AtomicFolder, CommitError, sweep};

/// Exit statuses of a writer in a race.
const WON: i32 = 10;
const LOST: i32 = 11;

#[test]
fn child() {
    let Some((role, target, mark)) = common::role() else {
        return;
    };
    match role.as_str() {
        "hold" => {
            let folder = AtomicFolder::create(&target).unwrap();
            fill(&folder, mark).unwrap();
            common::wait_for_resume();
            folder.publish().unwrap();
        }
        "race" => {
            let Ok(folder) = AtomicFolder::create(&target) else { std::process::exit(LOST) };
            fill(&folder, mark).unwrap();
            let status = match folder.publish() {
                Ok(()) => WON,
                Err(CommitError::TargetExists { .. }) => LOST,
                Err(other) => panic!("{other}"),
            };
            std::process::exit(status);
        }
        "sweep" => {
            let until = Instant::now() + Duration::from_millis(1500);
            while Instant::now() < until {
                let report = sweep(target.parent().unwrap()).unwrap();
                assert!(report.failed.is_empty(), "{:?}", report.failed);
                assert!(report.removed.is_empty(), "{:?}", report.removed);
            }
        }
        "sweep_any" => {
            let until = Instant::now() + Duration::from_millis(1500);
            while Instant::now() < until {
                let report = sweep(target.parent().unwrap()).unwrap();
                assert!(report.failed.is_empty(), "{:?}", report.failed);
            }
        }
        other => panic!("unknown role {other}"),
    }
}

#[test]
fn a_live_writer_is_never_swept_and_a_killed_one_is() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("plan");
    let live = Waiting::start(writer("hold", &target, 1));
    let live_path = only_leftover(parent.path());
    let other = parent.path().join("other");
    let killed = Waiting::start(writer("hold", &other, 2));

    let report = sweep(parent.path()).unwrap();
    assert!(report.removed.is_empty() && report.failed.is_empty());
    assert_eq!(report.live.len(), 2);

    killed.kill();
    let report = sweep(parent.path()).unwrap();
    assert_eq!(report.removed.len(), 1);
    assert!(report.removed[0].to_str().unwrap().contains(".other."));
    assert_eq!(report.live, [live_path]);

    assert!(live.resume());
    assert_complete(&target, 1);
    assert_eq!(entries(parent.path()), ["plan"]);
}

#[test]
fn the_next_writer_removes_a_dead_one_s_folder_whatever_its_target() {
    let parent = tempfile::tempdir().unwrap();
    Waiting::start(writer("hold", &parent.path().join("plan"), 1)).kill();
    let dead = only_leftover(parent.path());
    let folder = AtomicFolder::create(parent.path().join("unlike")).unwrap();
    assert_eq!(folder.swept().removed, [dead]);
    drop(folder);
    assert!(entries(parent.path()).is_empty());
}

#[test]
fn sweepers_in_a_loop_leave_live_writers_alone() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("plan");
    let live = Waiting::start(writer("hold", &target, 1));
    let sweepers: Vec<_> = (0..2).map(|_| writer("sweep", &target, 0).spawn().unwrap()).collect();
    for mut sweeper in sweepers {
        assert!(sweeper.wait().unwrap().success());
    }
    assert!(live.resume());
    assert_complete(&target, 1);
}

#[test]
fn writers_succeed_while_sweeps_run() {
    // A sweeper may take a folder between mkdir and flock; the writer must notice and begin again.
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("plan");
    let sweepers: Vec<_> = (0..2).map(|_| writer("sweep_any", &target, 0).spawn().unwrap()).collect();
    let until = Instant::now() + Duration::from_millis(1200);
    let mut number = 0u32;
    while Instant::now() < until {
        let target = parent.path().join(number.to_string());
        let folder = AtomicFolder::create(&target).unwrap();
        let mut file = folder.create_file("file").unwrap();
        file.append(&number.to_ne_bytes()).unwrap();
        file.finish().unwrap();
        folder.publish().unwrap();
        assert_eq!(fs::read(target.join("file")).unwrap(), number.to_ne_bytes());
        number += 1;
    }
    for mut sweeper in sweepers {
        assert!(sweeper.wait().unwrap().success());
    }
    assert_eq!(entries(parent.path()).len(), number as usize);
}

fn race(target: &Path, writers: u8) {
    let processes: Vec<_> = (1..=writers)
        .map(|mark| {
            let process = writer("race", target, mark).stdout(Stdio::null()).spawn();
            (mark, process.unwrap())
        })
        .collect();
    let mut winners = Vec::new();
    for (mark, mut process) in processes {
        match process.wait().unwrap().code() {
            Some(WON) => winners.push(mark),
            Some(LOST) => {}
            other => panic!("writer {mark} ended with {other:?}"),
        }
    }
    assert_eq!(winners.len(), 1, "{winners:?}");
    assert_complete(target, winners[0]);
    assert_eq!(entries(target.parent().unwrap()), ["plan"]);
}

#[test]
fn one_of_two_writers_wins() {
    for _ in 0..5 {
        let parent = tempfile::tempdir().unwrap();
        race(&parent.path().join("plan"), 2);
    }
}

#[test]
fn one_of_eight_writers_wins() {
    let parent = tempfile::tempdir().unwrap();
    race(&parent.path().join("plan"), 8);
}

#[test]
fn one_of_two_complete_folders_wins() {
    let parent = tempfile::tempdir().unwrap();
    let target = parent.path().join("plan");
    let first = Waiting::start(writer("hold", &target, 1));
    let second = Waiting::start(writer("hold", &target, 2));
    assert!(second.resume());
    assert!(!first.resume());
    assert_complete(&target, 2);
    assert_eq!(entries(parent.path()), ["plan"]);
}

//! Any two calls on one root leave it consistent. The second call is made at each change of the disk by the first.
#![expect(clippy::disallowed_methods, reason = "a copy of a root has not to be durable")]

#[macro_use]
#[path = "support/forwarding/mod.rs"]
mod forwarding;
#[path = "support/watched_disk/mod.rs"]
mod watched_disk;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::ThreadId;
use std::time::Duration;

use tundish_commit::root::{ReadonlyRoot, Root};
use tundish_commit::{CheckpointKind, CommitError, RealDisk};
use watched_disk::{CHANGING, WatchedDisk, manifest, names, open, save, write};

type Outcome = Result<(), CommitError>;
type Call = (&'static str, fn(&Root<WatchedDisk>) -> Outcome);

const CALLS: [Call; 10] = [
    ("publish hf-5", |root| publish(root, CheckpointKind::Hf, 5)),
    ("publish dcp-3 again", |root| publish(root, CheckpointKind::Dcp, 3)),
    ("remove hf-2", |root| root.remove(CheckpointKind::Hf, 2)),
    ("remove dcp-1", |root| root.remove(CheckpointKind::Dcp, 1)),
    ("abandon hf-5", |root| root.abandon(CheckpointKind::Hf, 5)),
    ("abandon dcp-3", |root| root.abandon(CheckpointKind::Dcp, 3)),
    ("begin hf-6", |root| root.begin(CheckpointKind::Hf, 6, false).map(drop)),
    ("begin hf-5", |root| root.begin(CheckpointKind::Hf, 5, true).map(drop)),
    ("go back to 2", |root| {
        [(CheckpointKind::Hf, 5), (CheckpointKind::Dcp, 3)]
            .into_iter()
            .try_for_each(|(kind, step)| root.abandon(kind, step))?;
        root.discard_after(2).map(drop)
    }),
    ("list", |root| root.list().map(drop)),
];

/// How long the second call may take before the first goes on; it may wait for the first.
const MOMENT: Duration = Duration::from_millis(4);

fn publish(root: &Root<WatchedDisk>, kind: CheckpointKind, step: u64) -> Outcome {
    root.publish(kind, step, &manifest(kind, step, "new"), true).map(drop)
}

/// Blocks one thread before one of its changes.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Default)]
struct GateState {
    /// The thread to block, and how many changes it may make before.
    thread: Option<(ThreadId, usize)>,
    is_blocked: bool,
    is_over: bool,
}

impl Gate {
    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        match &mut state.thread {
            Some((thread, 0)) if *thread == std::thread::current().id() => {
                state.thread = None;
                state.is_blocked = true;
                self.changed.notify_all();
                drop(self.changed.wait_while(state, |state| state.is_blocked).unwrap());
            }
            Some((thread, before)) if *thread == std::thread::current().id() => *before -= 1,
            _ => {}
        }
    }

    fn change(&self, change: impl FnOnce(&mut GateState)) {
        change(&mut self.state.lock().unwrap());
        self.changed.notify_all();
    }

    /// Waits until the first call is blocked or over. Returns whether it is blocked.
    fn wait_until_blocked(&self) -> bool {
        let state = self.state.lock().unwrap();
        self.changed.wait_while(state, |state| !state.is_blocked && !state.is_over).unwrap().is_blocked
    }
}

#[test]
fn any_two_calls_leave_a_root_in_order() {
    let before = new_folder();
    let published = open(&WatchedDisk::new(|_, _| {}), before.path());
    for (kind, step) in [
        (CheckpointKind::Hf, 1),
        (CheckpointKind::Hf, 2),
        (CheckpointKind::Hf, 3),
        (CheckpointKind::Dcp, 1),
        (CheckpointKind::Dcp, 3),
    ] {
        save(&published, kind, step, "old");
    }
    drop(published);
    let mut pairs = 0;
    for (one, first) in CALLS {
        for (other, second) in CALLS {
            for number in 0.. {
                let gate = Arc::new(Gate::default());
                let blocking = Arc::clone(&gate);
                let disk = WatchedDisk::new(move |call, _| {
                    if CHANGING.contains(&call) {
                        blocking.pass();
                    }
                });
                let folder = new_folder();
                // Saving them each time would take ten times longer.
                copy(before.path(), folder.path());
                let root = open(&disk, folder.path());
                write(&root.begin(CheckpointKind::Hf, 5, false).unwrap());
                write(&root.begin(CheckpointKind::Dcp, 3, true).unwrap());
                let (was_blocked, outcomes) = std::thread::scope(|scope| {
                    let worker = scope.spawn(|| {
                        gate.change(|state| state.thread = Some((std::thread::current().id(), number)));
                        let outcome = first(&root);
                        gate.change(|state| state.is_over = true);
                        outcome
                    });
                    let was_blocked = gate.wait_until_blocked();
                    let second_call = scope.spawn(|| second(&root));
                    if was_blocked {
                        std::thread::sleep(MOMENT);
                    }
                    gate.change(|state| state.is_blocked = false);
                    (was_blocked, [worker.join().unwrap(), second_call.join().unwrap()])
                });
                let context = format!("{other} before change {number} of {one}: {outcomes:?}");
                let refused = outcomes.iter().filter_map(|outcome| outcome.as_ref().err());
                refused.for_each(|error| assert!(is_refusal(error), "{context}"));
                check(root, folder.path(), &context);
                if !was_blocked {
                    break;
                }
                pairs += 1;
            }
        }
    }
    println!("{pairs} pairs");
    assert!(pairs > 500);
}

/// In memory where it can be: what is durable when is no matter here, and each fsync would wait for a disk.
fn new_folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let (kind, target) = (entry.file_type().unwrap(), to.join(entry.file_name()));
        if kind.is_dir() {
            fs::create_dir(&target).unwrap();
            copy(&entry.path(), &target);
        } else if kind.is_symlink() {
            symlink(fs::read_link(entry.path()).unwrap(), target).unwrap();
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// Whether the other call was first.
fn is_refusal(error: &CommitError) -> bool {
    matches!(
        error,
        CommitError::StepExists { .. }
            | CommitError::StepOrder { .. }
            | CommitError::CheckpointInUse { .. }
            | CommitError::NotPublishable { .. }
            | CommitError::NoSuchCheckpoint { .. }
    )
}

/// The root object and the folder have the same checkpoints, and the next start has nothing to mend.
fn check(root: Root<WatchedDisk>, path: &Path, context: &str) {
    for (kind, step) in [(CheckpointKind::Hf, 5), (CheckpointKind::Hf, 6), (CheckpointKind::Dcp, 3)] {
        root.abandon(kind, step).unwrap();
    }
    let known = names(&root);
    let watcher = ReadonlyRoot::open(RealDisk, path).unwrap();
    let survey = watcher.survey().unwrap();
    let there: Vec<_> = survey.whole.iter().map(|found| format!("{}-{}", found.kind, found.step)).collect();
    assert_eq!((there, survey.damaged.len()), (known.clone(), 0), "{context}");
    for kind in CheckpointKind::ALL {
        let latest = watcher.latest(kind).unwrap();
        let target = fs::read_link(path.join(format!("{kind}-latest"))).ok().map(|target| path.join(target));
        assert_eq!(target, latest, "{context}");
    }
    drop(root);
    let again = open(&WatchedDisk::new(|_, _| {}), path);
    let found = again.recovered();
    let mended = [&found.removed, &found.live, &found.set_aside, &found.repaired, &found.failed];
    assert!(mended.iter().all(|what| what.is_empty()) && found.ignored.is_empty(), "{context}: {found:?}");
    assert_eq!(names(&again), known, "{context}");
}

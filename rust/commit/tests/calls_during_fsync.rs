//! Some calls wait for an fsync of a root and others do not: the disk blocks at one fsync after the other.

#[macro_use]
#[path = "support/forwarding/mod.rs"]
mod forwarding;
#[path = "support/watched_disk/mod.rs"]
mod watched_disk;

use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::ThreadId;
use std::time::Duration;

use tundish_commit::root::{Root, read_lock_at};
use tundish_commit::{CheckpointKind, CommitError, RealDisk};
use watched_disk::{CHANGING, WatchedDisk, listed, manifest, names, open, save, visible, write};

/// Far longer than anything takes that does not wait.
const LONG: Duration = Duration::from_secs(20);

/// How long a call that has to wait is observed.
const MOMENT: Duration = Duration::from_millis(80);

/// Lets all fsyncs but one through.
#[derive(Default)]
struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
    changes: Mutex<Vec<(ThreadId, &'static str)>>,
}

#[derive(Default)]
struct GateState {
    /// How many more fsyncs pass before one is blocked; `None`: all pass.
    before: Option<usize>,
    is_blocked: bool,
    /// Whether there is nothing to wait for any more.
    is_over: bool,
}

impl Gate {
    fn disk(self: &Arc<Self>) -> WatchedDisk {
        let gate = Arc::clone(self);
        WatchedDisk::new(move |call, _| {
            if CHANGING.contains(&call) {
                gate.changes.lock().unwrap().push((std::thread::current().id(), call));
            }
            if call.starts_with("fsync") {
                gate.pass();
            }
        })
    }

    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        match state.before {
            Some(0) => {
                *state = GateState { is_blocked: true, ..GateState::default() };
                self.changed.notify_all();
                drop(self.changed.wait_while(state, |state| state.is_blocked).unwrap());
            }
            Some(before) => state.before = Some(before - 1),
            None => {}
        }
    }

    fn close_after(&self, fsyncs: usize) {
        self.state.lock().unwrap().before = Some(fsyncs);
    }

    /// Waits until a thread is blocked or the work is over. Returns whether one is blocked.
    fn wait_until_blocked(&self) -> bool {
        let state = self.state.lock().unwrap();
        self.changed.wait_while(state, |state| !state.is_blocked && !state.is_over).unwrap().is_blocked
    }

    fn end(&self) {
        self.state.lock().unwrap().is_over = true;
        self.changed.notify_all();
    }

    fn open(&self) {
        self.state.lock().unwrap().is_blocked = false;
        self.changed.notify_all();
    }

    /// The result of `work`, which must not wait for the blocked thread.
    fn promptly<T: Send>(&self, what: &str, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let (sender, receiver) = channel();
            scope.spawn(move || sender.send(work()));
            receiver.recv_timeout(LONG).unwrap_or_else(|error| {
                // Otherwise the test would never end.
                self.open();
                assert_eq!(error, RecvTimeoutError::Timeout);
                panic!("{what} waits")
            })
        })
    }
}

/// Runs `work` on a root that `prepare` made, once for each of its fsyncs, and calls `meanwhile` while that fsync is
/// blocked. Returns the number of fsyncs.
fn at_each_fsync(
    prepare: impl Fn(&Root<WatchedDisk>),
    work: impl Fn(&Root<WatchedDisk>) + Sync,
    meanwhile: impl Fn(&Root<WatchedDisk>, &Arc<Gate>, &Path),
    afterwards: impl Fn(&Root<WatchedDisk>, &Path),
) -> usize {
    for number in 0.. {
        let gate = Arc::new(Gate::default());
        let folder = tempfile::tempdir().unwrap();
        let root = open(&gate.disk(), folder.path());
        prepare(&root);
        gate.close_after(number);
        let was_blocked = std::thread::scope(|scope| {
            let worker = scope.spawn(|| {
                work(&root);
                gate.end();
            });
            let is_blocked = gate.wait_until_blocked();
            if is_blocked {
                let outcome =
                    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| meanwhile(&root, &gate, folder.path())));
                gate.open();
                outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
            worker.join().unwrap();
            is_blocked
        });
        if !was_blocked {
            return number;
        }
        afterwards(&root, folder.path());
    }
    unreachable!("some fsync is the last")
}

fn begin_and_write(root: &Root<WatchedDisk>, kind: CheckpointKind, step: u64) {
    write(&root.begin(kind, step, false).unwrap());
}

fn publish(root: &Root<WatchedDisk>, kind: CheckpointKind, step: u64) {
    root.publish(kind, step, &manifest(kind, step, "new"), true).unwrap();
}

/// Both kinds are published, and each has a save under way.
fn prepare(root: &Root<WatchedDisk>) {
    for (kind, step) in [(CheckpointKind::Hf, 1), (CheckpointKind::Dcp, 1), (CheckpointKind::Dcp, 2)] {
        save(root, kind, step, "old");
    }
    begin_and_write(root, CheckpointKind::Hf, 5);
    begin_and_write(root, CheckpointKind::Dcp, 3);
}

const OLD: [&str; 3] = ["dcp-1", "dcp-2", "hf-1"];

#[test]
fn queries_and_beginnings_do_not_wait_for_a_publication() {
    let fsyncs = at_each_fsync(
        |root| {
            prepare(root);
            root.abandon(CheckpointKind::Dcp, 3).unwrap();
        },
        |root| publish(root, CheckpointKind::Hf, 5),
        |root, gate, path| {
            let mut found = gate.promptly("list", || names(root));
            found.sort();
            assert_eq!(found, OLD);
            drop(gate.promptly("a reader", || read_lock_at(&RealDisk, &path.join("hf-1"))).unwrap());
            let folder = gate.promptly("begin", || root.begin(CheckpointKind::Dcp, 3, false)).unwrap();
            write(&folder);
            // That there is nothing to overwrite is no reason to wait either.
            gate.promptly("begin", || root.begin(CheckpointKind::Dcp, 4, true)).unwrap();
        },
        |root, path| {
            publish(root, CheckpointKind::Dcp, 3);
            root.abandon(CheckpointKind::Dcp, 4).unwrap();
            let mut all = names(root);
            all.sort();
            assert_eq!(all, ["dcp-1", "dcp-2", "dcp-3", "hf-1", "hf-5"]);
            assert_eq!(visible(path), names(root));
        },
    );
    // The manifest, two folders, the name, the link and its name.
    assert_eq!(fsyncs, 6);
}

/// A change that must not interleave with a publication, and its preparation.
type Change = (&'static str, fn(&Root<WatchedDisk>), fn(&Root<WatchedDisk>));

const CHANGES: [Change; 5] = [
    ("publish", |_| {}, |root| publish(root, CheckpointKind::Dcp, 3)),
    ("remove", |_| {}, |root| root.remove(CheckpointKind::Dcp, 1).unwrap()),
    ("abandon", |_| {}, |root| root.abandon(CheckpointKind::Dcp, 3).unwrap()),
    (
        "discard",
        |root| root.abandon(CheckpointKind::Dcp, 3).unwrap(),
        |root| assert_eq!(root.discard_after(1).unwrap().len(), 2),
    ),
    ("close", |_| {}, |root| root.close()),
];

#[test]
fn no_other_change_interleaves_with_a_publication() {
    for (what, before, change) in CHANGES {
        let fsyncs = at_each_fsync(
            |root| {
                prepare(root);
                before(root);
            },
            |root| publish(root, CheckpointKind::Hf, 5),
            |root, gate, path| {
                let found = visible(path);
                std::thread::scope(|scope| {
                    let other = scope.spawn(|| change(root));
                    std::thread::sleep(MOMENT);
                    let changes = gate.changes.lock().unwrap().clone();
                    let is_over = other.is_finished();
                    let id = other.thread().id();
                    gate.open();
                    other.join().unwrap();
                    assert!(!is_over, "{what} does not wait");
                    let own: Vec<_> = changes.iter().filter(|(thread, _)| *thread == id).collect();
                    assert!(own.is_empty(), "{what}: {own:?}, visible {found:?}");
                });
            },
            |root, path| {
                if what == "close" {
                    assert!(matches!(root.begin(CheckpointKind::Hf, 9, false), Err(CommitError::RootLost { .. })));
                    assert_eq!(visible(path).len(), 4);
                    return;
                }
                let mut found = names(root);
                assert_eq!(visible(path), found, "{what}");
                found.sort();
                let expected: &[&str] = match what {
                    "publish" => &["dcp-1", "dcp-2", "dcp-3", "hf-1", "hf-5"],
                    "remove" => &["dcp-2", "hf-1", "hf-5"],
                    "discard" => &["dcp-1", "hf-1"],
                    _ => &["dcp-1", "dcp-2", "hf-1", "hf-5"],
                };
                assert_eq!(found, expected, "{what}");
            },
        );
        assert_eq!(fsyncs, 6, "{what}");
    }
}

#[test]
fn a_step_under_publication_blocks_itself_and_lower_ones() {
    at_each_fsync(
        |root| {
            save(root, CheckpointKind::Hf, 1, "old");
            begin_and_write(root, CheckpointKind::Hf, 5);
        },
        |root| publish(root, CheckpointKind::Hf, 5),
        |root, gate, _| {
            for overwrite in [false, true] {
                let again = gate.promptly("begin", || root.begin(CheckpointKind::Hf, 5, overwrite)).unwrap_err();
                assert!(again.to_string().contains("is being written already"), "{again}");
                let lower = gate.promptly("begin", || root.begin(CheckpointKind::Hf, 4, overwrite)).unwrap_err();
                assert!(matches!(lower, CommitError::StepOrder { newest: 5, .. }), "{lower}");
            }
        },
        |root, _| assert_eq!(names(root), ["hf-1", "hf-5"]),
    );
}

#[test]
fn a_replacement_counts_once_it_is_durable() {
    let fsyncs = at_each_fsync(
        |root| {
            save(root, CheckpointKind::Hf, 1, "old");
            save(root, CheckpointKind::Hf, 2, "old");
            write(&root.begin(CheckpointKind::Hf, 2, true).unwrap());
        },
        |root| publish(root, CheckpointKind::Hf, 2),
        |root, gate, path| {
            let found = gate.promptly("list", || listed(root));
            let is_old = |(_, tag): &(String, String)| tag == "old";
            assert!(found.iter().all(is_old) && found.iter().any(|(name, _)| name == "hf-1"), "{found:?}");
            // Whichever of the two it leads to, it is there.
            assert!(path.join("hf-2/tundish.json").is_file());
            let again = gate.promptly("begin", || root.begin(CheckpointKind::Hf, 2, true)).unwrap_err();
            assert!(again.to_string().contains("is being written already"), "{again}");
        },
        |root, path| {
            assert_eq!(listed(root), [("hf-1".into(), "old".into()), ("hf-2".into(), "new".into())]);
            assert!(!path.join(".hf-2.incomplete").exists());
        },
    );
    // The link stays as it is.
    assert_eq!(fsyncs, 4);
}

#[test]
fn queries_and_beginnings_do_not_wait_for_a_removal() {
    let fsyncs = at_each_fsync(
        |root| (1..=3).for_each(|step| drop(save(root, CheckpointKind::Hf, step, "old"))),
        |root| root.remove(CheckpointKind::Hf, 2).unwrap(),
        |root, gate, _| {
            assert_eq!(gate.promptly("list", || names(root)), ["hf-1", "hf-3"]);
            gate.promptly("begin", || root.begin(CheckpointKind::Dcp, 3, false)).unwrap();
            gate.promptly("begin", || root.begin(CheckpointKind::Hf, 4, false)).unwrap();
        },
        |root, path| {
            assert_eq!(names(root), ["hf-1", "hf-3"]);
            assert_eq!(visible(path), ["hf-1", "hf-3"]);
        },
    );
    // That the name is gone.
    assert_eq!(fsyncs, 1);
}

#[test]
fn a_checkpoint_protected_before_its_removal_stays() {
    let old = |root: &Root<WatchedDisk>| {
        (1..=3).for_each(|step| drop(save(root, CheckpointKind::Hf, step, "old")));
        begin_and_write(root, CheckpointKind::Dcp, 3);
    };
    // The removal waits for the publication of another checkpoint.
    at_each_fsync(
        old,
        |root| publish(root, CheckpointKind::Dcp, 3),
        |root, gate, _| {
            std::thread::scope(|scope| {
                let removal = scope.spawn(|| root.remove(CheckpointKind::Hf, 2));
                std::thread::sleep(MOMENT);
                gate.promptly("protect", || root.protect(2)).unwrap();
                gate.open();
                let refused = removal.join().unwrap().unwrap_err();
                assert!(refused.to_string().contains("protected"), "{refused}");
            });
        },
        |root, path| {
            assert_eq!(names(root), ["dcp-3", "hf-1", "hf-2", "hf-3"]);
            assert_eq!(visible(path), names(root));
            root.remove(CheckpointKind::Hf, 1).unwrap();
        },
    );
    // Once it is on its way out it is not listed any more.
    let fsyncs = at_each_fsync(
        old,
        |root| root.remove(CheckpointKind::Hf, 2).unwrap(),
        |root, gate, _| {
            gate.promptly("protect", || root.protect(2)).unwrap();
            assert!(!gate.promptly("list", || names(root)).contains(&"hf-2".to_owned()));
        },
        |root, _| assert_eq!(names(root), ["hf-1", "hf-3"]),
    );
    assert_eq!(fsyncs, 1);
}

//! Every system call that changes the disk, killed before and after it, and failing in turn.
//!
//! The scenario is one whole publication that begins with a dead writer's leftover to sweep; it makes the same calls
//! in every run, which are first counted in a run that goes well.

#![expect(clippy::disallowed_methods, reason = "the tests build what the crate has to cope with")]

#[path = "support/common/mod.rs"]
mod common;

use std::collections::HashSet;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Output;

use common::{assert_complete, child as writer, contents, entries, fill};
use tundish_commit::{AtomicFolder, CommitError, replace_file, sweep};

const EIO: i32 = 5;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;
const SIGKILL: i32 = 9;
const LEFTOVER: &str = ".old.00000000000000aa.incomplete";
/// Mark of the writer under test, and of the one that comes after it.
const FIRST: u8 = 1;
const NEXT: u8 = 2;

#[test]
fn child() {
    let Some((role, target, mark)) = common::role() else {
        return;
    };
    let outcome = match role.as_str() {
        "publish" => publish(&target, mark),
        "stubborn" => publish_stubbornly(&target, mark),
        "large" => publish_large(&target),
        "replace" => replace_file(&target, &picture(mark)),
        "drop" => AtomicFolder::create(&target).and_then(|folder| fill(&folder, mark)),
        other => panic!("unknown role {other}"),
    };
    match outcome {
        Ok(()) => println!("outcome=published"),
        Err(error) => {
            let kind = match error {
                CommitError::NotDurable { .. } => "not-durable",
                CommitError::Poisoned { .. } => "poisoned",
                _ => "error",
            };
            assert!(error.path().is_absolute());
            println!("outcome={kind} {}", error.raw_os_error().unwrap_or(0));
        }
    }
}

fn publish(target: &Path, mark: u8) -> Result<(), CommitError> {
    let folder = AtomicFolder::create(target)?;
    for error in &folder.swept().failed {
        println!("unswept={}", error.raw_os_error().unwrap_or(0));
    }
    fill(&folder, mark)?;
    folder.publish()
}

/// A program that ignores every error but the last.
fn publish_stubbornly(target: &Path, mark: u8) -> Result<(), CommitError> {
    let folder = AtomicFolder::create(target)?;
    for (name, bytes) in contents(mark) {
        if let Ok(mut file) = folder.create_file(name) {
            let _ = file.append(&bytes);
            let _ = file.append(&bytes);
            let _ = file.finish();
        }
    }
    folder.publish()
}

fn publish_large(target: &Path) -> Result<(), CommitError> {
    let folder = AtomicFolder::create(target)?;
    let mut file = folder.create_file("large")?;
    file.append(&vec![3; 25 << 20])?;
    file.finish()?;
    folder.publish()
}

/// The bytes of a file that is replaced; `mark` tells the old ones from the new.
fn picture(mark: u8) -> Vec<u8> {
    vec![mark; 70_000 + usize::from(mark)]
}

/// One run of the scenario in a fresh parent.
struct Run {
    parent: tempfile::TempDir,
    output: Output,
    trace: Vec<Call>,
}

struct Call {
    operation: String,
    path: PathBuf,
    outcome: String,
}

impl Run {
    fn new(role: &str, fault: Option<&str>) -> Self {
        Self::in_place_of(None, role, fault)
    }

    /// A run where the target is a file already, if `old` gives its bytes.
    fn in_place_of(old: Option<&[u8]>, role: &str, fault: Option<&str>) -> Self {
        let parent = tempfile::tempdir().unwrap();
        if let Some(old) = old {
            fs::write(parent.path().join("plan"), old).unwrap();
        }
        let leftover = parent.path().join(LEFTOVER);
        common::leave_folder(&leftover);
        fs::write(leftover.join("a"), b"x").unwrap();
        fs::write(leftover.join("b"), b"x").unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let trace = elsewhere.path().join("trace");
        let mut command = writer(role, &parent.path().join("plan"), FIRST);
        command.env("TUNDISH_FAILPOINT_TRACE", &trace);
        if let Some(fault) = fault {
            command.env("TUNDISH_FAILPOINT", fault);
        }
        let output = command.output().unwrap();
        let trace = fs::read_to_string(&trace).unwrap_or_default();
        let trace = trace
            .lines()
            .map(|line| {
                let mut fields = line.split('\t').map(str::to_owned);
                let mut field = || fields.next().expect("a line has three fields");
                Call { operation: field(), path: field().into(), outcome: field() }
            })
            .collect();
        Run { parent, output, trace }
    }

    fn target(&self) -> PathBuf {
        self.parent.path().join("plan")
    }

    /// The text that the writer printed after `key=`.
    fn printed(&self, key: &str) -> Option<String> {
        let text = String::from_utf8_lossy(&self.output.stdout).into_owned();
        let (_, rest) = text.split_once(&format!("{key}="))?;
        rest.lines().next().map(str::to_owned)
    }

    fn outcome(&self) -> String {
        self.printed("outcome").unwrap_or_else(|| {
            panic!("the writer printed no outcome: {}", String::from_utf8_lossy(&self.output.stderr))
        })
    }

    /// Asserts that the next writer succeeds and that nothing else remains.
    fn assert_next_writer_works(&self, context: &str) {
        let visible = self.target().exists();
        let name = if visible { "next" } else { "plan" };
        let target = self.parent.path().join(name);
        common::publish(&target, NEXT).unwrap_or_else(|error| panic!("{context}: {error}"));
        assert_complete(&target, NEXT);
        let expected: &[&str] = if visible { &["next", "plan"] } else { &["plan"] };
        assert_eq!(entries(self.parent.path()), expected, "{context}");
    }

    fn assert_no_fsync_twice(&self, context: &str) {
        let mut seen = HashSet::new();
        for call in self.trace.iter().filter(|call| call.operation == "fsync") {
            assert!(seen.insert(&call.path), "{context}: {:?} twice", call.path);
        }
    }
}

/// The calls of a run that goes well.
fn calls(role: &str) -> Vec<Call> {
    let run = Run::new(role, None);
    assert!(run.output.status.success());
    assert!(!run.trace.is_empty());
    run.trace
}

fn position(calls: &[Call], operation: &str) -> usize {
    calls
        .iter()
        .position(|call| call.operation.starts_with(operation))
        .unwrap_or_else(|| panic!("no call to {operation}"))
}

#[test]
fn everything_is_durable_before_it_is_visible() {
    let run = Run::new("publish", None);
    assert_eq!(run.outcome(), "published");
    assert_complete(&run.target(), FIRST);
    let calls = &run.trace;
    assert!(calls.iter().all(|call| call.outcome == "ok"));

    let hidden = &calls[position(calls, "create folder")].path;
    let only = |operation: &str, path: &Path| -> usize {
        let found: Vec<_> =
            (0..calls.len()).filter(|&i| calls[i].operation.starts_with(operation) && calls[i].path == path).collect();
        assert_eq!(found.len(), 1, "{operation} {path:?}: {found:?}");
        found[0]
    };
    let fsync_of_folder = only("fsync", hidden);
    for (name, bytes) in contents(FIRST) {
        let file = hidden.join(name);
        let fsync = only("fsync", &file);
        assert!(only("create file", &file) < fsync && fsync < fsync_of_folder);
        let writes: Vec<_> =
            (0..calls.len()).filter(|&i| calls[i].operation == "write" && calls[i].path == file).collect();
        assert_eq!(writes.is_empty(), bytes.is_empty());
        assert!(writes.iter().all(|&write| write < fsync));
    }
    let rename = only("rename", &run.target());
    let fsync_of_parent = only("fsync", run.parent.path());
    assert!(fsync_of_folder < rename && rename < fsync_of_parent);
    assert_eq!(fsync_of_parent, calls.len() - 1);
}

#[test]
fn a_writer_killed_at_any_failpoint_leaves_all_or_nothing() {
    let calls = calls("publish");
    let rename = position(&calls, "rename");
    for hit in 0..2 * calls.len() {
        let context = format!("killed at hit {hit}, {}", calls[hit / 2].operation);
        let run = Run::new("publish", Some(&format!("kill {hit}")));
        assert_eq!(run.output.status.signal(), Some(SIGKILL), "{context}");
        assert_eq!(run.target().exists(), hit > 2 * rename, "{context}");
        if run.target().exists() {
            assert_complete(&run.target(), FIRST);
        }
        run.assert_next_writer_works(&context);
    }
    // One failpoint more, and the writer ends well: the loop above has left out none.
    let run = Run::new("publish", Some(&format!("kill {}", 2 * calls.len())));
    assert_eq!(run.outcome(), "published");
}

#[test]
fn a_writer_killed_while_it_gives_up_leaves_nothing() {
    let calls = calls("drop");
    assert!(calls.iter().all(|call| !call.operation.starts_with("rename")));
    for hit in 0..2 * calls.len() {
        let context = format!("killed at hit {hit}, {}", calls[hit / 2].operation);
        let run = Run::new("drop", Some(&format!("kill {hit}")));
        assert_eq!(run.output.status.signal(), Some(SIGKILL), "{context}");
        assert!(!run.target().exists(), "{context}");
        assert!(sweep(run.parent.path()).unwrap().live.is_empty(), "{context}");
        assert!(entries(run.parent.path()).is_empty(), "{context}");
    }
}

#[test]
fn a_failing_call_fails_the_publication() {
    let calls = calls("publish");
    let create = position(&calls, "create folder");
    let rename = position(&calls, "rename");
    for (mode, errno) in [("fail", EIO), ("fail", ENOSPC), ("fail-after", EIO)] {
        for (number, call) in calls.iter().enumerate() {
            let context = format!("{mode} {errno} at call {number}, {}", call.operation);
            let run = Run::new("publish", Some(&format!("{mode} {number} {errno}")));
            let sweeping = number < create;
            let expected = if sweeping || (mode == "fail-after" && number == rename) {
                // A rename that was carried out whatever it answered is a rename.
                "published".to_owned()
            } else if number == calls.len() - 1 {
                format!("not-durable {errno}")
            } else {
                format!("error {errno}")
            };
            assert_eq!(run.outcome(), expected, "{context}");
            // A leftover that cannot be removed does not fail this publication, but is reported.
            let unswept = sweeping.then(|| errno.to_string());
            assert_eq!(run.printed("unswept"), unswept, "{context}");
            let visible = !expected.starts_with("error");
            let mut left = Vec::new();
            // A removal that was carried out whatever it answered leaves less.
            let leftover_gone = mode == "fail-after" && number + 1 == create;
            if sweeping && !leftover_gone {
                left.push(LEFTOVER);
            }
            if visible {
                left.push("plan");
                assert_complete(&run.target(), FIRST);
            }
            assert_eq!(entries(run.parent.path()), left, "{context}");
            run.assert_no_fsync_twice(&context);
            run.assert_next_writer_works(&context);
        }
    }
}

#[test]
fn a_program_that_ignores_errors_publishes_nothing_broken() {
    let calls = calls("stubborn");
    let create = position(&calls, "create folder");
    let rename = position(&calls, "rename");
    for (number, call) in calls.iter().enumerate().take(rename).skip(create + 1) {
        let context = format!("call {number}, {}", call.operation);
        let run = Run::new("stubborn", Some(&format!("fail {number} {EIO}")));
        // Its mode and its fsync.
        let of_folder = number >= rename - 2;
        let expected = if of_folder { "error" } else { "poisoned" };
        assert_eq!(run.outcome(), format!("{expected} {EIO}"), "{context}");
        assert!(entries(run.parent.path()).is_empty(), "{context}");
        run.assert_no_fsync_twice(&context);
    }
}

#[test]
fn early_writeback_is_bounded_and_its_errors_are_final() {
    let calls = calls("large");
    let numbers = |operation: &str| -> Vec<usize> {
        (0..calls.len()).filter(|&i| calls[i].operation.starts_with(operation)).collect()
    };
    let starts = numbers("start writeback");
    let waits = numbers("wait for writeback");
    // Windows of 8 MiB in 25 MiB, each waited for when the next was started.
    assert_eq!((starts.len(), waits.len()), (3, 2));
    assert!(starts[1] < waits[0] && waits[0] < starts[2] && starts[2] < waits[1]);
    for &number in starts.iter().chain(&waits) {
        for mode in ["fail", "fail-after"] {
            let run = Run::new("large", Some(&format!("{mode} {number} {EIO}")));
            assert_eq!(run.outcome(), format!("error {EIO}"));
            assert!(entries(run.parent.path()).is_empty());
        }
    }
    // Where there is no such system call, writing goes on without it; a wait's answer is never taken for that.
    let without = Run::new("large", Some(&format!("fail {} {EINVAL}", starts[0])));
    assert_eq!(without.outcome(), "published");
    assert_eq!(fs::read(without.target().join("large")).unwrap().len(), 25 << 20);
    let tries = without.trace.iter().filter(|call| call.operation.contains("writeback"));
    assert_eq!(tries.count(), 1);
    let lost = Run::new("large", Some(&format!("fail {} {EINVAL}", waits[0])));
    assert_eq!(lost.outcome(), format!("error {EINVAL}"));
}

/// Runs `replace_file` over an old file; what the target holds then is the old bytes or the new ones, whole.
fn replace(fault: Option<&str>) -> (Run, bool) {
    let run = Run::in_place_of(Some(&picture(NEXT)), "replace", fault);
    let found = fs::read(run.target()).unwrap();
    let is_new = found == picture(FIRST);
    assert!(is_new || found == picture(NEXT), "{fault:?}: the file is neither the old one nor the new one");
    (run, is_new)
}

#[test]
fn a_replaced_file_is_durable_before_it_is_visible() {
    let (run, is_new) = replace(None);
    assert_eq!((run.outcome().as_str(), is_new), ("published", true));
    assert_eq!(entries(run.parent.path()), ["plan"]);
    let steps: Vec<_> = run.trace[position(&run.trace, "create folder")..]
        .iter()
        .map(|call| (call.operation.split(' ').next().unwrap(), call.path.as_path()))
        .collect();
    let folder = steps[0].1;
    let file = steps[1].1;
    let parent = run.parent.path();
    let target = run.target();
    assert_eq!(file.parent(), Some(folder));
    let expected = [
        ("create", folder),
        ("create", file),
        ("write", file),
        ("fsync", file),
        ("fsync", folder),
        ("rename", &target),
        ("fsync", parent),
        ("remove", folder),
    ];
    assert_eq!(steps, expected);
}

#[test]
fn a_replacer_killed_at_any_failpoint_leaves_the_old_file_or_the_new_one() {
    let calls = replace(None).0.trace;
    let rename = position(&calls, "rename");
    for hit in 0..2 * calls.len() {
        let context = format!("killed at hit {hit}, {}", calls[hit / 2].operation);
        let (run, is_new) = replace(Some(&format!("kill {hit}")));
        assert_eq!(run.output.status.signal(), Some(SIGKILL), "{context}");
        assert_eq!(is_new, hit > 2 * rename, "{context}");
        run.assert_next_writer_works(&context);
    }
}

#[test]
fn a_failing_call_fails_the_replacement_or_does_not_matter() {
    let calls = replace(None).0.trace;
    let create = position(&calls, "create folder");
    let rename = position(&calls, "rename");
    for mode in ["fail", "fail-after"] {
        for (number, call) in calls.iter().enumerate() {
            let context = format!("{mode} at call {number}, {}", call.operation);
            let (run, is_new) = replace(Some(&format!("{mode} {number} {ENOSPC}")));
            let expected = if number < create || number > rename + 1 || (mode == "fail-after" && number == rename) {
                "published".to_owned()
            } else if number == rename + 1 {
                format!("not-durable {ENOSPC}")
            } else {
                format!("error {ENOSPC}")
            };
            assert_eq!(run.outcome(), expected, "{context}");
            assert_eq!(is_new, !expected.starts_with("error"), "{context}");
            run.assert_no_fsync_twice(&context);
            run.assert_next_writer_works(&context);
        }
    }
}

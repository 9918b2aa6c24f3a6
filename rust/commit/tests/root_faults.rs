//! A root on the real disk: killed at every failpoint, and every system call failing in turn.
//!
//! The scenario begins with a root that a dead owner left, and makes every call of a root once. After each failure,
//! opening the root again has to give the state before the call that did not return, or the one after it, bit by bit.

#![expect(clippy::disallowed_methods, reason = "the tests build what the crate has to cope with")]

#[path = "support/common/mod.rs"]
mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use common::entries;
use tundish_commit::root::{HeartbeatTiming, OpenOptions, ProcessIdentity, Root};
use tundish_commit::{CheckpointKind, CommitError, RealDisk};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const SIGKILL: i32 = 9;

/// Published checkpoints and which save of them it is; then what is set aside.
type State = (BTreeMap<(CheckpointKind, u64), u8>, BTreeMap<String, (CheckpointKind, u64, u8)>);

fn contents(kind: CheckpointKind, step: u64, save: u8) -> Vec<(&'static str, Vec<u8>)> {
    let bytes =
        |seed: u64, length: u64| (0..length).map(|at| (at * 31 + at / 251 + seed + step) as u8 ^ save).collect();
    match kind {
        CheckpointKind::Hf => vec![("config.json", bytes(1, 211)), ("model.safetensors", bytes(2, 70_000))],
        CheckpointKind::Dcp => {
            vec![(".metadata", bytes(3, 300)), ("inner/rank_0", bytes(4, 5000)), ("inner/rank_1", bytes(5, 0))]
        }
    }
}

fn manifest(kind: CheckpointKind, step: u64, save: u8) -> String {
    let files: Vec<_> = contents(kind, step, save)
        .iter()
        .map(|(name, bytes)| serde_json::json!({"name": name, "size": bytes.len(), "checksum": null}))
        .collect();
    serde_json::json!({"format_version": 1, "kind": kind, "step": step, "files": files, "extra": {"save": save}})
        .to_string()
}

fn write(folder: &Path, kind: CheckpointKind, step: u64, save: u8) {
    for (name, bytes) in contents(kind, step, save) {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
}

fn open(path: &Path) -> Result<Root<RealDisk>, CommitError> {
    // A heartbeat in between would shift the numbers of the calls.
    let timing = HeartbeatTiming { beat: Duration::from_secs(3600), stale: Duration::from_secs(3600) };
    let opening = OpenOptions { identity: ProcessIdentity::current(), timing, wait: Duration::from_secs(10) };
    Root::open(RealDisk, path, opening, &mut || Ok(()))
}

fn save(root: &Root<RealDisk>, kind: CheckpointKind, step: u64, save: u8, overwrite: bool) -> Result<(), CommitError> {
    let folder = root.begin(kind, step, overwrite)?;
    write(&folder, kind, step, save);
    let published = root.publish(kind, step, &manifest(kind, step, save), overwrite);
    if published.is_err() {
        // As a failed save does. The next start removes leftovers that it cannot remove.
        let _ = root.abandon(kind, step);
    }
    published.map(|_| ())
}

fn published(state: &mut State, kind: CheckpointKind, save: u8) {
    state.0.insert((kind, 3), save);
}

/// The calls after opening a root.
type Step = (&'static str, fn(&Root<RealDisk>) -> Result<(), CommitError>, fn(&mut State));

const STEPS: [Step; 7] = [
    ("publish", |root| save(root, CheckpointKind::Hf, 3, 1, false), |state| published(state, CheckpointKind::Hf, 1)),
    (
        "publish with folders",
        |root| save(root, CheckpointKind::Dcp, 3, 1, false),
        |state| published(state, CheckpointKind::Dcp, 1),
    ),
    ("overwrite", |root| save(root, CheckpointKind::Hf, 3, 2, true), |state| published(state, CheckpointKind::Hf, 2)),
    (
        "prune",
        |root| root.remove(CheckpointKind::Hf, 1),
        |state| state.0.retain(|key, _| *key != (CheckpointKind::Hf, 1)),
    ),
    (
        "abandon",
        |root| {
            let folder = root.begin(CheckpointKind::Dcp, 4, false)?;
            write(&folder, CheckpointKind::Dcp, 4, 1);
            root.abandon(CheckpointKind::Dcp, 4)
        },
        |_| {},
    ),
    (
        "discard",
        |root| root.discard_after(2).map(|_| ()),
        |state| {
            for (kind, save) in [(CheckpointKind::Hf, 2), (CheckpointKind::Dcp, 1)] {
                state.0.remove(&(kind, 3));
                state.1.insert(format!("discarded-{kind}-3"), (kind, 3, save));
            }
        },
    ),
    (
        "publish again",
        |root| save(root, CheckpointKind::Hf, 3, 3, false),
        |state| published(state, CheckpointKind::Hf, 3),
    ),
];

/// The states after opening, and after each step.
fn states() -> Vec<State> {
    let published =
        BTreeMap::from([((CheckpointKind::Hf, 1), 1), ((CheckpointKind::Hf, 2), 1), ((CheckpointKind::Dcp, 1), 1)]);
    let set_aside = BTreeMap::from([("discarded-hf-7".to_owned(), (CheckpointKind::Hf, 7, 1))]);
    let mut states = vec![(published, set_aside)];
    for (_, _, change) in STEPS {
        let mut next = states.last().unwrap().clone();
        change(&mut next);
        states.push(next);
    }
    states
}

/// A root as a dead owner left it, in the middle of a `discard_after`, of a removal and of two saves.
fn prepare(path: &Path) {
    let root = open(path).unwrap();
    for (kind, step) in
        [(CheckpointKind::Hf, 1), (CheckpointKind::Dcp, 1), (CheckpointKind::Hf, 2), (CheckpointKind::Hf, 7)]
    {
        save(&root, kind, step, 1, false).unwrap();
    }
    drop(root);
    fs::write(path.join(".discard-after-5"), "").unwrap();
    for name in [".hf-8.incomplete", ".dcp-0.removed-0"] {
        fs::create_dir(path.join(name)).unwrap();
        write(&path.join(name), CheckpointKind::Dcp, 0, 1);
    }
    symlink("dcp-9", path.join(".dcp-latest.incomplete")).unwrap();
}

#[test]
fn child() {
    let Some((role, path, _)) = common::role() else {
        return;
    };
    let root = match open(&path) {
        Ok(root) => root,
        Err(error) => {
            println!("failed=open: {error}");
            if role == "root-twice" {
                println!("again={:?}", open(&path).map(drop));
            }
            return;
        }
    };
    if role == "root-twice" {
        return;
    }
    println!("reached=0");
    for failed in &root.recovered().failed {
        println!("left={failed}");
    }
    for (number, (what, call, _)) in STEPS.into_iter().enumerate() {
        if let Err(error) = call(&root) {
            let listed: Vec<_> =
                root.list().unwrap().iter().map(|found| format!("{}-{}", found.kind, found.step)).collect();
            println!("failed={what}: {error}");
            if let CommitError::NotDurable { path, .. } = &error {
                let name = path.file_name().unwrap().to_str().unwrap();
                let (kind, step) = kind_and_step(name).unwrap();
                let again = root.begin(kind, step, true);
                assert!(matches!(again, Err(CommitError::StepExists { .. })), "{again:?}");
                println!("doubtful={name}");
            }
            println!("listed={}", listed.join(" "));
            // As a process ends that is killed next.
            std::mem::forget(root);
            return;
        }
        println!("reached={}", number + 1);
    }
    println!("finished=");
    std::mem::forget(root);
}

/// Some thousand roots, none of which has to outlive the test: in memory, where there is a file system in it.
fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

struct Run {
    folder: tempfile::TempDir,
    output: Output,
    trace: Vec<(String, PathBuf, String)>,
}

impl Run {
    fn new(fault: Option<&str>) -> Self {
        Self::of("root", fault)
    }

    fn of(role: &str, fault: Option<&str>) -> Self {
        let folder = scratch();
        let path = folder.path().join("root");
        prepare(&path);
        let trace = folder.path().join("trace");
        let mut command = common::child(role, &path, 0);
        command.env("TUNDISH_FAILPOINT_TRACE", &trace);
        if let Some(fault) = fault {
            command.env("TUNDISH_FAILPOINT", fault);
        }
        let output = command.output().unwrap();
        let trace = fs::read_to_string(&trace).unwrap_or_default();
        let call = |line: &str| {
            let mut fields = line.split('\t').map(str::to_owned);
            let mut field = || fields.next().expect("a line has three fields");
            (field(), field().into(), field())
        };
        let trace = trace.lines().map(call).collect();
        Run { folder, output, trace }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    fn printed(&self, key: &str) -> Vec<String> {
        let text = String::from_utf8_lossy(&self.output.stdout).into_owned();
        let values = text.lines().filter_map(|line| line.split_once(&format!("{key}=")));
        values.map(|(_, value)| value.to_owned()).collect()
    }

    /// The states that the root may be in: up to the last call that returned well, and after the one that did not.
    fn allowed(&self) -> Vec<State> {
        let states = states();
        match self.printed("reached").last() {
            None => vec![states[0].clone()],
            Some(_) if !self.printed("finished").is_empty() => vec![states[STEPS.len()].clone()],
            Some(reached) => states[reached.parse().unwrap()..].iter().take(2).cloned().collect(),
        }
    }

    /// Asserts what holds before and after the root is opened again.
    fn check(&self, context: &str) {
        let allowed = self.allowed();
        check_visible(&self.path(), &allowed, self.printed("reached").is_empty(), context);
        let root = open(&self.path()).unwrap_or_else(|error| panic!("{context}: {error}"));
        let recovered = root.recovered();
        assert!(recovered.failed.is_empty() && recovered.ignored.is_empty(), "{context}: {recovered:?}");
        let found = held(&self.path(), context);
        assert!(allowed.contains(&found), "{context}: {found:?}");
        let listed: Vec<_> = root.list().unwrap().iter().map(|found| (found.kind, found.step)).collect();
        assert!(listed.iter().eq(found.0.keys()), "{context}: {listed:?}");
        save(&root, CheckpointKind::Hf, 50, 1, false).unwrap_or_else(|error| panic!("{context}: {error}"));
        let mut expected = found;
        expected.0.insert((CheckpointKind::Hf, 50), 1);
        assert_eq!(held(&self.path(), context), expected, "{context}");
    }
}

fn which_save(folder: &Path, kind: CheckpointKind, step: u64) -> Option<u8> {
    let is = |save: &u8| {
        let contents = contents(kind, step, *save);
        let files = contents.iter().all(|(name, bytes)| fs::read(folder.join(name)).is_ok_and(|found| found == *bytes));
        let manifest = tundish_commit::add_manifest_checksum(&manifest(kind, step, *save)).unwrap();
        let count = contents.iter().map(|(name, _)| name.split('/').next().unwrap()).collect::<BTreeSet<_>>().len();
        files
            && fs::read_to_string(folder.join("tundish.json")).is_ok_and(|found| found == manifest)
            && entries(folder).len() == count + 1
    };
    (1..=3).find(is)
}

fn kind_and_step(name: &str) -> Option<(CheckpointKind, u64)> {
    let (kind, step) = name.split_once('-')?;
    Some((kind.parse().ok()?, step.parse().ok()?))
}

/// Every visible checkpoint is whole, and the pointers lead to one.
fn check_visible(path: &Path, allowed: &[State], before_recovery: bool, context: &str) {
    let whole = |name: &str| kind_and_step(name).and_then(|(kind, step)| which_save(&path.join(name), kind, step));
    for name in entries(path).iter().filter(|name| kind_and_step(name).is_some()) {
        assert!(whole(name).is_some(), "{context}: {name} is visible and not whole");
    }
    for kind in CheckpointKind::ALL {
        let newest = |state: &State| {
            let steps = state.0.keys().filter(|(other, _)| *other == kind);
            steps.max().map(|(_, step)| PathBuf::from(format!("{kind}-{step}")))
        };
        let target = fs::read_link(path.join(format!("{kind}-latest"))).ok();
        let is_right = allowed.iter().any(|state| newest(state) == target);
        // The checkpoints that the dead owner had not set aside yet.
        let is_old = before_recovery && target == Some("hf-7".into());
        assert!(is_right || is_old, "{context}: {kind}-latest leads to {target:?}");
        assert!(target.is_none_or(|target| whole(target.to_str().unwrap()).is_some()), "{context}");
    }
}

/// The contents of a root that was opened again; there is nothing else in it.
fn held(path: &Path, context: &str) -> State {
    let mut state = State::default();
    let mut others = BTreeSet::new();
    for name in entries(path) {
        let aside = name.strip_prefix("discarded-");
        match kind_and_step(aside.unwrap_or(&name)) {
            Some((kind, step)) => {
                let save = which_save(&path.join(&name), kind, step);
                let save = save.unwrap_or_else(|| panic!("{context}: {name} is not as it was saved"));
                if aside.is_some() {
                    state.1.insert(name, (kind, step, save));
                } else {
                    state.0.insert((kind, step), save);
                }
            }
            None => {
                others.insert(name);
            }
        }
    }
    let mut expected: BTreeSet<String> = [".owner".to_owned()].into();
    for kind in CheckpointKind::ALL {
        if let Some((_, step)) = state.0.keys().filter(|(other, _)| *other == kind).max() {
            let target = fs::read_link(path.join(format!("{kind}-latest"))).unwrap();
            assert_eq!(target, PathBuf::from(format!("{kind}-{step}")), "{context}");
            expected.insert(format!("{kind}-latest"));
        }
    }
    assert_eq!(others, expected, "{context}");
    state
}

#[test]
fn an_undisturbed_run_ends_in_the_last_state() {
    let run = Run::new(None);
    assert_eq!(run.printed("reached").len(), STEPS.len() + 1, "{:?}", run.output);
    assert_eq!(run.printed("finished").len(), 1);
    run.check("without a fault");
    // All that changes a disk was called, each of it through the one door.
    let called: BTreeSet<&str> = run.trace.iter().map(|(operation, ..)| operation.split(' ').next().unwrap()).collect();
    assert_eq!(called, BTreeSet::from(["change", "create", "exchange", "fsync", "open", "remove", "rename", "write"]));
}

#[test]
fn killed_at_any_failpoint_the_old_or_the_new_state_is_there() {
    let calls = Run::new(None).trace;
    for hit in 0..2 * calls.len() {
        let (operation, path, _) = &calls[hit / 2];
        let context = format!("killed at hit {hit}, {operation} {}", path.display());
        let run = Run::new(Some(&format!("kill {hit}")));
        assert_eq!(run.output.status.signal(), Some(SIGKILL), "{context}: {:?}", run.output);
        run.check(&context);
    }
}

fn fail_at_every_call(mode: &str, errno: i32) {
    let calls = Run::new(None).trace;
    let (mut failures, mut doubts) = (0, 0);
    for (number, (operation, path, _)) in calls.iter().enumerate() {
        let context = format!("{mode} {errno} at call {number}, {operation} {}", path.display());
        let run = Run::new(Some(&format!("{mode} {number} {errno}")));
        let failed = run.printed("failed");
        assert!(run.output.status.success(), "{context}: {:?}", run.output);
        assert_eq!(failed.len() + run.printed("finished").len(), 1, "{context}: {:?}", run.output);
        failures += failed.len();
        if operation == "fsync" {
            // It fails what it was for, and is not tried again.
            assert_eq!(failed.len(), 1, "{context}");
            let synced = &run.trace[number].1;
            let again = run.trace[number + 1..].iter().filter(|(operation, ..)| operation == "fsync");
            assert!(again.into_iter().all(|(_, other, _)| other != synced), "{context}");
        }
        // A failed checkpoint is not counted, now or later, unless it was published before.
        let allowed = run.allowed();
        let now: BTreeSet<_> =
            run.printed("listed").iter().flat_map(|text| text.split(' ')).map(str::to_owned).collect();
        let shown = |state: &State| -> BTreeSet<String> {
            state.0.keys().map(|(kind, step)| format!("{kind}-{step}")).collect()
        };
        for doubtful in run.printed("doubtful") {
            assert!(path.ends_with("root") && !now.contains(&doubtful), "{context}: {now:?}");
            doubts += 1;
        }
        assert!(now.is_empty() || allowed.iter().any(|state| now.is_subset(&shown(state))), "{context}: {now:?}");
        run.check(&context);
    }
    assert!(failures > calls.len() / 2);
    // Each publication has one name that may be lost.
    assert_eq!(doubts, 4);
}

#[test]
fn after_any_failing_call_the_old_or_the_new_state_is_there() {
    fail_at_every_call("fail", EIO);
}

#[test]
fn a_disk_that_is_full_at_any_call_loses_nothing() {
    fail_at_every_call("fail", ENOSPC);
}

#[test]
fn a_call_that_succeeds_but_reports_failure_loses_nothing() {
    fail_at_every_call("fail-after", EIO);
}

/// Else it would find itself to be the owner, until it ends.
#[test]
fn a_failed_opening_can_be_repeated() {
    let calls = Run::of("root-twice", None).trace;
    let mut failures = 0;
    for (number, (operation, path, _)) in calls.iter().enumerate() {
        for mode in ["fail", "fail-after"] {
            let run = Run::of("root-twice", Some(&format!("{mode} {number} {EIO}")));
            let again = run.printed("again");
            failures += again.len();
            assert!(
                again.iter().all(|outcome| outcome == "Ok(())"),
                "{mode} {operation} {}: {again:?}",
                path.display()
            );
        }
    }
    assert!(failures > calls.len() / 2);
}

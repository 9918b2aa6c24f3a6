//! Every system call of a shard writer failing in turn, short writes, a panic, and a full disk without preallocation.
//!
//! Threads share the work, so that the same number may be another call in another run; what must come of it is the same
//! for all calls of a kind.

#![expect(clippy::disallowed_methods, reason = "the tests read what was written")]

#[path = "support/common/mod.rs"]
mod common;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use common::{Mount, child as writer, image};
use tundish_commit::{CommitError, FileMetadata, ShardWriter};

const EIO: i32 = 5;
const EINVAL: i32 = 22;
const ENOSPC: i32 = 28;
const EOPNOTSUPP: i32 = 95;

/// Chunks of both kinds, an unaligned end, an empty file and one in a folder.
const FILES: [(&str, u64); 4] = [("a", (9 << 20) + 5), ("b/c", 4096), ("empty", 0), ("odd", 777)];

/// The files that a writer of that role writes: all, or one in a single direct write.
fn files(role: &str) -> &'static [(&'static str, u64)] {
    if role == "single" { &[("a", 8 << 20)] } else { &FILES }
}

fn bytes(length: u64) -> Vec<u8> {
    (0..length).map(|i| (i ^ (i >> 8) ^ (i >> 16)) as u8).collect()
}

#[test]
fn child() {
    let Some((role, folder, _)) = common::role() else {
        return;
    };
    match write(&role, &folder) {
        Ok(metadata) => println!("outcome=durable {}", metadata.len()),
        Err(error) => {
            let kind = match &error {
                CommitError::Io { .. } => "io",
                CommitError::Panicked { .. } => "panicked",
                other => panic!("{other}"),
            };
            println!("outcome={kind} {} {}", error.raw_os_error().unwrap_or(0), error.path().display());
        }
    }
}

fn write(role: &str, folder: &Path) -> Result<Vec<FileMetadata>, CommitError> {
    let writer = ShardWriter::create(folder, files(role), true, &mut || ControlFlow::Continue(()))?;
    // One byte off, the image does not lie in memory as the file on the disk: everything goes through the page cache.
    let lead = usize::from(role == "cached");
    for &(name, size) in files(role) {
        let image = image(&[&vec![0; lead][..], &bytes(size)].concat());
        // Refused where another write has failed already; that failure is what finish reports.
        let _ = writer.write(name, 0, &image, lead, size as usize);
    }
    let outcome = writer.finish(Duration::from_secs(60)).map(|metadata| metadata.expect("a minute is enough"));
    if outcome.is_err() {
        let again = writer.finish(Duration::ZERO).unwrap_err();
        assert!(matches!(again, CommitError::Poisoned { .. } | CommitError::Panicked { .. }), "{again}");
        assert_eq!(writer.write("a", 0, &image(b""), 0, 0).unwrap_err().path(), again.path());
    }
    outcome
}

struct Run {
    _parent: tempfile::TempDir,
    folder: PathBuf,
    outcome: String,
    /// Operation, path and outcome of each call.
    trace: Vec<[String; 3]>,
}

fn run_in(parent: tempfile::TempDir, role: &str, fault: Option<&str>) -> Run {
    let folder = parent.path().join("folder");
    fs::create_dir(&folder).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let trace = elsewhere.path().join("trace");
    let mut command = writer(role, &folder, 0);
    command.env("TUNDISH_FAILPOINT_TRACE", &trace);
    if let Some(fault) = fault {
        command.env("TUNDISH_FAILPOINT", fault);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let outcome = text.split_once("outcome=").and_then(|(_, rest)| rest.lines().next());
    let outcome = outcome.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr))).to_owned();
    let trace = fs::read_to_string(&trace).unwrap();
    let trace = trace.lines().map(|line| {
        let fields: Vec<_> = line.split('\t').map(str::to_owned).collect();
        fields.try_into().expect("three fields")
    });
    Run { folder, outcome, trace: trace.collect(), _parent: parent }
}

fn run(role: &str, fault: Option<&str>) -> Run {
    run_in(tempfile::tempdir().unwrap(), role, fault)
}

fn assert_whole(run: &Run, role: &str) {
    assert_eq!(run.outcome, format!("durable {}", files(role).len()));
    for &(name, size) in files(role) {
        assert!(fs::read(run.folder.join(name)).unwrap() == bytes(size), "{name}");
    }
}

#[test]
fn every_failing_call_fails_the_writer_with_its_path() {
    for (role, direct) in [("write", true), ("cached", false)] {
        let well = run(role, None);
        assert_whole(&well, role);
        assert_eq!(well.trace.iter().filter(|[operation, ..]| operation == "fsync").count(), FILES.len() + 2);
        for number in 0..well.trace.len() {
            for (mode, errno) in [("fail", EIO), ("fail", ENOSPC), ("fail-after", EIO)] {
                let failed = run(role, Some(&format!("{mode} {number} {errno}")));
                let call = failed.trace.iter().find(|[_, _, outcome]| outcome != "ok");
                let [operation, path, _] = call.expect("a call failed");
                let context = format!("{role}: {mode} {errno} at {operation} of {path}");
                assert_eq!(failed.outcome, format!("io {errno} {path}"), "{context}");
                let fsyncs_of = |path: &String| {
                    failed.trace.iter().filter(|[operation, at, _]| operation == "fsync" && at == path).count()
                };
                assert!(fsyncs_of(path) <= usize::from(operation == "fsync"), "{context}");
            }
        }
        let cached = well.trace.iter().any(|[operation, ..]| operation.starts_with("start writeback"));
        assert_eq!(cached, !direct);
    }
}

#[test]
fn a_panic_fails_the_writer_with_the_path() {
    let well = run("write", None);
    let first_write = well.trace.iter().position(|[operation, ..]| operation == "write").unwrap();
    for number in first_write..well.trace.len() {
        let panicked = run("write", Some(&format!("panic {number}")));
        assert!(panicked.outcome.starts_with("panicked 0 "), "{}", panicked.outcome);
        let path = panicked.outcome.splitn(3, ' ').nth(2).unwrap();
        assert!(Path::new(path).starts_with(&panicked.folder), "{path}");
    }
}

#[test]
fn short_writes_are_completed() {
    for role in ["write", "cached"] {
        let well = run(role, None);
        let first_write = well.trace.iter().position(|[operation, ..]| operation == "write").unwrap();
        for number in first_write..well.trace.len() {
            for length in [1, 4096, 5000] {
                let short = run(role, Some(&format!("short {number} {length}")));
                assert_whole(&short, role);
            }
            // One that writes nothing fails, and is not tried again.
            if well.trace[number][0] == "write" {
                let nothing = run(role, Some(&format!("short {number} 0")));
                assert!(nothing.outcome.starts_with(&format!("io {EIO} ")) || nothing.outcome.starts_with("durable"));
            }
        }
    }
}

#[test]
fn without_direct_io_everything_goes_through_the_page_cache() {
    let well = run("single", None);
    let first_write = well.trace.iter().position(|[operation, ..]| operation == "write").unwrap();
    let refused = run("single", Some(&format!("fail {first_write} {EINVAL}")));
    assert_whole(&refused, "single");
    let writes = |run: &Run| run.trace.iter().filter(|[operation, ..]| operation == "write").count();
    assert_eq!((writes(&well), writes(&refused)), (1, 2));
}

#[test]
fn without_preallocation_the_free_space_is_checked() {
    let Some(mount) = Mount::new("tmpfs", "size=32m") else {
        return;
    };
    let well = run_in(tempfile::tempdir_in(&mount.path).unwrap(), "write", None);
    assert_whole(&well, "write");
    let allocate = well.trace.iter().position(|[operation, ..]| operation == "allocate").unwrap();
    drop(well);
    let fault = format!("fail {allocate} {EOPNOTSUPP}");
    let enough = run_in(tempfile::tempdir_in(&mount.path).unwrap(), "write", Some(&fault));
    assert_whole(&enough, "write");
    assert!(enough.trace.iter().all(|[operation, _, outcome]| operation != "allocate" || outcome != "ok"));
    fs::write(mount.path.join("ballast"), vec![1; 14 << 20]).unwrap();
    let full = run_in(tempfile::tempdir_in(&mount.path).unwrap(), "write", Some(&fault));
    assert_eq!(full.outcome, format!("io {ENOSPC} {}", full.folder.display()));
    assert!(full.trace.iter().all(|[operation, ..]| operation != "write"));
}

//! The real disk with a callback before every call, which may block it.

// Each test executable uses its own part.
#![allow(dead_code)]
#![allow(clippy::disallowed_methods)]

use std::ffi::{OsStr, OsString};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tundish_commit::disk::{Disk, FileStat, LockMode, LockOutcome};
use tundish_commit::root::{HeartbeatTiming, OpenOptions, ProcessIdentity, ReadonlyRoot, Root};
use tundish_commit::{CheckpointKind, CommitError, RealDisk};

type Folder = <RealDisk as Disk>::Folder;
type File = <RealDisk as Disk>::File;
type Outcome<T> = Result<T, CommitError>;

/// The methods of a disk that change it or make something durable.
pub const CHANGING: [&str; 14] = [
    "create_folder",
    "create_hidden_folder",
    "open_to_readers",
    "create_file",
    "create_link",
    "write_at",
    "truncate",
    "fsync",
    "fsync_folder",
    "rename",
    "rename_new",
    "exchange",
    "remove_file",
    "remove_folder",
];

/// Receives the method and the path of each call.
type Watch = dyn Fn(&'static str, &Path) + Send + Sync;

#[derive(Clone)]
pub struct WatchedDisk {
    watch: Arc<Watch>,
}

impl WatchedDisk {
    pub fn new(watch: impl Fn(&'static str, &Path) + Send + Sync + 'static) -> Self {
        Self { watch: Arc::new(watch) }
    }
}

macro_rules! as_the_real_disk {
    ($path:ident: $(fn $name:ident($($argument:ident: $type:ty),*) $(-> $outcome:ty)?;)*) => {
        $(fn $name(&self, $($argument: $type),*) $(-> $outcome)? {
            (self.watch)(stringify!($name), $path);
            RealDisk.$name($($argument),*)
        })*
    };
}

/// As `as_the_real_disk`, for methods without a path: they are not watched.
macro_rules! unwatched {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $(-> $outcome:ty)?;)*) => {
        $(fn $name(&self, $($argument: $type),*) $(-> $outcome)? { RealDisk.$name($($argument),*) })*
    };
}

impl Disk for WatchedDisk {
    type Folder = Folder;
    type File = File;

    forwarded!(as_the_real_disk);

    as_the_real_disk! {
        path:
        fn list(folder: &Folder, path: &Path) -> Outcome<Vec<OsString>>;
        fn look_at(folder: &Folder, name: &OsStr, path: &Path) -> Outcome<Option<FileStat>>;
        fn lock_folder(folder: &Folder, sharing: LockMode, path: &Path) -> Outcome<LockOutcome>;
        fn lock_file(file: &File, sharing: LockMode, path: &Path) -> Outcome<LockOutcome>;
        fn lock_file_for_process(file: &File, path: &Path) -> Outcome<LockOutcome>;
        fn rename_new(from: (&Folder, &OsStr), to: (&Folder, &OsStr), path: &Path) -> Outcome<()>;
        fn exchange(one: (&Folder, &OsStr), other: (&Folder, &OsStr), path: &Path) -> Outcome<()>;
    }

    unwatched! {
        fn is_local(folder: &Folder) -> bool;
        fn unlock_file(file: &File);
        fn unmark(folder: &Folder);
        fn evict(file: &File);
    }
}

/// Opens a root without heartbeats, so that the test makes all calls on the disk.
pub fn open(disk: &WatchedDisk, path: &Path) -> Root<WatchedDisk> {
    let timing = HeartbeatTiming { beat: Duration::from_secs(3600), stale: Duration::from_secs(3600) };
    let opening = OpenOptions { identity: ProcessIdentity::current(), timing, wait: Duration::ZERO };
    Root::open(disk.clone(), path, opening, &mut || Ok(())).unwrap()
}

/// The manifest of a checkpoint as [`write`] writes it.
pub fn manifest(kind: CheckpointKind, step: u64, tag: &str) -> String {
    format!(
        r#"{{"format_version": 1, "kind": "{kind}", "step": {step}, "tag": "{tag}",
        "files": [{{"name": "inner/weights", "size": 9}}]}}"#
    )
}

pub fn write(folder: &Path) {
    fs::create_dir(folder.join("inner")).unwrap();
    fs::write(folder.join("inner/weights"), [7; 9]).unwrap();
}

pub fn save(root: &Root<WatchedDisk>, kind: CheckpointKind, step: u64, tag: &str) -> PathBuf {
    write(&root.begin(kind, step, true).unwrap());
    root.publish(kind, step, &manifest(kind, step, tag), true).unwrap()
}

/// Puts a whole checkpoint there by hand.
pub fn put(path: &Path, kind: CheckpointKind, step: u64) {
    let folder = path.join(format!("{kind}-{step}"));
    fs::create_dir(&folder).unwrap();
    write(&folder);
    fs::write(
        folder.join("tundish.json"),
        tundish_commit::add_manifest_checksum(&manifest(kind, step, "put")).unwrap(),
    )
    .unwrap();
}

/// The folder names and tags of the listed checkpoints.
pub fn listed(root: &Root<WatchedDisk>) -> Vec<(String, String)> {
    let shown = |found: tundish_commit::root::CheckpointInfo| {
        (format!("{}-{}", found.kind, found.step), found.tag.unwrap_or_default())
    };
    root.list().unwrap().into_iter().map(shown).collect()
}

/// The folder names of the listed checkpoints.
pub fn names(root: &Root<WatchedDisk>) -> Vec<String> {
    listed(root).into_iter().map(|(name, _)| name).collect()
}

/// The folder names of the checkpoints that a reader finds.
pub fn visible(path: &Path) -> Vec<String> {
    let found = ReadonlyRoot::open(RealDisk, path).unwrap().list().unwrap();
    found.into_iter().map(|found| format!("{}-{}", found.kind, found.step)).collect()
}

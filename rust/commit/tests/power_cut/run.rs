//! A life of a root on the model, and what is promised at each point of it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tundish_commit::disk::Disk;
use tundish_commit::root::{HeartbeatTiming, OpenOptions, ProcessIdentity, Root};
use tundish_commit::{CheckpointKind, CommitError, ShardWriter};

use crate::common::image;

use crate::model::{ModelDisk, Node, ROOT, World};

/// The number of the save of a step: saved again, it holds other bytes.
pub type Version = u8;

/// The checkpoints that a root must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    pub published: BTreeMap<(CheckpointKind, u64), Version>,
    /// Under the names they were given.
    pub set_aside: BTreeMap<String, (CheckpointKind, u64, Version)>,
}

/// A call, and the changes it made: the first, and one past the last.
#[derive(Debug, Clone)]
pub struct Call {
    pub what: String,
    pub first: usize,
    pub end: usize,
    pub before: State,
    pub after: State,
}

impl Call {
    /// The first word of what it does.
    pub fn verb(&self) -> &str {
        self.what.split(' ').next().unwrap_or_default()
    }

    /// The states that a root may have when the power is cut after `length` changes, the last one by this call.
    pub fn allowed(&self, length: usize) -> Vec<&State> {
        if length == self.end { vec![&self.after] } else { vec![&self.before, &self.after] }
    }
}

/// A root on the model, and all that was called of it.
pub struct Run {
    pub disk: ModelDisk,
    pub calls: Vec<Call>,
    root: Root<ModelDisk>,
    state: State,
}

pub fn contents(kind: CheckpointKind, step: u64, version: Version) -> Vec<(&'static str, Vec<u8>)> {
    let bytes = |seed: u64, length: u64| (0..length).map(|at| (at * 7 + seed + step) as u8 ^ version << 4).collect();
    match kind {
        CheckpointKind::Hf => {
            vec![("config.json", bytes(1, 9)), ("model.safetensors", bytes(2, 24)), ("tokenizer.json", bytes(5, 3))]
        }
        CheckpointKind::Dcp => {
            vec![("inner/rank_0", bytes(4, 18)), ("inner/rank_1", bytes(6, 4)), (".metadata", bytes(3, 10))]
        }
    }
}

pub fn manifest(kind: CheckpointKind, step: u64, version: Version) -> String {
    let files: Vec<_> = contents(kind, step, version)
        .into_iter()
        .map(|(name, bytes)| serde_json::json!({"name": name, "size": bytes.len(), "checksum": null}))
        .collect();
    serde_json::json!({
        "format_version": 1, "kind": kind, "step": step, "tag": null, "world_size": 1,
        "extra": {"version": version}, "files": files,
    })
    .to_string()
}

pub fn open(disk: &ModelDisk) -> Result<Root<ModelDisk>, CommitError> {
    let never = Duration::from_secs(1 << 20);
    let identity = ProcessIdentity {
        host: "model".into(),
        boot_id: String::new(),
        pid_space: String::new(),
        pid: 1,
        started: 0,
        program: String::new(),
    };
    let opening = OpenOptions { identity, timing: HeartbeatTiming { beat: never, stale: never }, wait: Duration::ZERO };
    Root::open(disk.clone(), Path::new(ROOT), opening, &mut || Ok(()))
}

/// Writes the files of a checkpoint into its hidden folder by the writer that all checkpoints are written by.
fn write_by_the_writer(disk: &ModelDisk, folder: &Path, kind: CheckpointKind, step: u64, version: Version) {
    let contents = contents(kind, step, version);
    let files: Vec<_> = contents.iter().map(|(name, bytes)| (*name, bytes.len() as u64)).collect();
    let mut check_cancelled = || ControlFlow::Continue(());
    let writer = ShardWriter::on_disk(disk.clone(), folder, &files, true, &mut check_cancelled).unwrap();
    for (name, bytes) in &contents {
        writer.write(name, 0, &image(bytes), 0, bytes.len()).unwrap();
    }
    let metadata = writer.finish(Duration::from_secs(60)).unwrap().expect("so little is written soon");
    assert_eq!(metadata.len(), contents.len());
}

/// Writes the files by hand: all are made and given their length, then written, then synced. The folders are not: other
/// machines may have made the files, and what those sync here is theirs.
pub fn write_files(disk: &ModelDisk, folder: &Path, kind: CheckpointKind, step: u64, version: Version) {
    let mut writing = Writing::start(disk, folder, kind, step, version);
    while writing.make_change(disk) {}
}

/// The files of a checkpoint while they are written, a change at a time.
struct Writing {
    path: PathBuf,
    files: Vec<(usize, Vec<u8>)>,
    /// Of the first file.
    written: usize,
}

impl Writing {
    fn start(disk: &ModelDisk, path: &Path, kind: CheckpointKind, step: u64, version: Version) -> Self {
        let top = disk.open_path(path).unwrap();
        let mut inner_folder = None;
        let mut files = Vec::new();
        for (name, bytes) in contents(kind, step, version) {
            let (folder, leaf) = match name.split_once('/') {
                None => (top, name),
                Some((inner, leaf)) => {
                    if inner_folder.is_none() {
                        disk.create_folder(&top, OsStr::new(inner), path).unwrap();
                        inner_folder = Some(disk.open_folder(&top, OsStr::new(inner), path).unwrap());
                    }
                    (inner_folder.unwrap(), leaf)
                }
            };
            let file = disk.create_file(&folder, OsStr::new(leaf), path).unwrap();
            disk.allocate(&file, bytes.len() as u64, path).unwrap();
            files.push((file, bytes));
        }
        Self { path: path.to_path_buf(), files, written: 0 }
    }

    /// Makes one more change; `false` when there is none left to make.
    fn make_change(&mut self, disk: &ModelDisk) -> bool {
        let Some((file, bytes)) = self.files.first() else {
            return false;
        };
        if self.written < bytes.len() {
            let rest = &bytes[self.written..];
            self.written += disk.write_at(file, self.written as u64, rest, &self.path).unwrap();
        } else {
            disk.fsync(file, &self.path).unwrap();
            self.files.remove(0);
            self.written = 0;
        }
        true
    }
}

impl Run {
    /// Opens a new root.
    pub fn new() -> Self {
        let disk = ModelDisk::new(World::new(vec![Arc::new(Node::Folder(BTreeMap::new()))]));
        let root = open(&disk).unwrap();
        let end = disk.length();
        let (before, after) = Default::default();
        let calls = vec![Call { what: "open".into(), first: 0, end, before, after }];
        Self { disk, calls, root, state: State::default() }
    }

    /// Calls something that leads from the state of now to that of `after`.
    fn call(&mut self, what: String, after: State, call: impl FnOnce(&Root<ModelDisk>, &ModelDisk)) {
        let first = self.disk.length();
        call(&self.root, &self.disk);
        let before = std::mem::replace(&mut self.state, after.clone());
        self.calls.push(Call { what, first, end: self.disk.length(), before, after });
    }

    pub fn save(&mut self, kind: CheckpointKind, step: u64, version: Version) {
        let unchanged = self.state.clone();
        let overwrite = self.state.published.contains_key(&(kind, step));
        self.call(format!("begin {kind}-{step}"), unchanged.clone(), |root, _| {
            root.begin(kind, step, overwrite).unwrap();
        });
        self.call(format!("write {kind}-{step}"), unchanged.clone(), |root, disk| {
            write_by_the_writer(disk, &root.path().join(format!(".{kind}-{step}.incomplete")), kind, step, version);
        });
        let mut after = unchanged;
        after.published.insert((kind, step), version);
        self.call(format!("publish {kind}-{step}"), after, |root, _| {
            root.publish(kind, step, &manifest(kind, step, version), overwrite).unwrap();
        });
    }

    /// Saves both kinds at once.
    pub fn save_both(&mut self, step: u64, version: Version) {
        let unchanged = self.state.clone();
        self.call(format!("begin both of {step}"), unchanged.clone(), |root, _| {
            CheckpointKind::ALL.into_iter().for_each(|kind| drop(root.begin(kind, step, false).unwrap()));
        });
        self.call(format!("write both of {step}"), unchanged.clone(), |root, disk| {
            let mut writing = CheckpointKind::ALL.map(|kind| {
                let folder = root.path().join(format!(".{kind}-{step}.incomplete"));
                Writing::start(disk, &folder, kind, step, version)
            });
            while writing.iter_mut().map(|writing| writing.make_change(disk)).fold(false, std::ops::BitOr::bitor) {}
        });
        for kind in CheckpointKind::ALL {
            let mut after = self.state.clone();
            after.published.insert((kind, step), version);
            self.call(format!("publish {kind}-{step}"), after, |root, _| {
                root.publish(kind, step, &manifest(kind, step, version), false).unwrap();
            });
        }
    }

    pub fn give_up(&mut self, kind: CheckpointKind, step: u64) {
        self.call(format!("give {kind}-{step} up"), self.state.clone(), |root, disk| {
            let folder = root.begin(kind, step, false).unwrap();
            write_files(disk, &folder, kind, step, 9);
            root.abandon(kind, step).unwrap();
        });
    }

    pub fn remove(&mut self, kind: CheckpointKind, step: u64) {
        let mut after = self.state.clone();
        after.published.remove(&(kind, step)).unwrap();
        self.call(format!("remove {kind}-{step}"), after, |root, _| root.remove(kind, step).unwrap());
    }

    /// Removes a checkpoint from a full disk.
    pub fn make_room(&mut self, kind: CheckpointKind, step: u64) {
        let mut after = self.state.clone();
        after.published.remove(&(kind, step)).unwrap();
        self.call(format!("make room by {kind}-{step}"), after, |root, disk| {
            disk.world().is_full = true;
            root.remove(kind, step).unwrap();
            assert!(!disk.world().is_full);
        });
    }

    pub fn discard_after(&mut self, step: u64) {
        let mut after = self.state.clone();
        after.published.retain(|(_, newer), _| *newer <= step);
        for (&(kind, newer), &version) in self.state.published.iter().filter(|((_, newer), _)| *newer > step) {
            let name = format!("discarded-{kind}-{newer}");
            let again = format!("{name}-2");
            let name = if after.set_aside.contains_key(&name) { again } else { name };
            after.set_aside.insert(name, (kind, newer, version));
        }
        self.call(format!("discard after {step}"), after, |root, _| {
            root.discard_after(step).unwrap();
        });
    }

    /// The owner dies, and another opens the root.
    pub fn reopen(&mut self) {
        let first = self.disk.length();
        // It is dropped only afterwards: the new owner takes over from a dead one.
        let dead = std::mem::replace(&mut self.root, open(&self.disk).unwrap());
        let end = self.disk.length();
        self.calls.push(Call {
            what: "open again".into(),
            first,
            end,
            before: self.state.clone(),
            after: self.state.clone(),
        });
        drop(dead);
        self.disk.world().log.truncate(end);
    }
}

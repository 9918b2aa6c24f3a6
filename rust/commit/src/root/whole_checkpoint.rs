//! Whether a folder is a whole checkpoint, judged without reading its weights.
//!
//! A folder is whole when its manifest is valid, names the kind and step of the folder's name, and lists files that
//! exist with the sizes it says.
//!
//! Invariants: nothing is opened through a symbolic link, and a folder that is not whole stays as it is. A shortage of
//! this process (descriptors, memory) is an error and says nothing about the checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::Arc;

use serde::Serialize;
use serde_json::value::RawValue;

use super::names;
use crate::checksum::Checksum;
use crate::disk::{Disk, EntryKind, FileStat};
use crate::error::CommitError;
use crate::manifest::{self, CheckpointKind, Manifest, ManifestEntry};
use crate::open_folder::OpenFolder;

/// A larger file is no manifest. No number of ranks comes near this size.
const LARGEST_MANIFEST: u64 = 1 << 30;

/// The key of a checkpoint in a root.
pub(crate) type CheckpointKey = (CheckpointKind, u64);

/// Published checkpoints, by kind and step.
pub(crate) type Checkpoints = BTreeMap<CheckpointKey, Arc<PublishedCheckpoint>>;

/// The newest step of a kind.
pub(crate) fn newest(published: &Checkpoints, kind: CheckpointKind) -> Option<u64> {
    published.range((kind, 0)..=(kind, u64::MAX)).next_back().map(|(&(_, step), _)| step)
}

/// A published checkpoint.
#[derive(Debug, Clone, Serialize)]
pub struct CheckpointInfo {
    /// Its kind.
    pub kind: CheckpointKind,
    /// The training step it was taken at.
    pub step: u64,
    /// Its folder, absolute.
    #[serde(skip)]
    pub path: PathBuf,
    /// The `tag` of its save.
    pub tag: Option<String>,
    /// Bytes of all files but the manifest.
    pub bytes: u64,
    /// The number of these files.
    pub files: u64,
    /// The number of ranks that wrote it.
    pub world_size: Option<u64>,
    /// The `extra` of its save.
    pub extra: Option<Box<RawValue>>,
}

impl CheckpointInfo {
    pub(crate) fn new(path: PathBuf, manifest: Manifest) -> Self {
        Self {
            kind: manifest.kind,
            step: manifest.step,
            path,
            bytes: manifest.bytes(),
            files: manifest.files.len() as u64,
            tag: manifest.tag,
            world_size: manifest.world_size,
            extra: manifest.extra,
        }
    }
}

/// A whole checkpoint.
#[derive(Debug, Clone)]
pub(crate) struct PublishedCheckpoint {
    pub(crate) checkpoint: CheckpointInfo,
    /// The status of the manifest file. It identifies the checkpoint: overlayfs may change the inode number of a
    /// folder.
    pub(crate) manifest: FileStat,
}

/// A manifest that was read.
#[derive(Debug)]
pub(crate) struct ReadManifest {
    pub(crate) manifest: Manifest,
    pub(crate) checksum: Checksum,
    /// The status of the manifest file.
    pub(crate) stat: FileStat,
}

/// Why a folder does not count as a whole checkpoint.
#[derive(Debug)]
pub(crate) enum ExamineFailure {
    /// It is not one, for this reason.
    NotWhole(String),
    /// Unknown: this process lacks what it takes to read it.
    Unreadable(CommitError),
}

impl From<CommitError> for ExamineFailure {
    fn from(error: CommitError) -> Self {
        if error.is_shortage() {
            ExamineFailure::Unreadable(error)
        } else {
            ExamineFailure::NotWhole(error.to_string())
        }
    }
}

impl ExamineFailure {
    /// The error of a caller that reads the manifest of the checkpoint in `folder`.
    pub(crate) fn into_error<D: Disk>(self, folder: &OpenFolder<D>) -> CommitError {
        match self {
            ExamineFailure::NotWhole(reason) => {
                let files = vec![manifest::FILE_NAME.to_owned()];
                CommitError::Corrupt { path: folder.path.clone(), reason, files }
            }
            ExamineFailure::Unreadable(error) => error,
        }
    }
}

/// Examines the folder of one checkpoint.
pub(crate) fn examine<D: Disk>(
    root: &OpenFolder<D>,
    kind: CheckpointKind,
    step: u64,
) -> Result<PublishedCheckpoint, ExamineFailure> {
    let folder = root.open_folder(&names::checkpoint(kind, step))?;
    let ReadManifest { manifest, stat: file, .. } = read_manifest(&folder)?;
    if (manifest.kind, manifest.step) != (kind, step) {
        let (kind, step) = (manifest.kind, manifest.step);
        return Err(ExamineFailure::NotWhole(format!("{} says that this is {kind}-{step}", manifest::FILE_NAME)));
    }
    if let Some(damage) = compare_sizes(&folder, &manifest.files)?.first() {
        return Err(ExamineFailure::NotWhole(damage.to_string()));
    }
    Ok(PublishedCheckpoint { checkpoint: CheckpointInfo::new(folder.path, manifest), manifest: file })
}

/// Reads the manifest in a folder.
pub(crate) fn read_manifest<D: Disk>(folder: &OpenFolder<D>) -> Result<ReadManifest, ExamineFailure> {
    let name = OsStr::new(manifest::FILE_NAME);
    let refuse = |reason: String| Err(ExamineFailure::NotWhole(reason));
    let stat = match folder.look_at(name)? {
        None => return refuse(format!("it has no {}", manifest::FILE_NAME)),
        Some(stat) if stat.kind != EntryKind::File || stat.size > LARGEST_MANIFEST => {
            return refuse(format!("its {} is no manifest", manifest::FILE_NAME));
        }
        Some(stat) => stat,
    };
    let bytes = folder.disk.read(&folder.open_file(name)?, &folder.path.join(name))?;
    if !manifest::has_valid_checksum(&bytes) {
        return refuse(format!("its {} is not as it was written", manifest::FILE_NAME));
    }
    let manifest = Manifest::parse(&bytes)
        .map_err(|reason| ExamineFailure::NotWhole(format!("its {}: {reason}", manifest::FILE_NAME)))?;
    Ok(ReadManifest { manifest, checksum: Checksum::of(&bytes), stat })
}

/// A file that differs from the manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// Its name, relative to the folder.
    pub name: String,
    /// The difference, for messages: "is missing".
    pub problem: String,
    /// Whether its bytes were read and differ. If not, another machine may still see the file intact.
    pub is_changed: bool,
}

impl Damage {
    pub(crate) fn unlisted(name: String) -> Self {
        Self { name, problem: "is foreign: it is in no manifest".to_owned(), is_changed: false }
    }
}

impl std::fmt::Display for Damage {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} {}", self.name, self.problem)
    }
}

/// Refuses a folder with any damage.
pub(crate) fn refuse_damaged<D: Disk>(folder: &OpenFolder<D>, mut damaged: Vec<Damage>) -> Result<(), CommitError> {
    damaged.sort_by(|one, other| one.name.cmp(&other.name));
    let Some(first) = damaged.first() else {
        return Ok(());
    };
    let reason = match damaged.len() {
        1 => first.to_string(),
        count => format!("{first}, and {} more", count - 1),
    };
    let files = damaged.into_iter().map(|Damage { name, .. }| name).collect();
    Err(CommitError::Corrupt { path: folder.path.clone(), reason, files })
}

/// Refuses a folder that does not hold exactly the files of its manifest.
pub(crate) fn check_contents<D: Disk>(folder: &OpenFolder<D>, manifest: &Manifest) -> Result<(), CommitError> {
    let mut damaged = compare_sizes(folder, &manifest.files)?;
    let names: BTreeSet<&str> = manifest.files.iter().map(|file| file.name.as_str()).collect();
    damaged.extend(unlisted_files(folder, "", &|name| names.contains(name))?);
    refuse_damaged(folder, damaged)
}

/// Which of `files`, of the manifest, are missing or of another kind or size.
pub(crate) fn compare_sizes<'a, D: Disk>(
    folder: &OpenFolder<D>,
    files: impl IntoIterator<Item = &'a ManifestEntry>,
) -> Result<Vec<Damage>, CommitError> {
    let files: Vec<&ManifestEntry> = files.into_iter().collect();
    let folders = open_inner_folders(folder, files.iter().copied())?;
    let mut damaged = Vec::new();
    for file in files {
        let (parent, base_name) = parent_and_name(&file.name);
        let parent = if parent.is_empty() { Some(folder) } else { folders[parent].as_ref() };
        let stat = parent.map(|parent| parent.look_at(OsStr::new(base_name))).transpose()?.flatten();
        let problem = match stat {
            None => "is missing".to_owned(),
            Some(stat) if stat.kind != EntryKind::File => "is no plain file".to_owned(),
            Some(stat) if stat.size != file.size => {
                format!("has {} bytes in the place of {}", stat.size, file.size)
            }
            Some(_) => continue,
        };
        damaged.push(Damage { name: file.name.clone(), problem, is_changed: false });
    }
    Ok(damaged)
}

/// Opens the folders in `top` that `files` lie in, by relative name; `None` for one that does not exist.
pub(crate) fn open_inner_folders<'a, D: Disk>(
    top: &OpenFolder<D>,
    files: impl Iterator<Item = &'a ManifestEntry>,
) -> Result<BTreeMap<&'a str, Option<OpenFolder<D>>>, CommitError> {
    let mut folders: BTreeMap<&str, Option<OpenFolder<D>>> = BTreeMap::new();
    for file in files {
        for (end, _) in file.name.match_indices('/') {
            let name = &file.name[..end];
            if folders.contains_key(name) {
                continue;
            }
            let (parent, base_name) = parent_and_name(name);
            let parent = if parent.is_empty() { Some(top) } else { folders[parent].as_ref() };
            let opened = match parent {
                Some(parent) if parent.has_folder(OsStr::new(base_name))? => {
                    Some(parent.open_folder(OsStr::new(base_name))?)
                }
                _ => None,
            };
            folders.insert(name, opened);
        }
    }
    Ok(folders)
}

/// Splits a relative name into that of its folder and its last part.
pub(crate) fn parent_and_name(name: &str) -> (&str, &str) {
    name.rsplit_once('/').unwrap_or(("", name))
}

/// The files in a folder and its inner folders that are not `known`.
pub(crate) fn unlisted_files<D: Disk>(
    folder: &OpenFolder<D>,
    prefix: &str,
    known: &dyn Fn(&str) -> bool,
) -> Result<Vec<Damage>, CommitError> {
    let mut found = Vec::new();
    for base_name in folder.list()? {
        let name = format!("{prefix}{}", base_name.to_string_lossy());
        if folder.has_folder(&base_name)? {
            found.extend(unlisted_files(&folder.open_folder(&base_name)?, &format!("{name}/"), known)?);
        } else if base_name.to_str().is_none() || !known(&name) {
            found.push(Damage::unlisted(name));
        }
    }
    Ok(found)
}

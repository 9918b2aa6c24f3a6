//! Whether a folder is a whole checkpoint, judged without reading its weights.
//!
//! A folder is whole when its manifest can be read, names the kind and the step of the folder's name, and lists files
//! that are there with the sizes it says. What always holds: nothing is opened through a symbolic link, and a folder
//! that is not whole is left as it is; what this process lacks to look (descriptors, memory) is an error, and says
//! nothing of the checkpoint.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::PathBuf;

use serde::Serialize;
use serde_json::value::RawValue;

use super::directory::Directory;
use super::layout;
use crate::checksum::Checksum;
use crate::disk::{Disk, EntryKind, Status};
use crate::error::CommitError;
use crate::manifest::{self, Kind, Manifest, ManifestFile};
use crate::seal;

/// No manifest of a checkpoint that any number of ranks wrote comes near that; a file of that name might be anything.
const LARGEST_MANIFEST: u64 = 1 << 30;

/// A published checkpoint.
#[derive(Debug, Clone, Serialize)]
pub struct Checkpoint {
    /// What it is for.
    pub kind: Kind,
    /// The training step it was taken at.
    pub step: u64,
    /// Its folder, absolute.
    #[serde(skip)]
    pub path: PathBuf,
    /// What its save was called.
    pub tag: Option<String>,
    /// Bytes of all files but the manifest.
    pub bytes: u64,
    /// How many ranks wrote it.
    pub world_size: Option<u64>,
    /// What was saved beside the tensors.
    pub extra: Option<Box<RawValue>>,
}

impl Checkpoint {
    pub(super) fn new(path: PathBuf, manifest: Manifest) -> Self {
        Self {
            kind: manifest.kind,
            step: manifest.step,
            path,
            bytes: manifest.bytes(),
            tag: manifest.tag,
            world_size: manifest.world_size,
            extra: manifest.extra,
        }
    }
}

/// A whole checkpoint, and which folder it is.
#[derive(Debug, Clone)]
pub(super) struct Published {
    pub(super) checkpoint: Checkpoint,
    pub(super) status: Status,
    /// Of its manifest, by which it is known where the number of its folder does not stay.
    pub(super) manifest: Status,
}

/// What a manifest says.
#[derive(Debug)]
pub(super) struct Said {
    pub(super) manifest: Manifest,
    pub(super) checksum: Checksum,
    /// Of the file.
    pub(super) status: Status,
}

/// Why a folder is not taken for a whole checkpoint.
#[derive(Debug)]
pub(super) enum Unwhole {
    /// It is none, for this reason.
    For(String),
    /// Nothing is known of it: this process lacks what it takes to look.
    Unseen(CommitError),
}

impl From<CommitError> for Unwhole {
    fn from(error: CommitError) -> Self {
        if error.is_shortage() { Unwhole::Unseen(error) } else { Unwhole::For(error.to_string()) }
    }
}

impl Unwhole {
    /// As the error of who was to read the checkpoint in `folder`.
    pub(super) fn of_manifest<D: Disk>(self, folder: &Directory<D>) -> CommitError {
        match self {
            Unwhole::For(reason) => {
                let files = vec![manifest::FILE_NAME.to_owned()];
                CommitError::Corrupt { path: folder.path.clone(), reason, files }
            }
            Unwhole::Unseen(error) => error,
        }
    }
}

/// Looks at the folder of one checkpoint; the error says why it is not whole.
pub(super) fn examine<D: Disk + Clone>(root: &Directory<D>, kind: Kind, step: u64) -> Result<Published, Unwhole> {
    let folder = root.open_folder(&layout::checkpoint(kind, step))?;
    let Said { manifest, status: file, .. } = read_manifest(&folder)?;
    if (manifest.kind, manifest.step) != (kind, step) {
        let (kind, step) = (manifest.kind, manifest.step);
        return Err(Unwhole::For(format!("{} says that this is {kind}-{step}", manifest::FILE_NAME)));
    }
    if let Some(damage) = compare(&folder, &manifest.files)?.first() {
        return Err(Unwhole::For(damage.to_string()));
    }
    let status = folder.status()?;
    Ok(Published { checkpoint: Checkpoint::new(folder.path, manifest), status, manifest: file })
}

/// Reads the manifest in a folder.
pub(super) fn read_manifest<D: Disk + Clone>(folder: &Directory<D>) -> Result<Said, Unwhole> {
    let name = OsStr::new(manifest::FILE_NAME);
    let refuse = |reason: String| Err(Unwhole::For(reason));
    let status = match folder.look_at(name)? {
        None => return refuse(format!("it has no {}", manifest::FILE_NAME)),
        Some(status) if status.kind != EntryKind::File || status.size > LARGEST_MANIFEST => {
            return refuse(format!("its {} is no manifest", manifest::FILE_NAME));
        }
        Some(status) => status,
    };
    let bytes = folder.disk.read(&folder.open_file(name)?, &folder.path.join(name))?;
    if !seal::is_intact(&bytes) {
        return refuse(format!("its {} is not as it was written", manifest::FILE_NAME));
    }
    let manifest =
        Manifest::parse(&bytes).map_err(|reason| Unwhole::For(format!("its {}: {reason}", manifest::FILE_NAME)))?;
    Ok(Said { manifest, checksum: Checksum::of(&bytes), status })
}

/// A file that is not as the manifest says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// Its name, relative to the folder.
    pub name: String,
    /// How it differs, for people: "is missing".
    pub what: String,
    /// Whether its bytes were read, and are others. If not, whoever looks from elsewhere may see the file as it was.
    pub is_changed: bool,
}

impl Damage {
    pub(super) fn foreign(name: String) -> Self {
        Self { name, what: "is foreign: it is in no manifest".to_owned(), is_changed: false }
    }
}

impl std::fmt::Display for Damage {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} {}", self.name, self.what)
    }
}

/// Which of `files`, of the manifest, are missing or of another kind or size.
pub(super) fn compare<'a, D: Disk + Clone>(
    folder: &Directory<D>,
    files: impl IntoIterator<Item = &'a ManifestFile>,
) -> Result<Vec<Damage>, CommitError> {
    let mut folders: BTreeMap<&str, Option<Directory<D>>> = BTreeMap::new();
    let mut damaged = Vec::new();
    for file in files {
        let (parent, leaf) = file.name.rsplit_once('/').unwrap_or(("", &file.name));
        open_inner(folder, parent, &mut folders)?;
        let directory = if parent.is_empty() { Some(folder) } else { folders[parent].as_ref() };
        let status = directory.map(|directory| directory.look_at(OsStr::new(leaf))).transpose()?.flatten();
        let what = match status {
            None => "is missing".to_owned(),
            Some(status) if status.kind != EntryKind::File => "is no plain file".to_owned(),
            Some(status) if status.size != file.size => {
                format!("has {} bytes in the place of {}", status.size, file.size)
            }
            Some(_) => continue,
        };
        damaged.push(Damage { name: file.name.clone(), what, is_changed: false });
    }
    Ok(damaged)
}

/// Sees that `folders` holds the folder `name` and those that it lies in; `None` for one that is none.
fn open_inner<'a, D: Disk + Clone>(
    top: &Directory<D>,
    name: &'a str,
    folders: &mut BTreeMap<&'a str, Option<Directory<D>>>,
) -> Result<(), CommitError> {
    let ends = name.match_indices('/').map(|(end, _)| end).chain((!name.is_empty()).then_some(name.len()));
    for end in ends {
        let (inner, leaf) = (&name[..end], name[..end].rsplit('/').next().unwrap_or_default());
        if folders.contains_key(inner) {
            continue;
        }
        let parent = match inner.rsplit_once('/') {
            None => Some(top),
            Some((parent, _)) => folders[parent].as_ref(),
        };
        let opened = match parent {
            Some(parent) if is_folder(parent, leaf)? => Some(parent.open_folder(OsStr::new(leaf))?),
            _ => None,
        };
        folders.insert(inner, opened);
    }
    Ok(())
}

fn is_folder<D: Disk + Clone>(parent: &Directory<D>, name: &str) -> Result<bool, CommitError> {
    Ok(parent.look_at(OsStr::new(name))?.is_some_and(|status| status.kind == EntryKind::Folder))
}

/// The files in a folder and in those within it that `known` does not name.
pub(super) fn strangers<D: Disk + Clone>(
    folder: &Directory<D>,
    prefix: &str,
    known: &dyn Fn(&str) -> bool,
) -> Result<Vec<Damage>, CommitError> {
    let mut found = Vec::new();
    for leaf in folder.list()? {
        let name = format!("{prefix}{}", leaf.to_string_lossy());
        if folder.look_at(&leaf)?.is_some_and(|status| status.kind == EntryKind::Folder) {
            found.extend(strangers(&folder.open_folder(&leaf)?, &format!("{name}/"), known)?);
        } else if leaf.to_str().is_none() || !known(&name) {
            found.push(Damage::foreign(name));
        }
    }
    Ok(found)
}

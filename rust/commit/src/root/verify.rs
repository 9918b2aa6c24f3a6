//! Whether a checkpoint holds what its manifest says, judged by every byte of it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::path::PathBuf;

use super::checkpoint::{Damage, compare, read_manifest, strangers};
use super::directory::Directory;
use crate::checksum::Checksum;
use crate::disk::Disk;
use crate::error::CommitError;
use crate::manifest::{self, Manifest, ManifestFile};
use crate::reading::{self, Source, Unread};

/// Reads every file of the checkpoint in `folder` and compares it with the manifest. Who verifies a checkpoint that
/// others may remove keeps it. Returns the names of the files that were saved without a checksum: of them only the size
/// is known.
pub(super) fn verify<D: Disk + Clone>(
    folder: &Directory<D>,
    go_on: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<String>, CommitError> {
    let (manifest, _) = read_manifest(folder).map_err(|unwhole| unwhole.of_manifest(folder))?;
    let mut damaged = differences(folder, &manifest)?;
    let bad: BTreeSet<String> = damaged.iter().map(|damage| damage.name.clone()).collect();
    let readable = manifest.files.iter().filter(|file| !bad.contains(&file.name));
    damaged.extend(compare_bytes(folder, readable, go_on)?);
    refuse(folder, damaged)?;
    Ok(manifest.files.into_iter().filter(|file| file.checksum.is_none()).map(|file| file.name).collect())
}

/// What is missing, of another size, or in no manifest.
fn differences<D: Disk + Clone>(folder: &Directory<D>, manifest: &Manifest) -> Result<Vec<Damage>, CommitError> {
    let mut damaged = compare(folder, manifest)?;
    let names: BTreeSet<&str> = manifest.files.iter().map(|file| file.name.as_str()).collect();
    let is_known = |name: &str| names.contains(name) || name == manifest::FILE_NAME;
    damaged.extend(strangers(folder, "", &is_known)?);
    Ok(damaged)
}

/// Files whose bytes are not those of the manifest.
fn compare_bytes<'a, D: Disk + Clone>(
    top: &Directory<D>,
    files: impl Iterator<Item = &'a ManifestFile>,
    go_on: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<Damage>, CommitError> {
    let mut damaged = Vec::new();
    let mut summed = Vec::new();
    for file in files {
        match file.checksum.as_deref().map(str::parse::<Checksum>) {
            None => {}
            Some(Ok(checksum)) => summed.push(Summed { file, checksum, path: top.path.join(&file.name) }),
            Some(Err(error)) => damaged.push(damage(file, format!("has in the manifest what is {error}"))),
        }
    }
    let folders = open_folders(top, summed.iter().map(|summed| summed.file))?;
    let sources: Vec<_> = summed
        .iter()
        .map(|Summed { file, path, .. }| {
            let (parent, leaf) = split(&file.name);
            let folder = folders.get(parent).unwrap_or(top);
            Source { folder: &folder.folder, leaf: OsStr::new(leaf), path, size: file.size }
        })
        .collect();
    for (summed, outcome) in summed.iter().zip(reading::checksums(&top.disk, &sources, &top.path, go_on)?) {
        let what = match outcome {
            Ok(checksum) if checksum == summed.checksum => continue,
            Ok(checksum) => format!("has the checksum {checksum} in the place of {}", summed.checksum),
            Err(Unread::Short) => "became shorter while it was read".to_owned(),
            // Of its bytes nothing is known.
            Err(Unread::Failed(error)) if error.is_shortage() => return Err(error),
            Err(Unread::Failed(error)) => format!("cannot be read: {error}"),
        };
        damaged.push(damage(summed.file, what));
    }
    Ok(damaged)
}

/// A file, the checksum that it should have, and where it lies.
struct Summed<'a> {
    file: &'a ManifestFile,
    checksum: Checksum,
    path: PathBuf,
}

/// The folders in `top` that files lie in, by their names relative to it.
fn open_folders<'a, D: Disk + Clone>(
    top: &Directory<D>,
    files: impl Iterator<Item = &'a ManifestFile>,
) -> Result<BTreeMap<&'a str, Directory<D>>, CommitError> {
    let mut folders: BTreeMap<&str, Directory<D>> = BTreeMap::new();
    for file in files {
        for (end, _) in file.name.match_indices('/') {
            let name = &file.name[..end];
            if !folders.contains_key(name) {
                let (parent, leaf) = split(name);
                let opened = folders.get(parent).unwrap_or(top).open_folder(OsStr::new(leaf))?;
                folders.insert(name, opened);
            }
        }
    }
    Ok(folders)
}

/// The name of the folder that a file lies in, and its own in there.
fn split(name: &str) -> (&str, &str) {
    name.rsplit_once('/').unwrap_or(("", name))
}

fn damage(file: &ManifestFile, what: String) -> Damage {
    Damage { name: file.name.clone(), what }
}

/// Refuses a folder with any damage.
fn refuse<D: Disk + Clone>(folder: &Directory<D>, mut damaged: Vec<Damage>) -> Result<(), CommitError> {
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

//! Verifies a checkpoint against its manifest, byte by byte.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::path::PathBuf;

use super::whole_checkpoint::{
    Damage, ReadManifest, compare_sizes, open_inner_folders, parent_and_name, read_manifest, refuse_damaged,
    unlisted_files,
};
use crate::checksum::Checksum;
use crate::disk::Disk;
use crate::error::CommitError;
use crate::file_checksums::{ChecksumFailure, FileToSum, checksums};
use crate::manifest::{self, Manifest, ManifestEntry};
use crate::open_folder::OpenFolder;

/// Reads every file of the checkpoint in `folder` and compares it with the manifest. Returns the names of files that
/// were saved without a checksum: only their sizes were compared. The caller keeps the checkpoint from being removed.
pub(super) fn verify<D: Disk>(
    folder: &OpenFolder<D>,
    on_progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<String>, CommitError> {
    let ReadManifest { manifest, .. } = read_manifest(folder).map_err(|problem| problem.into_error(folder))?;
    let mut damaged = damage_in(folder, manifest.files.iter(), true, on_progress)?;
    damaged.extend(unlisted_in(folder, &manifest)?);
    refuse_damaged(folder, damaged)?;
    Ok(manifest.files.into_iter().filter(|file| file.checksum.is_none()).map(|file| file.name).collect())
}

/// The damage of the files `names` of the checkpoint in `folder`. Their bytes are read only with `every_byte`.
pub(super) fn verify_files<D: Disk>(
    folder: &OpenFolder<D>,
    manifest: &Manifest,
    names: &BTreeSet<String>,
    every_byte: bool,
    on_progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<Damage>, CommitError> {
    let files: BTreeMap<&str, &ManifestEntry> = manifest.files.iter().map(|file| (file.name.as_str(), file)).collect();
    let wanted = || names.iter().map(|name| (name, files.get(name.as_str()).copied()));
    let mut damaged = damage_in(folder, wanted().filter_map(|(_, file)| file), every_byte, on_progress)?;
    let unknown = wanted().filter(|(_, file)| file.is_none());
    damaged.extend(unknown.map(|(name, _)| Damage::unlisted(name.clone())));
    Ok(damaged)
}

/// The files of the checkpoint in `folder` that its manifest does not list.
pub(super) fn foreign_files<D: Disk>(folder: &OpenFolder<D>, manifest: &Manifest) -> Result<Vec<String>, CommitError> {
    Ok(unlisted_in(folder, manifest)?.into_iter().map(|damage| damage.name).collect())
}

/// The bytes of one file, whose `size` and `checksum` come from the manifest.
pub(super) fn read_file<D: Disk>(
    folder: &OpenFolder<D>,
    name: &str,
    size: u64,
    checksum: Option<&str>,
) -> Result<Vec<u8>, CommitError> {
    if manifest::check_names(std::iter::once(name)).is_err() {
        refuse_damaged(folder, vec![Damage::unlisted(name.to_owned())])?;
    }
    let file = ManifestEntry { name: name.to_owned(), size, checksum: checksum.map(str::to_owned) };
    refuse_damaged(folder, compare_sizes(folder, [&file])?)?;
    let folders = open_inner_folders(folder, std::iter::once(&file))?;
    let (parent, base_name) = parent_and_name(name);
    let opened = folders.get(parent).and_then(Option::as_ref).unwrap_or(folder).open_file(OsStr::new(base_name))?;
    let bytes = folder.disk.read(&opened, &folder.path.join(name))?;
    let found = Checksum::of(&bytes);
    let problem = match checksum.map(str::parse::<Checksum>) {
        _ if bytes.len() as u64 != size => format!("has {} bytes in the place of {size}", bytes.len()),
        None => return Ok(bytes),
        Some(Ok(expected)) if expected == found => return Ok(bytes),
        Some(Ok(expected)) => other_checksum(found, expected),
        Some(Err(error)) => format!("has in the manifest what is {error}"),
    };
    refuse_damaged(folder, vec![changed(&file, problem)])?;
    Ok(bytes)
}

/// Which of `files` are missing, of another size or, with `every_byte`, of other bytes.
fn damage_in<'a, D: Disk>(
    folder: &OpenFolder<D>,
    files: impl Iterator<Item = &'a ManifestEntry> + Clone,
    every_byte: bool,
    on_progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<Damage>, CommitError> {
    let mut damaged = compare_sizes(folder, files.clone())?;
    if every_byte {
        let bad: BTreeSet<String> = damaged.iter().map(|damage| damage.name.clone()).collect();
        damaged.extend(compare_bytes(folder, files.filter(|file| !bad.contains(&file.name)), on_progress)?);
    }
    Ok(damaged)
}

fn unlisted_in<D: Disk>(folder: &OpenFolder<D>, manifest: &Manifest) -> Result<Vec<Damage>, CommitError> {
    let names: BTreeSet<&str> = manifest.files.iter().map(|file| file.name.as_str()).collect();
    unlisted_files(folder, "", &|name| names.contains(name) || name == manifest::FILE_NAME)
}

/// Files whose bytes differ from the checksums of the manifest.
fn compare_bytes<'a, D: Disk>(
    top: &OpenFolder<D>,
    files: impl Iterator<Item = &'a ManifestEntry>,
    on_progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<Damage>, CommitError> {
    let mut damaged = Vec::new();
    let mut summed = Vec::new();
    for file in files {
        match file.checksum.as_deref().map(str::parse::<Checksum>) {
            None => {}
            Some(Ok(checksum)) => summed.push((file, checksum)),
            Some(Err(error)) => damaged.push(changed(file, format!("has in the manifest what is {error}"))),
        }
    }
    let folders = open_inner_folders(top, summed.iter().map(|(file, _)| *file))?;
    let paths: Vec<PathBuf> = summed.iter().map(|(file, _)| top.path.join(&file.name)).collect();
    let sources: Vec<_> = summed
        .iter()
        .zip(&paths)
        .map(|((file, _), path)| {
            let (parent, base_name) = parent_and_name(&file.name);
            let folder = folders.get(parent).and_then(Option::as_ref).unwrap_or(top);
            FileToSum { folder: &folder.folder, base_name: OsStr::new(base_name), path, size: file.size }
        })
        .collect();
    let outcomes = checksums(&top.disk, &sources, &top.path, on_progress)?;
    for ((file, expected), outcome) in summed.iter().zip(outcomes) {
        damaged.push(match outcome {
            Ok(found) if found == *expected => continue,
            Ok(found) => changed(file, other_checksum(found, *expected)),
            Err(failure) => unreadable(file, failure)?,
        });
    }
    Ok(damaged)
}

/// The damage of a file that could not be read to its end; an error where this process lacks what it takes to read it.
fn unreadable(file: &ManifestEntry, failure: ChecksumFailure) -> Result<Damage, CommitError> {
    let problem = match failure {
        ChecksumFailure::Short => "became shorter while it was read".to_owned(),
        ChecksumFailure::Failed(error) if error.is_shortage() => return Err(error),
        ChecksumFailure::Failed(error) => format!("cannot be read: {error}"),
    };
    Ok(Damage { name: file.name.clone(), problem, is_changed: false })
}

fn other_checksum(found: Checksum, expected: Checksum) -> String {
    format!("has the checksum {found} in the place of {expected}")
}

fn changed(file: &ManifestEntry, problem: String) -> Damage {
    Damage { name: file.name.clone(), problem, is_changed: true }
}

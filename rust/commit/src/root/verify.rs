//! Whether a checkpoint holds what its manifest says, judged by every byte of it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::path::PathBuf;

use super::checkpoint::{Damage, Said, compare, read_manifest, strangers};
use super::directory::Directory;
use crate::checksum::Checksum;
use crate::disk::Disk;
use crate::error::CommitError;
use crate::manifest::{self, Manifest, ManifestFile};
use crate::reading::{self, Source, Unread};

/// A part of a file: `size` bytes from `start` on.
#[derive(Clone, Debug)]
pub struct Part {
    /// Of the file, as the manifest says it.
    pub name: String,
    /// The first byte.
    pub start: u64,
    /// How many.
    pub size: u64,
}

/// Reads every file of the checkpoint in `folder` and compares it with the manifest. Who verifies a checkpoint that
/// others may remove keeps it. Returns the names of the files that were saved without a checksum: of them only the size
/// is known.
pub(super) fn verify<D: Disk + Clone>(
    folder: &Directory<D>,
    go_on: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<String>, CommitError> {
    let Said { manifest, .. } = read_manifest(folder).map_err(|unwhole| unwhole.of_manifest(folder))?;
    let mut damaged = damage_in(folder, manifest.files.iter(), true, go_on)?;
    damaged.extend(foreign_in(folder, &manifest)?);
    refuse(folder, damaged)?;
    Ok(manifest.files.into_iter().filter(|file| file.checksum.is_none()).map(|file| file.name).collect())
}

/// What is damaged of the files `names` of the checkpoint in `folder`; their bytes are read only with `every_byte`.
pub(super) fn verify_files<D: Disk + Clone>(
    folder: &Directory<D>,
    manifest: &Manifest,
    names: &BTreeSet<String>,
    every_byte: bool,
    go_on: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<Damage>, CommitError> {
    let files: BTreeMap<&str, &ManifestFile> = manifest.files.iter().map(|file| (file.name.as_str(), file)).collect();
    let wanted = || names.iter().map(|name| (name, files.get(name.as_str()).copied()));
    let mut damaged = damage_in(folder, wanted().filter_map(|(_, file)| file), every_byte, go_on)?;
    let unknown = wanted().filter(|(_, file)| file.is_none());
    damaged.extend(unknown.map(|(name, _)| Damage::foreign(name.clone())));
    Ok(damaged)
}

/// The checksums of `parts` of files of the checkpoint in `folder`, and what is damaged of these files as far as a part
/// of one shows it: then it has none.
pub(super) fn sum_parts<D: Disk + Clone>(
    folder: &Directory<D>,
    manifest: &Manifest,
    parts: &[Part],
    go_on: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<(Vec<Option<Checksum>>, Vec<Damage>), CommitError> {
    let names: BTreeSet<String> = parts.iter().map(|part| part.name.clone()).collect();
    let mut damaged = verify_files(folder, manifest, &names, false, go_on)?;
    let bad: BTreeSet<String> = damaged.iter().map(|damage| damage.name.clone()).collect();
    let files: BTreeMap<&str, &ManifestFile> = manifest.files.iter().map(|file| (file.name.as_str(), file)).collect();
    let wanted: Vec<(usize, Region<'_>)> = parts
        .iter()
        .enumerate()
        .filter(|(_, part)| !bad.contains(&part.name))
        .map(|(number, part)| (number, Region { file: files[part.name.as_str()], start: part.start, size: part.size }))
        .collect();
    let mut sums = vec![None; parts.len()];
    let regions: Vec<Region<'_>> = wanted.iter().map(|(_, region)| *region).collect();
    for ((number, region), outcome) in wanted.iter().zip(read(folder, &regions, go_on)?) {
        match outcome {
            Ok(checksum) => sums[*number] = Some(checksum),
            Err(unread) => damaged.push(of_unread(region.file, unread)?),
        }
    }
    Ok((sums, damaged))
}

/// What is wrong with the file `name`, whose parts, one after the other, have these checksums and sizes.
pub(super) fn compare_sums(manifest: &Manifest, name: &str, sums: &[(Checksum, u64)]) -> Option<Damage> {
    let Some(file) = manifest.files.iter().find(|file| file.name == name) else {
        return Some(Damage::foreign(name.to_owned()));
    };
    let found = sums.iter().fold(Checksum::EMPTY, |before, (next, size)| before.then(*next, *size));
    match file.checksum.as_deref().map(str::parse::<Checksum>)? {
        Ok(expected) if expected == found => None,
        Ok(expected) => Some(changed(file, other_checksum(found, expected))),
        Err(error) => Some(changed(file, format!("has in the manifest what is {error}"))),
    }
}

/// The files of the checkpoint in `folder` that its manifest does not list.
pub(super) fn foreign_files<D: Disk + Clone>(
    folder: &Directory<D>,
    manifest: &Manifest,
) -> Result<Vec<String>, CommitError> {
    Ok(foreign_in(folder, manifest)?.into_iter().map(|damage| damage.name).collect())
}

/// The bytes of one file, whose `size` and `checksum` are those of the manifest.
///
/// # Errors
/// [`CommitError::Corrupt`] where they are not what the file has.
pub(super) fn read_file<D: Disk + Clone>(
    folder: &Directory<D>,
    name: &str,
    size: u64,
    checksum: Option<&str>,
) -> Result<Vec<u8>, CommitError> {
    if manifest::check_names(std::iter::once(name)).is_err() {
        refuse(folder, vec![Damage::foreign(name.to_owned())])?;
    }
    let file = ManifestFile { name: name.to_owned(), size, checksum: checksum.map(str::to_owned) };
    refuse(folder, compare(folder, [&file])?)?;
    let (parent, leaf) = split(name);
    let parents = open_folders(folder, std::iter::once(&file))?;
    let opened = parents.get(parent).unwrap_or(folder).open_file(OsStr::new(leaf))?;
    let bytes = folder.disk.read(&opened, &folder.path.join(name))?;
    let found = Checksum::of(&bytes);
    let what = match checksum.map(str::parse::<Checksum>) {
        _ if bytes.len() as u64 != size => format!("has {} bytes in the place of {size}", bytes.len()),
        None => return Ok(bytes),
        Some(Ok(expected)) if expected == found => return Ok(bytes),
        Some(Ok(expected)) => other_checksum(found, expected),
        Some(Err(error)) => format!("has in the manifest what is {error}"),
    };
    refuse(folder, vec![changed(&file, what)])?;
    Ok(bytes)
}

/// Which of `files` are missing, of another size or, with `every_byte`, of other bytes.
fn damage_in<'a, D: Disk + Clone>(
    folder: &Directory<D>,
    files: impl Iterator<Item = &'a ManifestFile> + Clone,
    every_byte: bool,
    go_on: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<Damage>, CommitError> {
    let mut damaged = compare(folder, files.clone())?;
    if every_byte {
        let bad: BTreeSet<String> = damaged.iter().map(|damage| damage.name.clone()).collect();
        damaged.extend(compare_bytes(folder, files.filter(|file| !bad.contains(&file.name)), go_on)?);
    }
    Ok(damaged)
}

/// What is in no manifest.
fn foreign_in<D: Disk + Clone>(folder: &Directory<D>, manifest: &Manifest) -> Result<Vec<Damage>, CommitError> {
    let names: BTreeSet<&str> = manifest.files.iter().map(|file| file.name.as_str()).collect();
    strangers(folder, "", &|name| names.contains(name) || name == manifest::FILE_NAME)
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
            Some(Ok(checksum)) => summed.push((Region { file, start: 0, size: file.size }, checksum)),
            Some(Err(error)) => damaged.push(changed(file, format!("has in the manifest what is {error}"))),
        }
    }
    let regions: Vec<Region<'_>> = summed.iter().map(|(region, _)| *region).collect();
    for ((Region { file, .. }, expected), outcome) in summed.iter().zip(read(top, &regions, go_on)?) {
        damaged.push(match outcome {
            Ok(found) if found == *expected => continue,
            Ok(found) => changed(file, other_checksum(found, *expected)),
            Err(unread) => of_unread(file, unread)?,
        });
    }
    Ok(damaged)
}

/// Bytes of a file.
#[derive(Clone, Copy)]
struct Region<'a> {
    file: &'a ManifestFile,
    start: u64,
    size: u64,
}

/// The checksums of `regions` of files in `top`.
fn read<D: Disk + Clone>(
    top: &Directory<D>,
    regions: &[Region<'_>],
    go_on: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<Result<Checksum, Unread>>, CommitError> {
    let folders = open_folders(top, regions.iter().map(|region| region.file))?;
    let paths: Vec<PathBuf> = regions.iter().map(|region| top.path.join(&region.file.name)).collect();
    let sources: Vec<_> = regions
        .iter()
        .zip(&paths)
        .map(|(&Region { file, start, size }, path)| {
            let (parent, leaf) = split(&file.name);
            let folder = folders.get(parent).unwrap_or(top);
            Source { folder: &folder.folder, leaf: OsStr::new(leaf), path, start, size }
        })
        .collect();
    reading::checksums(&top.disk, &sources, &top.path, go_on)
}

/// A file that could not be read to where it should end; an error where nothing is known of its bytes.
fn of_unread(file: &ManifestFile, unread: Unread) -> Result<Damage, CommitError> {
    let what = match unread {
        Unread::Short => "became shorter while it was read".to_owned(),
        Unread::Failed(error) if error.is_shortage() => return Err(error),
        Unread::Failed(error) => format!("cannot be read: {error}"),
    };
    Ok(Damage { name: file.name.clone(), what, is_changed: false })
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

fn other_checksum(found: Checksum, expected: Checksum) -> String {
    format!("has the checksum {found} in the place of {expected}")
}

fn changed(file: &ManifestFile, what: String) -> Damage {
    Damage { name: file.name.clone(), what, is_changed: true }
}

/// Refuses a folder with any damage.
fn refuse<D: Disk>(folder: &Directory<D>, mut damaged: Vec<Damage>) -> Result<(), CommitError> {
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

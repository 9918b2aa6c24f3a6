//! Finds the processes that map a file, whether they take part in any locks or not.
//!
//! It reads `maps` (proc(5)) of every process that this one may look at. It cannot tell about other processes: of a
//! file that only its user can open, that is a process of the same user that forbids it (`prctl(PR_SET_DUMPABLE)`), one
//! of root, or one of another namespace. Such a mapping stays as it is when the name goes.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};

use crate::error::ShmError;
use crate::named::FileIdentity;

/// The processes that map each of these files, ascending; files that none maps are left out.
pub(super) fn mappers(files: &[FileIdentity]) -> Result<HashMap<FileIdentity, Vec<u32>>, ShmError> {
    let wanted: HashMap<Place, FileIdentity> = files.iter().map(|file| (Place::of(*file), *file)).collect();
    let mut found: HashMap<FileIdentity, Vec<u32>> = HashMap::new();
    for process in numbers_in(Path::new("/proc"))? {
        for place in places_of(process)? {
            let Some(file) = wanted.get(&place) else { continue };
            let processes = found.entry(*file).or_default();
            if processes.last() != Some(&process) {
                processes.push(process);
            }
        }
    }
    Ok(found)
}

/// A file as `maps` names it.
#[derive(PartialEq, Eq, Hash)]
struct Place {
    major: u32,
    minor: u32,
    inode: u64,
}

impl Place {
    fn of(file: FileIdentity) -> Self {
        Self { major: major(file.device), minor: minor(file.device), inode: file.inode }
    }

    /// From a line such as `7f2c…-7f2c… r--s 00000000 00:1a 4711   /dev/shm/…`.
    fn parse(line: &[u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ').skip(3).map(|field| str::from_utf8(field).ok());
        let (major, minor) = fields.next()??.split_once(':')?;
        let inode = fields.next()??.parse().ok()?;
        Some(Self { major: u32::from_str_radix(major, 16).ok()?, minor: u32::from_str_radix(minor, 16).ok()?, inode })
    }
}

fn places_of(process: u32) -> Result<Vec<Place>, ShmError> {
    let folder = PathBuf::from(format!("/proc/{process}"));
    let maps = read(&folder.join("maps"))?;
    if !maps.is_empty() {
        return Ok(parse(&maps));
    }
    // A kernel's own thread, or a process whose first thread has ended: then the others still show the maps.
    let mut places = Vec::new();
    for thread in numbers_in(&folder.join("task"))? {
        places.extend(parse(&read(&folder.join(format!("task/{thread}/maps")))?));
    }
    Ok(places)
}

fn parse(maps: &[u8]) -> Vec<Place> {
    maps.split(|byte| *byte == b'\n').filter_map(Place::parse).filter(|place| place.inode != 0).collect()
}

/// What a file of a process says: nothing when that has ended, or may not be looked at.
fn read(path: &Path) -> Result<Vec<u8>, ShmError> {
    std::fs::read(path).or_else(|error| if hides(&error) { Ok(Vec::new()) } else { Err(failed(path, error)) })
}

fn numbers_in(folder: &Path) -> Result<Vec<u32>, ShmError> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if folder != Path::new("/proc") && hides(&error) => return Ok(Vec::new()),
        outcome => outcome.map_err(|error| failed(folder, error))?,
    };
    let mut numbers = Vec::new();
    for entry in entries {
        let entry = match entry {
            Err(error) if hides(&error) => continue,
            outcome => outcome.map_err(|error| failed(folder, error))?,
        };
        numbers.extend(entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

fn hides(error: &std::io::Error) -> bool {
    const ENDED: i32 = rustix::io::Errno::SRCH.raw_os_error();
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) || error.raw_os_error() == Some(ENDED)
}

fn failed(path: &Path, source: std::io::Error) -> ShmError {
    ShmError::Io { operation: "see which processes map a segment: read", object: path.display().to_string(), source }
}

//! Finds the named segments of this user, and removes those that no process holds.
//!
//! Invariants: the sweep looks only at a file of this user, under a name of this library, with its header. It removes
//! the file only if no process holds the segment (`probe.rs`). Any number of processes may sweep at once, and create
//! and attach meanwhile.

use std::path::PathBuf;

use super::probe::ProbedFile;
use super::{SegmentFolder, SegmentName};
use crate::error::ShmError;
use crate::memory::memory_file::CheckCancelled;

/// A named segment of this user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedSegment {
    /// Its name.
    pub name: SegmentName,
    /// Its file.
    pub path: PathBuf,
    /// Bytes of the file.
    pub bytes: usize,
    /// The process that made it, by its id then.
    pub maker: u32,
}

/// The named segments that a sweep found.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct SweepReport {
    /// Segments that no process holds: removed unless it is a dry run.
    pub dead: Vec<NamedSegment>,
    /// Segments that a process holds.
    pub live: Vec<NamedSegment>,
    /// Errors of segments that could not be examined or removed. The next sweep tries again.
    pub failed: Vec<ShmError>,
}

/// Removes the named segments of this user that no process holds; with `dry_run` it changes nothing.
///
/// # Errors
/// If the folder cannot be listed, and the error of `check_cancelled`. The report holds the errors of single segments.
pub fn sweep(
    folder: &SegmentFolder,
    dry_run: bool,
    check_cancelled: CheckCancelled<'_>,
) -> Result<SweepReport, ShmError> {
    let mut report = SweepReport::default();
    for name in folder.names()? {
        let probe = match ProbedFile::take(folder, &name, check_cancelled) {
            Ok(Some(probe)) => probe,
            Ok(None) => continue,
            Err(ShmError::Interrupted) => return Err(ShmError::Interrupted),
            Err(error) => {
                report.failed.push(error);
                continue;
            }
        };
        let is_held = probe.is_held().and_then(|is_held| {
            if !is_held && !dry_run {
                probe.remove()?;
            }
            Ok(is_held)
        });
        let path = folder.path_of(&name);
        let segment = NamedSegment { name: name.clone(), path, bytes: probe.bytes, maker: probe.maker };
        match is_held {
            Ok(true) => report.live.push(segment),
            Ok(false) => report.dead.push(segment),
            Err(error) => report.failed.push(error),
        }
    }
    Ok(report)
}

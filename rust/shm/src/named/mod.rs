//! Named segments: memory for processes that share nothing but a name.
//!
//! A named segment exists as long as a process holds it (see [`probe`]). A segment that no process holds is dead: no
//! process attaches to it. The next process that creates under its name removes it, and so does a [`sweep`].
//!
//! Invariants:
//!
//! 1. A name leads to a whole segment: its pages are reserved, its header is written, its creator holds it. The file
//!    gets its name in one step (`O_TMPFILE` and `linkat`, open(2)); a creator that is killed before leaves nothing.
//! 2. A name is never removed while a process holds the segment. The files of other users, and files that do not begin
//!    with this library's header, are never removed.
//! 3. The last holder removes the name. A killed holder leaves it to the next process that creates, or to a sweep.
//!
//! A child made by `fork` shares the holds of its parent: a segment is held until both have dropped it, or ended.

mod probe;
mod segment_folder;
pub mod sweep;
#[cfg(test)]
mod tests;

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::OFlags;

use probe::ProbedFile;
use segment_folder::FileIdentity;
pub use segment_folder::{SegmentFolder, SegmentName};

use crate::error::ShmError;
use crate::memory::memory_file::{self, CheckCancelled, Writers};
use crate::memory::memory_limits;
use crate::process::PerProcess;
use crate::segment::attachment::{self, AttachError, Attachment};
use crate::segment::{Segment, SegmentAddress, size_for};
use sweep::sweep;

static HAS_SWEPT: PerProcess<AtomicBool> = PerProcess::new(|| AtomicBool::new(false));

/// A claim to a name for a new segment. Dropped before `publish`, it leaves nothing.
#[derive(Debug)]
pub struct NameClaim {
    folder: Arc<SegmentFolder>,
    name: SegmentName,
}

impl NameClaim {
    /// Claims a name that is free now. A dead segment of that name is removed first, since the new one may need its
    /// room. The first claim of a process sweeps all names.
    ///
    /// # Errors
    /// [`ShmError::Exists`] if the name is taken, and the error of `check_cancelled`.
    pub fn new(
        folder: Arc<SegmentFolder>,
        name: SegmentName,
        check_cancelled: CheckCancelled<'_>,
    ) -> Result<Self, ShmError> {
        if !HAS_SWEPT.get().swap(true, Ordering::Relaxed) {
            // Segments that cannot be swept are left to the next sweep.
            if let Err(ShmError::Interrupted) = sweep(&folder, false, check_cancelled) {
                return Err(ShmError::Interrupted);
            }
        }
        clear(&folder, &name, check_cancelled)?;
        Ok(Self { folder, name })
    }

    /// A segment for `len` bytes of data, zeros, which is to get the name.
    ///
    /// # Errors
    /// [`ShmError::NoSpace`] if the file system has no room, [`ShmError::NoHeadroom`], and the error of
    /// `check_cancelled`.
    pub fn make_segment(&self, len: usize, check_cancelled: CheckCancelled<'_>) -> Result<Segment, ShmError> {
        let size = size_for(len)?.next_multiple_of(rustix::param::page_size());
        let (file, on_huge_pages) = self.make_file(size, check_cancelled)?;
        Segment::in_file(file, size, on_huge_pages)
    }

    /// Returns a file of `size` reserved bytes, and how many of them lie on huge pages. Its descriptor
    /// carries the hold, and so do the maps that are made of it.
    fn make_file(&self, size: usize, check_cancelled: CheckCancelled<'_>) -> Result<(OwnedFd, usize), ShmError> {
        let full = |free| ShmError::NoSpace { path: self.folder.path_of(&self.name), asked: size as u64, free };
        match self.folder.free()? {
            Some(free) if free < size as u64 => return Err(full(free)),
            _ => memory_limits::check(size as u64)?,
        }
        let file = self.folder.make()?;
        let on_huge_pages = match memory_file::reserve(file.as_fd(), size, Writers::Present, check_cancelled) {
            // Another process took the room meanwhile. Closing the file frees the reserved part.
            Err(ShmError::Io { source, .. }) if source.kind() == ErrorKind::StorageFull => {
                let reserved = memory_file::status(file.as_fd())?.st_blocks.unsigned_abs() * 512;
                return Err(full(reserved + self.folder.free()?.unwrap_or_default()));
            }
            outcome => outcome?,
        };
        // Nobody else knows the file.
        memory_file::lock_shared(file.as_fd())?;
        Ok((file, on_huge_pages))
    }

    /// Gives the name to the segment in `file`, whose header and data are written.
    ///
    /// # Errors
    /// [`ShmError::Exists`] if another process was faster, and the error of `check_cancelled`.
    pub fn publish(self, file: BorrowedFd<'_>, check_cancelled: CheckCancelled<'_>) -> Result<NameHold, ShmError> {
        let Self { folder, name } = self;
        let identity = FileIdentity::of(&memory_file::status(file)?);
        while !folder.link(file, &name)? {
            clear(&folder, &name, check_cancelled)?;
        }
        Ok(NameHold { folder, name, file: identity })
    }
}

/// A named segment that was attached to.
#[derive(Debug)]
pub struct NamedFile {
    /// Read-only. The descriptor carries the hold, and so do the maps that are made of it.
    pub file: OwnedFd,
    /// To be dropped after them.
    pub hold: NameHold,
}

impl NamedFile {
    /// Maps the segment and registers its attachment, if it is the one that was expected.
    ///
    /// # Errors
    /// As of [`attachment::attach`].
    pub fn into_attachment(self, expected: Option<&SegmentAddress>) -> Result<Arc<Attachment>, ShmError> {
        let NamedFile { file, hold } = self;
        let attached = Attachment::new(file, expected, false, Some(Arc::new(hold)));
        attached.map(attachment::add).map_err(AttachError::into_error)
    }
}

/// Attaches to the segment of this name.
///
/// # Errors
/// [`ShmError::Missing`] if no process holds a segment of this name, and the error of `check_cancelled`.
pub fn attach(
    folder: Arc<SegmentFolder>,
    name: SegmentName,
    check_cancelled: CheckCancelled<'_>,
) -> Result<NamedFile, ShmError> {
    let missing = || ShmError::Missing { path: folder.path_of(&name) };
    let probe = ProbedFile::take(&folder, &name, check_cancelled)?.ok_or_else(missing)?;
    if !probe.is_held()? {
        return Err(missing());
    }
    let (file, stat) = folder.open(&name, OFlags::RDONLY)?.ok_or_else(missing)?;
    let identity = FileIdentity::of(&stat);
    if identity != probe.identity() {
        // A process that does not ask for the lock has put another file there.
        return Err(missing());
    }
    // It succeeds: the exclusive lock is asked for under the probe lock only.
    memory_file::lock_shared(file.as_fd())?;
    drop(probe);
    Ok(NamedFile { file, hold: NameHold { folder, name, file: identity } })
}

/// Removes a segment's name when its last holder drops it.
///
/// Drop it after the descriptors and maps that carry the hold in this process. Otherwise the name is left to a sweep.
#[derive(Debug)]
pub struct NameHold {
    folder: Arc<SegmentFolder>,
    name: SegmentName,
    file: FileIdentity,
}

impl Drop for NameHold {
    fn drop(&mut self) {
        // Whatever fails here leaves the name to the next sweep.
        if let Ok(Some(probe)) = ProbedFile::take(&self.folder, &self.name, &mut || Ok(()))
            && probe.identity() == self.file
            && matches!(probe.is_held(), Ok(false))
        {
            let _ = probe.remove();
        }
    }
}

/// Removes a dead segment of this name.
fn clear(folder: &SegmentFolder, name: &SegmentName, check_cancelled: CheckCancelled<'_>) -> Result<(), ShmError> {
    let holder = match ProbedFile::take(folder, name, check_cancelled)? {
        None if folder.status(name)?.is_none() => return Ok(()),
        None => "another user or program, which made it".to_owned(),
        Some(probe) if probe.is_held()? => {
            format!("process {}, which made it, or by processes that are attached to it", probe.maker)
        }
        Some(probe) => return probe.remove(),
    };
    Err(ShmError::Exists { path: folder.path_of(name), holder })
}

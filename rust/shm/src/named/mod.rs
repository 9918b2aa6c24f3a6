//! Named segments: memory for processes that share nothing but a name.
//!
//! A named segment exists as long as a process holds it (see [`probe`]). Nobody attaches to one that no process holds;
//! the next process that creates under its name removes it first, and so does [`sweep`](crate::sweep).
//!
//! Invariants:
//!
//! 1. A name leads to a whole segment: its pages are reserved, its header is written, its creator holds it. The file
//!    gets its name in one step (`O_TMPFILE` and `linkat`, open(2)); a creator that is killed before leaves nothing.
//! 2. A name is never removed while a process holds or maps the segment, nor where another user made the file, nor
//!    where it does not begin with this library's header.
//! 3. The last holder removes the name. A killed holder leaves it to the next process that creates, or to a sweep.
//!
//! A child made by `fork` shares the holds of its parent: a segment is held until both have dropped it, or ended.

mod directory;
pub(crate) mod probe;
#[cfg(test)]
mod tests;

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::OFlags;

pub use directory::{Directory, FileIdentity, SegmentName};
use probe::Probe;

use crate::error::ShmError;
use crate::memory_file::{self, GoOn, Writers};
use crate::memory_limits;
use crate::per_process::PerProcess;
use crate::segment::{Segment, size_for};
use crate::sweep::{State, judge, sweep};

static HAS_SWEPT: PerProcess<AtomicBool> = PerProcess::new(|| AtomicBool::new(false));

/// A name for a new segment, which does not have it yet; dropped, it leaves nothing.
#[derive(Debug)]
pub struct Claim {
    directory: Arc<Directory>,
    name: SegmentName,
}

impl Claim {
    /// Makes sure that the name is free now: removes what is dead, which may have the room that the new one needs. The
    /// first claim of a process sweeps all names.
    ///
    /// # Errors
    /// [`ShmError::Exists`] where it is taken, and what `go_on` says.
    pub fn new(directory: Arc<Directory>, name: SegmentName, go_on: GoOn<'_>) -> Result<Self, ShmError> {
        if !HAS_SWEPT.get().swap(true, Ordering::Relaxed) {
            // What cannot be swept is in nobody's way but that of the next sweep.
            if let Err(ShmError::Interrupted) = sweep(&directory, go_on) {
                return Err(ShmError::Interrupted);
            }
        }
        clear(&directory, &name, go_on)?;
        Ok(Self { directory, name })
    }

    /// A segment for `len` bytes of data, zeros, which is to get the name.
    ///
    /// # Errors
    /// [`ShmError::NoSpace`] where the file system has no room: before any of it is taken from others, as far as that
    /// can be told. [`ShmError::NoHeadroom`], and what `go_on` says.
    pub fn make_segment(&self, len: usize, huge: bool, go_on: GoOn<'_>) -> Result<Segment, ShmError> {
        let size = size_for(len)?.next_multiple_of(rustix::param::page_size());
        let (file, on_huge_pages) = self.make_file(size, go_on)?;
        Segment::in_file(file, size, on_huge_pages, huge)
    }

    /// A file of `size` bytes, every page of it there; and how many bytes of it lie on huge ones. Its descriptor
    /// carries the hold, and so do the maps that are made of it.
    fn make_file(&self, size: usize, go_on: GoOn<'_>) -> Result<(OwnedFd, usize), ShmError> {
        let full = |free| ShmError::NoSpace { path: self.directory.path_of(&self.name), asked: size as u64, free };
        match self.directory.free()? {
            Some(free) if free < size as u64 => return Err(full(free)),
            _ => memory_limits::check(size as u64)?,
        }
        let file = self.directory.make()?;
        let on_huge_pages = match memory_file::reserve(file.as_fd(), size, Writers::Present, go_on) {
            // Another took the room meanwhile. What was reserved so far comes back when the file is closed.
            Err(ShmError::Io { source, .. }) if source.kind() == ErrorKind::StorageFull => {
                let reserved = memory_file::status(file.as_fd())?.st_blocks.unsigned_abs() * 512;
                return Err(full(reserved + self.directory.free()?.unwrap_or_default()));
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
    /// [`ShmError::Exists`] where another was faster, and what `go_on` says.
    pub fn publish(self, file: BorrowedFd<'_>, go_on: GoOn<'_>) -> Result<Hold, ShmError> {
        let Self { directory, name } = self;
        let identity = FileIdentity::of(&memory_file::status(file)?);
        while !directory.link(file, &name)? {
            clear(&directory, &name, go_on)?;
        }
        Ok(Hold { directory, name, file: identity })
    }
}

/// A named segment that was attached to.
#[derive(Debug)]
pub struct Attached {
    /// Read-only. The descriptor carries the hold, and so do the maps that are made of it.
    pub file: OwnedFd,
    /// To be dropped after them.
    pub hold: Hold,
}

/// Attaches to the segment of this name.
///
/// # Errors
/// [`ShmError::Missing`] where nobody holds a segment of this name: a dead one counts as none, for what it says is of
/// another run. And what `go_on` says.
pub fn attach(directory: Arc<Directory>, name: SegmentName, go_on: GoOn<'_>) -> Result<Attached, ShmError> {
    let missing = || ShmError::Missing { path: directory.path_of(&name) };
    let probe = Probe::take(&directory, &name, go_on)?.ok_or_else(missing)?;
    if !probe.is_held()? {
        return Err(missing());
    }
    let (file, stat) = directory.open(&name, OFlags::RDONLY)?.ok_or_else(missing)?;
    let identity = FileIdentity::of(&stat);
    if identity != probe.identity() {
        // Somebody who does not ask for the lock has put another file there.
        return Err(missing());
    }
    // The exclusive lock is asked for by who has the probe lock only.
    memory_file::lock_shared(file.as_fd())?;
    drop(probe);
    Ok(Attached { file, hold: Hold { directory, name, file: identity } })
}

/// Has a segment's name taken away when its last holder lets go.
///
/// It is to be dropped after the descriptors and maps that carry the hold in this process. Where it is dropped earlier,
/// or not at all, the name is left to a sweep.
#[derive(Debug)]
pub struct Hold {
    directory: Arc<Directory>,
    name: SegmentName,
    file: FileIdentity,
}

impl Hold {
    /// The segment's name.
    pub fn name(&self) -> &SegmentName {
        &self.name
    }

    /// The file behind the name.
    pub fn identity(&self) -> FileIdentity {
        self.file
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Whatever fails here leaves the name to the next sweep.
        if let Ok(Some(probe)) = Probe::take(&self.directory, &self.name, &mut || Ok(()))
            && probe.identity() == self.file
            && matches!(probe.is_held(), Ok(false))
        {
            let _ = probe.remove();
        }
    }
}

/// Makes sure that the name is free: removes what is dead, refuses what is not.
fn clear(directory: &Directory, name: &SegmentName, go_on: GoOn<'_>) -> Result<(), ShmError> {
    let holder = match Probe::take(directory, name, go_on)? {
        None if directory.look_at(name)?.is_none() => return Ok(()),
        None => "another user or program, which made it".to_owned(),
        Some(probe) => match judge(&probe)? {
            State::Dead => return probe.remove(),
            State::Held if probe.owner.lives() => format!("process {}, which made it", probe.owner.process),
            State::Held => format!("others, though process {} which made it has ended", probe.owner.process),
            State::QueueMemory(processes) => format!("processes that map it: {}", listed(&processes)),
        },
    };
    Err(ShmError::Exists { path: directory.path_of(name), holder })
}

fn listed(processes: &[u32]) -> String {
    processes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

//! How many writers of a node write at once.
//!
//! A slot is an exclusive `flock` on an empty file in node-local memory, named by the user, the root and the slot's
//! number. The kernel drops the lock however its holder ends, and a holder that ends well removes the file. What
//! always holds:
//!
//! 1. A lock counts only where its name still leads to the file that is locked: a holder removes the name before it
//!    unlocks, so two writers never both believe in one slot.
//! 2. Nobody waits without bound. A holder dates its file with each piece that it has written; one that was not
//!    dated for [`STALLED`] belongs to a stopped process, or to a child that inherited it from a dead one, and who
//!    waits takes its name away. The limit spares the disk; a save is worth more.
//! 3. For the same reason it is no failure where locks cannot be had: then nobody waits.
//!
//! The files are no data, and no disk holds them: they do not go through [`Disk`](crate::disk::Disk).

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::geteuid;

/// After which time without a written piece (of 8 MiB) a holder is not waited for any longer.
const STALLED: Duration = Duration::from_secs(15);

/// Where the node's memory is a file system.
const SHARED_MEMORY: &str = "/dev/shm";

/// The slots of the writers under one root.
#[derive(Debug)]
pub(super) struct Slots {
    names: Vec<PathBuf>,
    stalled: Duration,
}

/// One who waits for a slot.
#[derive(Debug)]
pub(super) struct Waiting<'a> {
    slots: &'a Slots,
    /// What each slot's file was last seen as, and since when.
    seen: Vec<Option<(Sight, Instant)>>,
}

/// The right to write, given back when dropped.
#[derive(Debug)]
pub(super) struct Slot {
    /// `None` where there is nothing to hold.
    held: Option<(OwnedFd, PathBuf)>,
}

/// Number and date of a file.
type Sight = (u64, i128, i128);

enum Try {
    Taken(OwnedFd),
    Busy(Stat),
    /// Removed by its holder just now.
    Gone,
}

impl Slots {
    /// `count` slots for all writers to the folder whose device and number are `root`.
    pub(super) fn new(count: usize, root: (u64, u64)) -> Self {
        let memory = Path::new(SHARED_MEMORY);
        let place = if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() };
        Self::in_place(&place, count, root, STALLED)
    }

    fn in_place(place: &Path, count: usize, (device, number): (u64, u64), stalled: Duration) -> Self {
        let user = geteuid().as_raw();
        let name = |slot| place.join(format!("tundish-writer-{user}-{device:x}-{number:x}-{slot}"));
        Slots { names: (0..count).map(name).collect(), stalled }
    }

    pub(super) fn wait(&self) -> Waiting<'_> {
        Waiting { slots: self, seen: vec![None; self.names.len()] }
    }
}

impl Waiting<'_> {
    /// A slot, if one is free now.
    pub(super) fn try_take(&mut self) -> Option<Slot> {
        for (name, seen) in self.slots.names.iter().zip(&mut self.seen) {
            match try_one(name) {
                Ok(Try::Taken(file)) => return Some(Slot { held: Some((file, name.clone())) }),
                Ok(Try::Gone) => *seen = None,
                Ok(Try::Busy(holder)) => match seen {
                    Some((before, since)) if *before == sight(&holder) => {
                        if since.elapsed() >= self.slots.stalled {
                            remove_name(name, &holder);
                        }
                    }
                    _ => *seen = Some((sight(&holder), Instant::now())),
                },
                Err(_) => return Some(Slot { held: None }),
            }
        }
        None
    }
}

impl Slot {
    /// Tells those who wait that the holder is alive.
    pub(super) fn date(&self) {
        if let Some((file, _)) = &self.held {
            let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
            let _ = rustix::fs::futimens(file, &Timestamps { last_access: now, last_modification: now });
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some((file, name)) = &self.held {
            if let Ok(own) = rustix::fs::fstat(file) {
                remove_name(name, &own);
            }
            // Not left to closing it: a child made by `fork` meanwhile has the file open too.
            let _ = rustix::fs::flock(file, FlockOperation::Unlock);
        }
    }
}

fn try_one(name: &Path) -> Result<Try, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = retry_on_intr(|| rustix::fs::openat(CWD, name, flags, Mode::RUSR | Mode::WUSR))?;
    let open = rustix::fs::fstat(&file)?;
    if open.st_uid != geteuid().as_raw() {
        return Err(Errno::PERM);
    }
    match retry_on_intr(|| rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)) {
        Err(Errno::WOULDBLOCK) => Ok(Try::Busy(open)),
        Err(errno) => Err(errno),
        Ok(()) if leads_to(name, &open)? => Ok(Try::Taken(file)),
        Ok(()) => Ok(Try::Gone),
    }
}

/// Removes a name that leads to the file of `stat`. Another's that comes under it between the two calls loses
/// its name too: then one more may write at once than should.
fn remove_name(name: &Path, stat: &Stat) {
    if leads_to(name, stat) == Ok(true) {
        let _ = rustix::fs::unlinkat(CWD, name, AtFlags::empty());
    }
}

fn leads_to(name: &Path, stat: &Stat) -> Result<bool, Errno> {
    match rustix::fs::statat(CWD, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(named) => Ok((named.st_dev, named.st_ino) == (stat.st_dev, stat.st_ino)),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(errno),
    }
}

fn sight(stat: &Stat) -> Sight {
    (stat.st_ino, i128::from(stat.st_mtime), i128::from(stat.st_mtime_nsec))
}

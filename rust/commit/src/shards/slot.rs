//! How many writers of a node write at once.
//!
//! A slot is an exclusive `flock` on an empty file in node-local memory, named by the user, the root and the slot's
//! number. The kernel drops the lock however its holder ends, and a holder that ends well removes the file. What
//! always holds:
//!
//! 1. A lock counts only where its name still leads to the file that is locked: a holder removes the name before it
//!    unlocks, and who sweeps removes it with the lock held, so two writers never both believe in one slot, but for 2
//!    and 3.
//! 2. Nobody waits without bound. A holder dates its file with each piece that it has written; one that was not
//!    dated for [`STALLED`] belongs to a stopped process, or to a child that inherited it from a dead one, and who
//!    waits takes its name away. The limit spares the disk; a save is worth more.
//! 3. For the same reason it is no failure where locks cannot be had: who has none does not wait, and leaves no name.
//!
//! The files are no data, and no disk holds them: they do not go through [`Disk`](crate::disk::Disk).

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::geteuid;

/// After which time without a written piece (of 8 MiB) a holder is not waited for any longer.
const STALLED: Duration = Duration::from_secs(15);

/// What the names of all slots begin with.
const PREFIX: &str = "tundish-writer";

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

/// Removes the files of slots that writers of this user left who were killed; returns them, sorted. `root`: only of
/// those who wrote under this folder. `dry_run` only looks. A file that anybody has locked is left alone, and what
/// cannot be looked at too: who waits for a slot takes it from the dead by itself.
pub fn sweep_slots(root: Option<&Path>, dry_run: bool) -> Vec<PathBuf> {
    sweep_in(&place(), root.map(of_root), dry_run)
}

fn sweep_in(place: &Path, root: Option<Option<(u64, u64)>>, dry_run: bool) -> Vec<PathBuf> {
    let prefix = match root {
        None => format!("{PREFIX}-{}-", geteuid().as_raw()),
        Some(Some(root)) => prefix_of(root),
        // It is not there: nobody writes under it.
        Some(None) => return Vec::new(),
    };
    let Ok(folder) = rustix::fs::open(place, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) else {
        return Vec::new();
    };
    let Ok(entries) = rustix::fs::Dir::new(folder) else {
        return Vec::new();
    };
    let names = entries.flatten().map(|entry| place.join(OsStr::from_bytes(entry.file_name().to_bytes())));
    let ours = names.filter(|path| path.file_name().is_some_and(|name| name.as_bytes().starts_with(prefix.as_bytes())));
    let mut dead: Vec<_> = ours.filter(|path| sweep_one(path, dry_run).unwrap_or(false)).collect();
    dead.sort();
    dead
}

/// Whether it is a slot's file that nobody has locked; then it is removed, unless `dry_run`.
fn sweep_one(path: &Path, dry_run: bool) -> Result<bool, Errno> {
    // Not to wait for the other end of a pipe that somebody put there.
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = retry_on_intr(|| rustix::fs::openat(CWD, path, flags, Mode::empty()))?;
    let open = rustix::fs::fstat(&file)?;
    // What is no empty file of this user is none of a writer.
    if open.st_uid != geteuid().as_raw() || !FileType::from_raw_mode(open.st_mode).is_file() || open.st_size != 0 {
        return Ok(false);
    }
    match retry_on_intr(|| rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)) {
        Err(Errno::WOULDBLOCK) => return Ok(false),
        outcome => outcome?,
    }
    let is_there = leads_to(path, &open)?;
    if is_there && !dry_run {
        // Under the lock: a writer that has opened it meanwhile sees that the name leads elsewhere, and makes another.
        rustix::fs::unlinkat(CWD, path, AtFlags::empty())?;
    }
    // Not left to closing it: as where a slot is given back.
    let _ = rustix::fs::flock(&file, FlockOperation::Unlock);
    Ok(is_there)
}

/// Device and number of a folder.
fn of_root(root: &Path) -> Option<(u64, u64)> {
    rustix::fs::stat(root).ok().map(|status| (status.st_dev, status.st_ino))
}

fn place() -> PathBuf {
    let memory = Path::new(SHARED_MEMORY);
    if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() }
}

fn prefix_of((device, number): (u64, u64)) -> String {
    format!("{PREFIX}-{}-{device:x}-{number:x}-", geteuid().as_raw())
}

impl Slots {
    /// `count` slots for all writers to the folder whose device and number are `root`.
    pub(super) fn new(count: usize, root: (u64, u64)) -> Self {
        Self::in_place(&place(), count, root, STALLED)
    }

    fn in_place(place: &Path, count: usize, root: (u64, u64), stalled: Duration) -> Self {
        let prefix = prefix_of(root);
        let name = |slot| place.join(format!("{prefix}{slot}"));
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
    /// What is given where there is nothing to hold.
    #[cfg(test)]
    pub(super) fn of_nothing() -> Self {
        Slot { held: None }
    }

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
        Err(errno) => {
            // Most likely this call made it. Nobody could sweep it later, which takes the lock, too.
            remove_name(name, &open);
            Err(errno)
        }
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

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests play dead writers and strangers")]
mod tests {
    use super::*;

    const ROOT: (u64, u64) = (7, 11);
    const FOREVER: Duration = Duration::from_secs(3600);

    fn slots(place: &tempfile::TempDir, count: usize) -> Slots {
        Slots::in_place(place.path(), count, ROOT, FOREVER)
    }

    fn files(place: &tempfile::TempDir) -> usize {
        std::fs::read_dir(place.path()).unwrap().count()
    }

    #[test]
    fn there_are_as_many_slots_as_are_asked_for() {
        let place = tempfile::tempdir().unwrap();
        let slots = slots(&place, 2);
        let first = slots.wait().try_take().unwrap();
        let second = slots.wait().try_take().unwrap();
        assert!(first.held.is_some() && second.held.is_some());
        let mut waiting = slots.wait();
        assert!(waiting.try_take().is_none());
        drop(first);
        let third = waiting.try_take().unwrap();
        assert!(slots.wait().try_take().is_none());
        drop((second, third));
        assert_eq!(files(&place), 0, "who ends well leaves nothing");
    }

    #[test]
    fn writers_to_other_roots_do_not_wait() {
        let place = tempfile::tempdir().unwrap();
        let _held = slots(&place, 1).wait().try_take().unwrap();
        let other = Slots::in_place(place.path(), 1, (7, 12), FOREVER);
        assert!(other.wait().try_take().is_some_and(|slot| slot.held.is_some()));
    }

    #[test]
    fn a_slot_of_a_dead_writer_is_free() {
        let place = tempfile::tempdir().unwrap();
        let slots = slots(&place, 1);
        // What a killed writer leaves: a file that nobody has locked.
        std::fs::File::create(&slots.names[0]).unwrap();
        assert!(slots.wait().try_take().is_some_and(|slot| slot.held.is_some()));
        assert_eq!(files(&place), 0);
    }

    #[test]
    fn a_holder_that_stands_still_loses_its_slot_and_a_living_one_does_not() {
        let place = tempfile::tempdir().unwrap();
        let slots = Slots::in_place(place.path(), 1, ROOT, Duration::from_millis(200));
        let held = slots.wait().try_take().unwrap();
        let mut waiting = slots.wait();
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(20));
            held.date();
            assert!(waiting.try_take().is_none());
        }
        let mut taken = None;
        let since = Instant::now();
        while taken.is_none() {
            assert!(since.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(20));
            taken = waiting.try_take();
        }
        assert!(since.elapsed() >= Duration::from_millis(190), "{:?}", since.elapsed());
        assert!(taken.as_ref().is_some_and(|slot| slot.held.is_some()), "others wait for the new holder");
        assert!(slots.wait().try_take().is_none());
        // When the old holder wakes up it takes nothing from the new one.
        drop(held);
        assert!(slots.wait().try_take().is_none());
        drop(taken);
        assert_eq!(files(&place), 0);
    }

    #[test]
    fn a_sweep_removes_what_dead_writers_left_and_nothing_else() {
        let place = tempfile::tempdir().unwrap();
        let held = slots(&place, 2).wait().try_take().unwrap();
        let name = |slot: usize| slots(&place, 2).names[slot].clone();
        let other = Slots::in_place(place.path(), 1, (7, 12), FOREVER).names[0].clone();
        let full = Slots::in_place(place.path(), 1, (7, 13), FOREVER).names[0].clone();
        std::fs::File::create(name(1)).unwrap();
        std::fs::File::create(&other).unwrap();
        std::fs::write(&full, "somebody's").unwrap();
        std::fs::write(place.path().join("tundish-other"), "").unwrap();
        assert_eq!(sweep_in(place.path(), Some(None), false), [] as [PathBuf; 0]);
        assert_eq!(sweep_in(place.path(), Some(Some(ROOT)), true), [name(1)]);
        assert_eq!(sweep_in(place.path(), Some(Some(ROOT)), false), [name(1)]);
        assert_eq!(sweep_in(place.path(), None, false), [other]);
        assert_eq!(sweep_in(place.path(), None, false), [] as [PathBuf; 0]);
        // The writer that lives still has its slot.
        assert!(slots(&place, 1).wait().try_take().is_none());
        assert!(name(0).exists() && full.exists());
        drop(held);
    }

    #[test]
    fn where_no_lock_can_be_had_nobody_waits() {
        let place = tempfile::tempdir().unwrap();
        let slots = Slots::in_place(&place.path().join("missing"), 1, ROOT, FOREVER);
        let first = slots.wait().try_take().unwrap();
        assert!(first.held.is_none());
        first.date();
        assert!(slots.wait().try_take().is_some());
        // A name that leads elsewhere is not followed.
        let slots = self::slots(&place, 1);
        std::os::unix::fs::symlink("elsewhere", &slots.names[0]).unwrap();
        assert!(slots.wait().try_take().is_some_and(|slot| slot.held.is_none()));
        assert_eq!(files(&place), 1);
    }
}

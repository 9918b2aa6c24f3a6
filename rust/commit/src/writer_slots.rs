//! Slots that limit how many writers of a node write at once.
//!
//! A slot is an exclusive `flock` on an empty file in node-local memory. Its name contains the user, the root and the
//! number of the slot. The kernel drops the lock however its holder ends; a holder that ends normally removes the file.
//!
//! Invariants:
//!
//! 1. A lock counts only while its name leads to the locked file. A holder removes the name before it unlocks, and a
//!    sweep removes it under the lock. So two writers never hold one slot, except in cases 2 and 3.
//! 2. Nobody waits without bound. A holder touches its file after each chunk. A file that was not touched for
//!    [`STALLED`] belongs to a stopped process, or to a child that inherited it from a dead one. A waiter then removes
//!    its name: the limit spares the disk, but a save matters more.
//! 3. Where locks are not available, nobody waits and no file remains.
//!
//! Only this user can open the files. They are no data and lie on no disk, so they bypass [`Disk`](crate::disk::Disk).

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, FileType, FlockOperation, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::geteuid;

/// A holder that wrote no chunk (of 8 MiB) for this long is no longer waited for.
const STALLED: Duration = Duration::from_secs(15);

/// The beginning of the names of all slots.
const PREFIX: &str = "tundish-writer";

/// The file system in the node's memory.
const SHARED_MEMORY: &str = "/dev/shm";

/// The slots of the writers under one root.
#[derive(Debug)]
pub(crate) struct WriterSlots {
    names: Vec<PathBuf>,
    stalled: Duration,
}

/// Waits for one of the slots.
#[derive(Debug)]
pub(crate) struct SlotWaiter<'a> {
    slots: &'a WriterSlots,
    /// The last stamp of each slot's file, and since when it is unchanged.
    seen: Vec<Option<(FileStamp, Instant)>>,
}

/// The right to write; dropping it frees the slot.
#[derive(Debug)]
pub(crate) struct WriterSlot {
    /// `None` where locks are not available.
    lock: Option<(OwnedFd, PathBuf)>,
}

/// Inode number and modification time of a file.
type FileStamp = (u64, i128, i128);

enum SlotAttempt {
    Taken(OwnedFd),
    Busy(Stat),
    /// The holder removed the file of the slot just now.
    Gone,
}

/// Removes the slot files that killed writers of this user left, and returns their paths, sorted.
///
/// `root` restricts it to writers under that folder. `dry_run` removes nothing. Locked files stay, and so do files that
/// cannot be opened: a writer that waits for a slot takes it over from a dead holder by itself.
pub fn sweep_slots(root: Option<&Path>, dry_run: bool) -> Vec<PathBuf> {
    sweep_in(&slot_folder(), root.map(identity_of), dry_run)
}

fn sweep_in(folder: &Path, root: Option<Option<(u64, u64)>>, dry_run: bool) -> Vec<PathBuf> {
    let prefix = match root {
        None => format!("{PREFIX}-{}-", geteuid().as_raw()),
        Some(Some(root)) => prefix_of(root),
        // The root does not exist: nobody writes under it.
        Some(None) => return Vec::new(),
    };
    let Ok(descriptor) = rustix::fs::open(folder, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) else {
        return Vec::new();
    };
    let Ok(entries) = rustix::fs::Dir::new(descriptor) else {
        return Vec::new();
    };
    let names = entries.flatten().map(|entry| folder.join(OsStr::from_bytes(entry.file_name().to_bytes())));
    let ours = names.filter(|path| path.file_name().is_some_and(|name| name.as_bytes().starts_with(prefix.as_bytes())));
    let mut dead: Vec<_> = ours.filter(|path| sweep_one(path, dry_run).unwrap_or(false)).collect();
    dead.sort();
    dead
}

/// Whether it is an unlocked slot file of this user; removes it unless `dry_run`.
fn sweep_one(path: &Path, dry_run: bool) -> Result<bool, Errno> {
    // Do not wait for the other end of a pipe.
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = retry_on_intr(|| rustix::fs::openat(CWD, path, flags, Mode::empty()))?;
    let open = rustix::fs::fstat(&file)?;
    // A slot file is an empty file of this user.
    if open.st_uid != geteuid().as_raw() || !FileType::from_raw_mode(open.st_mode).is_file() || open.st_size != 0 {
        return Ok(false);
    }
    match retry_on_intr(|| rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)) {
        Err(Errno::WOULDBLOCK) => return Ok(false),
        outcome => outcome?,
    }
    let is_there = leads_to(path, &open)?;
    if is_there && !dry_run {
        // Under the lock: a writer that opened it meanwhile sees that the name leads elsewhere, and makes another.
        rustix::fs::unlinkat(CWD, path, AtFlags::empty())?;
    }
    // Closing is not enough: a child made by `fork` may have the file open.
    let _ = rustix::fs::flock(&file, FlockOperation::Unlock);
    Ok(is_there)
}

/// Device and inode number of a folder.
fn identity_of(root: &Path) -> Option<(u64, u64)> {
    rustix::fs::stat(root).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

fn slot_folder() -> PathBuf {
    let memory = Path::new(SHARED_MEMORY);
    if memory.is_dir() { memory.to_path_buf() } else { std::env::temp_dir() }
}

fn prefix_of((device, number): (u64, u64)) -> String {
    format!("{PREFIX}-{}-{device:x}-{number:x}-", geteuid().as_raw())
}

impl WriterSlots {
    /// `count` slots for all writers under the folder with this device and inode number.
    pub(crate) fn new(count: usize, root: (u64, u64)) -> Self {
        Self::in_folder(&slot_folder(), count, root, STALLED)
    }

    fn in_folder(folder: &Path, count: usize, root: (u64, u64), stalled: Duration) -> Self {
        let prefix = prefix_of(root);
        let name = |slot| folder.join(format!("{prefix}{slot}"));
        WriterSlots { names: (0..count).map(name).collect(), stalled }
    }

    pub(crate) fn wait(&self) -> SlotWaiter<'_> {
        SlotWaiter { slots: self, seen: vec![None; self.names.len()] }
    }
}

impl SlotWaiter<'_> {
    /// Takes a slot if one is free now.
    pub(crate) fn try_take(&mut self) -> Option<WriterSlot> {
        for (name, seen) in self.slots.names.iter().zip(&mut self.seen) {
            match try_lock_slot(name) {
                Ok(SlotAttempt::Taken(file)) => return Some(WriterSlot { lock: Some((file, name.clone())) }),
                Ok(SlotAttempt::Gone) => *seen = None,
                Ok(SlotAttempt::Busy(holder)) => match seen {
                    Some((before, since)) if *before == stamp_of(&holder) => {
                        if since.elapsed() >= self.slots.stalled {
                            remove_name(name, &holder);
                        }
                    }
                    _ => *seen = Some((stamp_of(&holder), Instant::now())),
                },
                Err(_) => return Some(WriterSlot { lock: None }),
            }
        }
        None
    }
}

impl WriterSlot {
    /// A slot without a lock.
    #[cfg(test)]
    pub(crate) fn without_lock() -> Self {
        WriterSlot { lock: None }
    }

    /// Shows waiters that the holder is alive.
    pub(crate) fn touch(&self) {
        if let Some((file, _)) = &self.lock {
            let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
            let _ = rustix::fs::futimens(file, &Timestamps { last_access: now, last_modification: now });
        }
    }
}

impl Drop for WriterSlot {
    fn drop(&mut self) {
        if let Some((file, name)) = &self.lock {
            if let Ok(own) = rustix::fs::fstat(file) {
                remove_name(name, &own);
            }
            // Closing is not enough: a child made by `fork` meanwhile has the file open too.
            let _ = rustix::fs::flock(file, FlockOperation::Unlock);
        }
    }
}

fn try_lock_slot(name: &Path) -> Result<SlotAttempt, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = retry_on_intr(|| rustix::fs::openat(CWD, name, flags, Mode::RUSR | Mode::WUSR))?;
    let open = rustix::fs::fstat(&file)?;
    if open.st_uid != geteuid().as_raw() {
        return Err(Errno::PERM);
    }
    match retry_on_intr(|| rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)) {
        Err(Errno::WOULDBLOCK) => Ok(SlotAttempt::Busy(open)),
        Err(errno) => {
            // Most likely this call made it, and a sweep, which needs the lock, could never remove it.
            remove_name(name, &open);
            Err(errno)
        }
        Ok(()) if leads_to(name, &open)? => Ok(SlotAttempt::Taken(file)),
        Ok(()) => Ok(SlotAttempt::Gone),
    }
}

/// Removes a name that leads to the file of `stat`. Another holder's file that takes the name between the two calls
/// loses it too: then one writer too many may write.
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

fn stamp_of(stat: &Stat) -> FileStamp {
    (stat.st_ino, i128::from(stat.st_mtime), i128::from(stat.st_mtime_nsec))
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "the tests play dead writers and strangers")]
mod tests {
    use super::*;

    const ROOT: (u64, u64) = (7, 11);
    const FOREVER: Duration = Duration::from_secs(3600);

    fn slots(folder: &tempfile::TempDir, count: usize) -> WriterSlots {
        WriterSlots::in_folder(folder.path(), count, ROOT, FOREVER)
    }

    fn files(folder: &tempfile::TempDir) -> usize {
        std::fs::read_dir(folder.path()).unwrap().count()
    }

    #[test]
    fn there_are_exactly_as_many_slots_as_requested() {
        let folder = tempfile::tempdir().unwrap();
        let slots = slots(&folder, 2);
        let first = slots.wait().try_take().unwrap();
        let second = slots.wait().try_take().unwrap();
        assert!(first.lock.is_some() && second.lock.is_some());
        let mut waiting = slots.wait();
        assert!(waiting.try_take().is_none());
        drop(first);
        let third = waiting.try_take().unwrap();
        assert!(slots.wait().try_take().is_none());
        drop((second, third));
        assert_eq!(files(&folder), 0, "a writer that ends normally leaves nothing");
    }

    #[test]
    fn writers_to_other_roots_do_not_wait() {
        let folder = tempfile::tempdir().unwrap();
        let _held = slots(&folder, 1).wait().try_take().unwrap();
        let other = WriterSlots::in_folder(folder.path(), 1, (7, 12), FOREVER);
        assert!(other.wait().try_take().is_some_and(|slot| slot.lock.is_some()));
    }

    #[test]
    fn a_slot_of_a_dead_writer_is_free() {
        let folder = tempfile::tempdir().unwrap();
        let slots = slots(&folder, 1);
        // A killed writer leaves an unlocked file.
        std::fs::File::create(&slots.names[0]).unwrap();
        assert!(slots.wait().try_take().is_some_and(|slot| slot.lock.is_some()));
        assert_eq!(files(&folder), 0);
    }

    #[test]
    fn a_stalled_holder_loses_its_slot_and_a_live_one_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let slots = WriterSlots::in_folder(folder.path(), 1, ROOT, Duration::from_millis(200));
        let held = slots.wait().try_take().unwrap();
        let mut waiting = slots.wait();
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(20));
            held.touch();
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
        assert!(taken.as_ref().is_some_and(|slot| slot.lock.is_some()), "others wait for the new holder");
        assert!(slots.wait().try_take().is_none());
        // The old holder frees nothing of the new one.
        drop(held);
        assert!(slots.wait().try_take().is_none());
        drop(taken);
        assert_eq!(files(&folder), 0);
    }

    #[test]
    fn a_sweep_removes_only_files_of_dead_writers() {
        let folder = tempfile::tempdir().unwrap();
        let held = slots(&folder, 2).wait().try_take().unwrap();
        let name = |slot: usize| slots(&folder, 2).names[slot].clone();
        let other = WriterSlots::in_folder(folder.path(), 1, (7, 12), FOREVER).names[0].clone();
        let full = WriterSlots::in_folder(folder.path(), 1, (7, 13), FOREVER).names[0].clone();
        std::fs::File::create(name(1)).unwrap();
        std::fs::File::create(&other).unwrap();
        std::fs::write(&full, "somebody's").unwrap();
        std::fs::write(folder.path().join("tundish-other"), "").unwrap();
        assert_eq!(sweep_in(folder.path(), Some(None), false), [] as [PathBuf; 0]);
        assert_eq!(sweep_in(folder.path(), Some(Some(ROOT)), true), [name(1)]);
        assert_eq!(sweep_in(folder.path(), Some(Some(ROOT)), false), [name(1)]);
        assert_eq!(sweep_in(folder.path(), None, false), [other]);
        assert_eq!(sweep_in(folder.path(), None, false), [] as [PathBuf; 0]);
        // The live writer still has its slot.
        assert!(slots(&folder, 1).wait().try_take().is_none());
        assert!(name(0).exists() && full.exists());
        drop(held);
    }

    #[test]
    fn without_locks_nobody_waits() {
        let folder = tempfile::tempdir().unwrap();
        let slots = WriterSlots::in_folder(&folder.path().join("missing"), 1, ROOT, FOREVER);
        let first = slots.wait().try_take().unwrap();
        assert!(first.lock.is_none());
        first.touch();
        assert!(slots.wait().try_take().is_some());
        // A symbolic link is not followed.
        let slots = self::slots(&folder, 1);
        std::os::unix::fs::symlink("elsewhere", &slots.names[0]).unwrap();
        assert!(slots.wait().try_take().is_some_and(|slot| slot.lock.is_none()));
        assert_eq!(files(&folder), 1);
    }
}

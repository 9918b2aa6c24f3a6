//! Reading a root without owning it, and keeping a checkpoint from going while it is read.
//!
//! A reader holds a shared lock on the checkpoint's manifest; who removes or replaces a checkpoint holds an exclusive
//! one from before it loses its name until it is gone. What always holds: who removes does not wait; a reader waits for
//! what is being replaced, which there is all the time; a reader believes in its lock only when the folder still has
//! its name, seen with the lock held; that readers are locked out for longer than replacing takes is an error, and no
//! sign that the checkpoint has gone; locks end where they are given up, whatever was forked meanwhile. Where the file
//! system has no such locks a checkpoint is read without one, which the reader is told, and is in nobody's way.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::checkpoint::{self, Checkpoint, Damage, Published, Said, Unwhole};
use super::directory::Directory;
use super::verify::{self, Part};
use super::{Key, Root, layout};
use crate::checksum::Checksum;
use crate::disk::{Disk, EntryKind, Lock, RealDisk, Sharing};
use crate::error::CommitError;
use crate::manifest::{self, Kind, ManifestFile};

/// How long a reader waits for who has locked all readers out: to replace a checkpoint takes some fsyncs.
const REPLACING: Duration = Duration::from_secs(5);

/// How long it is looked again for what took the place of checkpoints that have gone. A network file system may list them
/// for longer than that: to its readers nothing has come meanwhile, either.
const CATCHING_UP: Duration = Duration::from_secs(2);

/// Between two looks.
const POLL: Duration = Duration::from_millis(2);

/// A manifest that is locked, where it can be.
struct Locked<D: Disk> {
    disk: D,
    file: D::File,
    process: u32,
}

impl<D: Disk + Clone> Locked<D> {
    fn new(disk: &D, file: D::File) -> Self {
        Self { disk: disk.clone(), file, process: std::process::id() }
    }
}

impl<D: Disk> Drop for Locked<D> {
    fn drop(&mut self) {
        // Not left to closing it: a child made by `fork` meanwhile has the file open too, and its copy of this gives
        // nothing up.
        if self.process == std::process::id() {
            self.disk.unlock_file(&self.file);
        }
    }
}

/// Keeps a checkpoint from being removed or replaced until it is dropped, where the file system has locks.
pub struct ReadLock<D: Disk + Clone> {
    folder: Directory<D>,
    /// `None` where there is no manifest, and so no checkpoint.
    manifest: Option<Locked<D>>,
    is_locked: bool,
    /// What the manifest says, once it was read: it stays, and may list tens of thousands of files.
    said: OnceLock<Said>,
}

impl<D: Disk + Clone> fmt::Debug for ReadLock<D> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ReadLock").field("path", &self.folder.path).field("is_locked", &self.is_locked).finish()
    }
}

impl<D: Disk + Clone> ReadLock<D> {
    /// The checkpoint's folder.
    pub fn path(&self) -> &Path {
        &self.folder.path
    }

    /// Whether anything keeps it; without, the file system has no locks.
    pub fn is_locked(&self) -> bool {
        self.is_locked
    }

    /// What the checkpoint says of itself, its files, and the checksum of the manifest, which no two saves have in
    /// common. No file is looked at: of thousands that is for many readers to divide among them.
    ///
    /// # Errors
    /// [`CommitError::Corrupt`].
    pub fn describe(&self) -> Result<(Checkpoint, Vec<ManifestFile>, Checksum), CommitError> {
        let Said { manifest, checksum, .. } = self.said()?;
        Ok((Checkpoint::new(self.folder.path.clone(), manifest.clone()), manifest.files.clone(), *checksum))
    }

    /// What is damaged of some files alone: missing, of another size or, with `every_byte`, of other bytes.
    ///
    /// # Errors
    /// As [`verify_checkpoint`]; [`CommitError::Corrupt`] is of the manifest alone.
    pub fn verify_files(
        &self,
        names: &BTreeSet<String>,
        every_byte: bool,
        go_on: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Vec<Damage>, CommitError> {
        verify::verify_files(&self.folder, &self.said()?.manifest, names, every_byte, go_on)
    }

    /// The checksums of parts of some files, for whoever reads a large one together with others; and what is damaged of
    /// these files as far as a part of one shows it: then it has none. A part has to lie within its file.
    ///
    /// # Errors
    /// As [`ReadLock::verify_files`].
    pub fn sum_parts(
        &self,
        parts: &[Part],
        go_on: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<(Vec<Option<Checksum>>, Vec<Damage>), CommitError> {
        verify::sum_parts(&self.folder, &self.said()?.manifest, parts, go_on)
    }

    /// What is wrong with the file `name`, whose parts, one after the other, have these checksums and sizes.
    ///
    /// # Errors
    /// [`CommitError::Corrupt`] of the manifest.
    pub fn compare_sums(&self, name: &str, sums: &[(Checksum, u64)]) -> Result<Option<Damage>, CommitError> {
        Ok(verify::compare_sums(&self.said()?.manifest, name, sums))
    }

    /// The files that the manifest does not list, which no save wrote.
    ///
    /// # Errors
    /// [`CommitError::Corrupt`] of the manifest, [`CommitError::Io`].
    pub fn foreign_files(&self) -> Result<Vec<String>, CommitError> {
        verify::foreign_files(&self.folder, &self.said()?.manifest)
    }

    /// The bytes of a small file, which are of that size and checksum; without a checksum only of that size.
    ///
    /// # Errors
    /// [`CommitError::Corrupt`] where they are not, [`CommitError::Io`].
    pub fn read_file(&self, name: &str, size: u64, checksum: Option<&str>) -> Result<Vec<u8>, CommitError> {
        verify::read_file(&self.folder, name, size, checksum)
    }

    /// Reads every byte, as [`verify_checkpoint`].
    ///
    /// # Errors
    /// As [`verify_checkpoint`].
    pub fn verify(&self, go_on: &mut dyn FnMut(u64, u64) -> ControlFlow<()>) -> Result<Vec<String>, CommitError> {
        verify::verify(&self.folder, go_on)
    }

    fn said(&self) -> Result<&Said, CommitError> {
        if let Some(said) = self.said.get() {
            return Ok(said);
        }
        let said = checkpoint::read_manifest(&self.folder).map_err(|unwhole| unwhole.of_manifest(&self.folder))?;
        Ok(self.said.get_or_init(|| said))
    }

    fn with_manifest(self) -> Result<Self, CommitError> {
        match self.manifest {
            Some(_) => Ok(self),
            None => Err(CommitError::NoSuchCheckpoint { path: self.folder.path }),
        }
    }
}

/// Reads every file of the checkpoint in `folder`, kept from being removed or replaced meanwhile, and compares it with
/// the manifest. `go_on` is asked now and then, with how many bytes were read and how many there are.
///
/// Returns the names of the files that were saved without a checksum: there is nothing to compare their bytes with, and
/// only their sizes were.
///
/// # Errors
/// [`CommitError::Corrupt`], with the names of all files that are missing, changed, cut off or in no manifest;
/// [`CommitError::NoSuchCheckpoint`] where there is no folder or it is being removed;
/// [`CommitError::CheckpointLocked`], [`CommitError::NotADirectory`], [`CommitError::Interrupted`], and
/// [`CommitError::Io`] where the folder cannot be looked at, or this process has no descriptors or memory left to do
/// so.
pub fn verify_checkpoint(
    folder: impl AsRef<Path>,
    go_on: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<String>, CommitError> {
    hold_at(&RealDisk, folder.as_ref())?.verify(go_on)
}

/// As [`Root::read_lock`], of the checkpoint in `folder`, which may lie anywhere.
pub fn read_lock_at<D: Disk + Clone>(disk: &D, folder: &Path) -> Result<ReadLock<D>, CommitError> {
    hold_at(disk, folder)?.with_manifest()
}

fn hold_at<D: Disk + Clone>(disk: &D, path: &Path) -> Result<ReadLock<D>, CommitError> {
    hold(&|| match Directory::open(disk, path) {
        Err(CommitError::ParentMissing { path }) => Err(CommitError::NoSuchCheckpoint { path }),
        outcome => outcome,
    })
}

/// Locks what `open` opens.
fn hold<D: Disk + Clone>(open: &dyn Fn() -> Result<Directory<D>, CommitError>) -> Result<ReadLock<D>, CommitError> {
    let name = OsStr::new(manifest::FILE_NAME);
    let until = Instant::now() + REPLACING;
    loop {
        let folder = open()?;
        let is_file = folder.look_at(name)?.is_some_and(|status| status.kind == EntryKind::File);
        let manifest = match is_file.then(|| folder.open_file(name)).transpose() {
            Err(error) if error.is(Errno::NOENT) => None,
            outcome => outcome?,
        };
        let lock = match &manifest {
            Some(manifest) => folder.disk.lock_file(manifest, Sharing::Shared, &folder.path.join(name))?,
            None => Lock::Unknown,
        };
        if lock == Lock::HeldByAnother {
            // It is being removed or replaced, and soon gone or another.
            if Instant::now() > until {
                return Err(CommitError::CheckpointLocked { path: folder.path });
            }
            std::thread::sleep(POLL);
            continue;
        }
        let manifest = manifest.map(|file| Locked::new(&folder.disk, file));
        // It may have been replaced before it was locked; then the new one is there.
        if open()?.status()?.is_same(&folder.status()?) {
            return Ok(ReadLock { folder, manifest, is_locked: lock == Lock::Taken, said: OnceLock::new() });
        }
    }
}

/// A checkpoint that nobody can begin to read under a lock as long as this lives.
pub(super) struct Kept<D: Disk> {
    _manifest: Option<Locked<D>>,
}

/// Locks readers out of what has that name.
///
/// # Errors
/// [`CommitError::CheckpointInUse`] when somebody reads it.
pub(super) fn keep_from_readers<D: Disk + Clone>(root: &Directory<D>, name: &OsStr) -> Result<Kept<D>, CommitError> {
    let folder = root.open_folder(name)?;
    let manifest = OsStr::new(manifest::FILE_NAME);
    if folder.look_at(manifest)?.is_none_or(|status| status.kind != EntryKind::File) {
        // Nobody can read it under a lock: there is nothing to lock.
        return Ok(Kept { _manifest: None });
    }
    let path = folder.path.join(manifest);
    let mut file = folder.open_file(manifest)?;
    let mut lock = folder.disk.lock_file(&file, Sharing::Exclusive, &path)?;
    if lock == Lock::Unknown {
        // Network file systems give such a lock only on what is open for writing.
        file = folder.disk.open_file_for_writing(&folder.folder, manifest, &path)?;
        lock = folder.disk.lock_file(&file, Sharing::Exclusive, &path)?;
    }
    match lock {
        Lock::HeldByAnother => Err(CommitError::CheckpointInUse { path: folder.path, reason: "it is being read" }),
        Lock::Taken | Lock::Unknown => Ok(Kept { _manifest: Some(Locked::new(&folder.disk, file)) }),
    }
}

fn read_lock<D: Disk + Clone>(root: &Directory<D>, kind: Kind, step: u64) -> Result<ReadLock<D>, CommitError> {
    let name = layout::checkpoint(kind, step);
    let gone = || CommitError::NoSuchCheckpoint { path: root.path.join(&name) };
    let open = || match root.look_at(&name)? {
        Some(status) if status.kind == EntryKind::Folder => root.open_folder(&name).map_err(|error| match error {
            error if error.is(Errno::NOENT) => gone(),
            error => error,
        }),
        _ => Err(gone()),
    };
    hold(&open)?.with_manifest()
}

impl<D: Disk + Clone + 'static> Root<D> {
    /// Keeps a checkpoint from being removed or replaced as long as the lock lives, in whichever process; without a
    /// lock where the file system has none.
    ///
    /// # Errors
    /// [`CommitError::NoSuchCheckpoint`]; [`CommitError::CheckpointLocked`]; [`CommitError::Io`] where it cannot be
    /// looked at.
    pub fn read_lock(&self, kind: Kind, step: u64) -> Result<ReadLock<D>, CommitError> {
        read_lock(&self.root, kind, step)
    }
}

/// A root as anybody may look at it: nothing is locked, repaired or kept in mind.
pub struct ReadonlyRoot<D: Disk + Clone> {
    root: Directory<D>,
}

impl<D: Disk + Clone> ReadonlyRoot<D> {
    /// Opens the root at `path`.
    ///
    /// # Errors
    /// [`CommitError::ParentMissing`], [`CommitError::NotADirectory`], [`CommitError::Io`].
    pub fn open(disk: D, path: &Path) -> Result<Self, CommitError> {
        Ok(Self { root: Directory::open(&disk, &super::opening::absolute(path)?)? })
    }

    /// The absolute path.
    pub fn path(&self) -> &Path {
        &self.root.path
    }

    /// The whole checkpoints of now: by kind, steps ascending.
    ///
    /// # Errors
    /// [`CommitError::Io`] when the root cannot be looked at.
    pub fn list(&self) -> Result<Vec<Checkpoint>, CommitError> {
        Ok(self.survey()?.whole)
    }

    /// What of now has the name of a checkpoint.
    ///
    /// # Errors
    /// As [`list`](ReadonlyRoot::list).
    pub fn survey(&self) -> Result<Survey, CommitError> {
        let mut keys: Vec<Key> = self.root.list()?.into_iter().filter_map(|name| key_of(&name)).collect();
        keys.sort_unstable();
        let mut survey = Survey::default();
        for key in keys {
            match self.examine(key)? {
                None => {}
                Some(Ok(published)) => survey.whole.push(published.checkpoint),
                Some(Err(reason)) => {
                    let (kind, step) = key;
                    let path = self.root.path.join(layout::checkpoint(kind, step));
                    survey.damaged.push(Damaged { kind, step, path, reason });
                }
            }
        }
        Ok(survey)
    }

    /// The newest whole checkpoint of a kind.
    ///
    /// # Errors
    /// As [`list`](ReadonlyRoot::list).
    pub fn latest(&self, kind: Kind) -> Result<Option<PathBuf>, CommitError> {
        let until = Instant::now() + CATCHING_UP;
        loop {
            let mut steps: Vec<Key> = self.root.list()?.into_iter().filter_map(|name| key_of(&name)).collect();
            steps.retain(|(found, _)| *found == kind);
            steps.sort_unstable();
            let mut is_any_gone = false;
            for key in steps.into_iter().rev() {
                match self.examine(key)? {
                    Some(Ok(published)) => return Ok(Some(published.checkpoint.path)),
                    Some(Err(_)) => {}
                    None => is_any_gone = true,
                }
            }
            // What is gone went mostly for one that was published after these were listed.
            if !is_any_gone || Instant::now() > until {
                return Ok(None);
            }
            std::thread::sleep(POLL);
        }
    }

    /// As [`Root::read_lock`].
    ///
    /// # Errors
    /// As [`Root::read_lock`].
    pub fn read_lock(&self, kind: Kind, step: u64) -> Result<ReadLock<D>, CommitError> {
        read_lock(&self.root, kind, step)
    }

    /// Whether it is whole, or why not; `None` when it is not there any more.
    fn examine(&self, (kind, step): Key) -> Result<Option<Result<Published, String>>, CommitError> {
        let name = layout::checkpoint(kind, step);
        loop {
            let before = self.root.look_at(&name)?;
            let reason = match checkpoint::examine(&self.root, kind, step) {
                Ok(published) => return Ok(Some(Ok(published))),
                Err(Unwhole::For(reason)) => reason,
                Err(Unwhole::Unseen(error)) => return Err(error),
            };
            // What was removed or replaced on the way was not damaged.
            match (before, self.root.look_at(&name)?) {
                (_, None) => return Ok(None),
                (Some(before), Some(now)) if before.is_same(&now) => return Ok(Some(Err(reason))),
                _ => {}
            }
        }
    }
}

/// What of a root has the name of a checkpoint: by kind, steps ascending.
#[derive(Debug, Default)]
pub struct Survey {
    /// Checkpoints.
    pub whole: Vec<Checkpoint>,
    /// The others.
    pub damaged: Vec<Damaged>,
}

/// What has the name of a checkpoint and is no whole one.
#[derive(Debug)]
pub struct Damaged {
    /// What its name says it is for.
    pub kind: Kind,
    /// The step in its name.
    pub step: u64,
    /// Where it is, absolute.
    pub path: PathBuf,
    /// Why it is none.
    pub reason: String,
}

fn key_of(name: &OsStr) -> Option<Key> {
    match layout::classify(name) {
        layout::Entry::Checkpoint(kind, step) => Some((kind, step)),
        _ => None,
    }
}

//! Locks that keep a checkpoint from being removed or replaced while it is read.
//!
//! A reader holds a shared lock on the checkpoint's manifest. A writer that removes or replaces the checkpoint holds an
//! exclusive one, from before the checkpoint loses its name until it is gone.
//!
//! Invariants:
//!
//! 1. A removal never waits for readers. A reader waits for a replacement, because the name leads to a checkpoint at
//!    every moment of it.
//! 2. A reader trusts its lock only if the name still leads to the locked folder.
//! 3. Being locked out for longer than a replacement takes is an error. It does not mean that the checkpoint is gone.
//! 4. Dropping a lock releases it, whatever was forked meanwhile.
//! 5. Where the file system has no such locks, a checkpoint is read without one. The reader is told, and blocks nobody.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::whole_checkpoint::{self, CheckpointInfo, Damage, ReadManifest};
use super::{names, verify};
use crate::RealDisk;
use crate::checksum::Checksum;
use crate::disk::{Disk, EntryKind, LockMode, LockOutcome};
use crate::error::CommitError;
use crate::manifest::{self, CheckpointKind, ManifestEntry};
use crate::open_folder::OpenFolder;

/// How long a reader waits for a replacement, which takes a few fsyncs.
const REPLACEMENT: Duration = Duration::from_secs(5);

/// Between two attempts.
pub(super) const POLL: Duration = Duration::from_millis(2);

/// A manifest file that is locked, where locks exist.
struct LockedManifest<D: Disk> {
    disk: D,
    file: D::File,
    process: u32,
}

impl<D: Disk> LockedManifest<D> {
    fn new(disk: &D, file: D::File) -> Self {
        Self { disk: disk.clone(), file, process: std::process::id() }
    }
}

impl<D: Disk> Drop for LockedManifest<D> {
    fn drop(&mut self) {
        // Closing would not release it: a child made by `fork` has the file open too. The child's own copy releases
        // nothing.
        if self.process == std::process::id() {
            self.disk.unlock_file(&self.file);
        }
    }
}

/// Keeps a checkpoint from being removed or replaced until it is dropped, where the file system has locks.
pub struct ReadLock<D: Disk> {
    folder: OpenFolder<D>,
    /// `None` where there is no manifest, and so no checkpoint.
    manifest: Option<LockedManifest<D>>,
    is_locked: bool,
    /// The manifest once it was read; it may list tens of thousands of files.
    contents: OnceLock<ReadManifest>,
}

impl<D: Disk> fmt::Debug for ReadLock<D> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("ReadLock").field("path", &self.folder.path).field("is_locked", &self.is_locked).finish()
    }
}

impl<D: Disk> ReadLock<D> {
    /// The checkpoint's folder.
    pub fn path(&self) -> &Path {
        &self.folder.path
    }

    /// Whether a lock is held; `false` where the file system has none.
    pub fn is_locked(&self) -> bool {
        self.is_locked
    }

    /// The checkpoint, its files, and the checksum of its manifest, which identifies one save. Reads only the manifest.
    ///
    /// # Errors
    /// [`CommitError::Corrupt`].
    pub fn describe(&self) -> Result<(CheckpointInfo, Vec<ManifestEntry>, Checksum), CommitError> {
        let ReadManifest { manifest, checksum, .. } = self.contents()?;
        Ok((CheckpointInfo::new(self.folder.path.clone(), manifest.clone()), manifest.files.clone(), *checksum))
    }

    /// The damage of some files: missing, of another size or, with `every_byte`, of other bytes.
    ///
    /// # Errors
    /// As [`verify_checkpoint`]; [`CommitError::Corrupt`] refers to the manifest alone.
    pub fn verify_files(
        &self,
        names: &BTreeSet<String>,
        every_byte: bool,
        on_progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Vec<Damage>, CommitError> {
        verify::verify_files(&self.folder, &self.contents()?.manifest, names, every_byte, on_progress)
    }

    /// The files that the manifest does not list: no save wrote them.
    ///
    /// # Errors
    /// [`CommitError::Corrupt`] of the manifest, [`CommitError::Io`].
    pub fn foreign_files(&self) -> Result<Vec<String>, CommitError> {
        verify::foreign_files(&self.folder, &self.contents()?.manifest)
    }

    /// The bytes of a small file of this size and checksum. Without a checksum only the size is compared.
    ///
    /// # Errors
    /// [`CommitError::Corrupt`] where the file differs, [`CommitError::Io`].
    pub fn read_file(&self, name: &str, size: u64, checksum: Option<&str>) -> Result<Vec<u8>, CommitError> {
        verify::read_file(&self.folder, name, size, checksum)
    }

    fn contents(&self) -> Result<&ReadManifest, CommitError> {
        if let Some(contents) = self.contents.get() {
            return Ok(contents);
        }
        let contents =
            whole_checkpoint::read_manifest(&self.folder).map_err(|problem| problem.into_error(&self.folder))?;
        Ok(self.contents.get_or_init(|| contents))
    }

    fn with_manifest(self) -> Result<Self, CommitError> {
        match self.manifest {
            Some(_) => Ok(self),
            None => Err(CommitError::NoSuchCheckpoint { path: self.folder.path }),
        }
    }
}

/// Reads every file of the checkpoint in `folder` and compares it with the manifest. The checkpoint is not removed or
/// replaced meanwhile. `on_progress` is called now and then with the bytes read and the bytes in total.
///
/// Returns the names of the files that were saved without a checksum: only their sizes were compared.
///
/// # Errors
/// - [`CommitError::Corrupt`], with the names of all files that are missing, changed, cut short or not in the manifest.
/// - [`CommitError::NoSuchCheckpoint`]: there is no folder, or it is being removed.
/// - [`CommitError::CheckpointLocked`], [`CommitError::NotADirectory`], [`CommitError::Interrupted`].
/// - [`CommitError::Io`]: the folder cannot be read, or this process has no descriptors or memory left.
pub fn verify_checkpoint(
    folder: impl AsRef<Path>,
    on_progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<Vec<String>, CommitError> {
    verify::verify(&lock_at(&RealDisk, folder.as_ref())?.folder, on_progress)
}

/// Keeps the checkpoint in `folder` from being removed or replaced as long as the lock lives, by any process. Gives an
/// object without a lock where the file system has none.
///
/// # Errors
/// [`CommitError::NoSuchCheckpoint`]; [`CommitError::CheckpointLocked`]; [`CommitError::Io`].
pub fn read_lock_at<D: Disk>(disk: &D, folder: &Path) -> Result<ReadLock<D>, CommitError> {
    lock_at(disk, folder)?.with_manifest()
}

fn lock_at<D: Disk>(disk: &D, path: &Path) -> Result<ReadLock<D>, CommitError> {
    lock_opened(&|| match OpenFolder::open(disk, path) {
        Err(CommitError::ParentMissing { path }) => Err(CommitError::NoSuchCheckpoint { path }),
        outcome => outcome,
    })
}

/// Locks the folder that `open` opens.
fn lock_opened<D: Disk>(open: &dyn Fn() -> Result<OpenFolder<D>, CommitError>) -> Result<ReadLock<D>, CommitError> {
    let name = OsStr::new(manifest::FILE_NAME);
    let until = Instant::now() + REPLACEMENT;
    loop {
        let folder = open()?;
        let is_file = folder.look_at(name)?.is_some_and(|stat| stat.kind == EntryKind::File);
        let manifest = match is_file.then(|| folder.open_file(name)).transpose() {
            Err(error) if error.is(Errno::NOENT) => None,
            outcome => outcome?,
        };
        let lock = match &manifest {
            Some(manifest) => folder.disk.lock_file(manifest, LockMode::Shared, &folder.path.join(name))?,
            None => LockOutcome::Unknown,
        };
        if lock == LockOutcome::HeldByAnother {
            // It is being removed or replaced: soon it is gone, or another one.
            if Instant::now() > until {
                return Err(CommitError::CheckpointLocked { path: folder.path });
            }
            std::thread::sleep(POLL);
            continue;
        }
        let manifest = manifest.map(|file| LockedManifest::new(&folder.disk, file));
        // It may have been replaced before it was locked.
        if open()?.stat()?.is_same(&folder.stat()?) {
            return Ok(ReadLock { folder, manifest, is_locked: lock == LockOutcome::Taken, contents: OnceLock::new() });
        }
    }
}

/// Keeps new readers with locks out of a checkpoint as long as it lives.
pub(crate) struct ReaderExclusion<D: Disk> {
    _manifest: Option<LockedManifest<D>>,
}

/// Locks readers out of the checkpoint `name`.
pub(crate) fn exclude_readers<D: Disk>(root: &OpenFolder<D>, name: &OsStr) -> Result<ReaderExclusion<D>, CommitError> {
    let folder = root.open_folder(name)?;
    let manifest = OsStr::new(manifest::FILE_NAME);
    if folder.look_at(manifest)?.is_none_or(|stat| stat.kind != EntryKind::File) {
        // Without a manifest no reader can hold a lock.
        return Ok(ReaderExclusion { _manifest: None });
    }
    let path = folder.path.join(manifest);
    let mut file = folder.open_file(manifest)?;
    let mut lock = folder.disk.lock_file(&file, LockMode::Exclusive, &path)?;
    if lock == LockOutcome::Unknown {
        // Network file systems give an exclusive lock only on a file that is open for writing.
        file = folder.disk.open_file_for_writing(&folder.folder, manifest, &path)?;
        lock = folder.disk.lock_file(&file, LockMode::Exclusive, &path)?;
    }
    match lock {
        LockOutcome::HeldByAnother => {
            Err(CommitError::CheckpointInUse { path: folder.path, reason: "it is being read" })
        }
        LockOutcome::Taken | LockOutcome::Unknown => {
            Ok(ReaderExclusion { _manifest: Some(LockedManifest::new(&folder.disk, file)) })
        }
    }
}

/// Takes a read lock on a checkpoint of `root`.
pub(crate) fn lock_checkpoint<D: Disk>(
    root: &OpenFolder<D>,
    kind: CheckpointKind,
    step: u64,
) -> Result<ReadLock<D>, CommitError> {
    let name = names::checkpoint(kind, step);
    let gone = || CommitError::NoSuchCheckpoint { path: root.path.join(&name) };
    let open = || match root.look_at(&name)? {
        Some(stat) if stat.kind == EntryKind::Folder => root.open_folder(&name).map_err(|error| match error {
            error if error.is(Errno::NOENT) => gone(),
            error => error,
        }),
        _ => Err(gone()),
    };
    lock_opened(&open)?.with_manifest()
}

//! [`AtomicFolder`], a folder that appears under its name in one rename; and [`replace_file`] for a single file.

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use crate::RealDisk;
use crate::disk::{self, Disk, EntryKind};
use crate::error::{CommitError, FirstFailure};
use crate::hidden_folder::{self, HiddenFolder, SweepReport};
use crate::hidden_names;
use crate::open_folder::{OpenFolder, Replacing};
use crate::output_file::Writeback;

/// A folder that is being written under a hidden name beside its target.
///
/// Dropping it without [`publish`](AtomicFolder::publish) removes what it wrote. Files and folder get the modes that
/// the umask leaves. Only the process that made it removes it: in a child made by `fork`, dropping it does nothing. As
/// long as such a child lives, the folder of a dead writer counts as live.
pub struct AtomicFolder {
    parent: OpenFolder<RealDisk>,
    target: PathBuf,
    hidden: HiddenFolder<RealDisk>,
    files: Arc<Mutex<FilesStatus>>,
    swept: SweepReport,
    /// The process whose drop removes the hidden folder; `None` when there is nothing to remove.
    remover: Option<u32>,
}

impl fmt::Debug for AtomicFolder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("AtomicFolder").field("target", &self.target).field("path", &self.path()).finish()
    }
}

impl AtomicFolder {
    /// Begins a folder that will appear as `target`, whose parent must exist.
    ///
    /// Refuses early what would make the publication impossible. Then removes leftovers of dead writers in the parent
    /// (see [`AtomicFolder::swept`]) and makes the hidden folder `.NAME.<16 hexadecimal digits>.incomplete`. A lock
    /// marks it as that of a live writer.
    ///
    /// A relative target refers to the current folder at the time of this call.
    ///
    /// # Errors
    /// - [`CommitError::TargetExists`]: the target is there and is no empty directory. A symbolic link counts too.
    /// - [`CommitError::ParentMissing`], [`CommitError::NotADirectory`].
    /// - [`CommitError::InvalidName`]: for example a name over 226 bytes.
    /// - [`CommitError::Io`]: for example a parent that may not be written (`EACCES`, `EROFS`), a full disk, or a
    ///   target on which a file system is mounted (`EBUSY`).
    pub fn create(target: impl AsRef<Path>) -> Result<AtomicFolder, CommitError> {
        Self::begin(target.as_ref(), check_target_is_free)
    }

    /// Begins a folder after `check` accepted the open parent and the target's name.
    fn begin(
        target: &Path,
        check: impl FnOnce(&OpenFolder<RealDisk>, &OsStr) -> Result<(), CommitError>,
    ) -> Result<AtomicFolder, CommitError> {
        let (parent_path, name) = hidden_names::split_target(target)?;
        let parent = OpenFolder::open(&RealDisk, &parent_path)?;
        check(&parent, &name)?;
        let mut swept = SweepReport::default();
        // A leftover that cannot be removed must not keep this folder from being written.
        if let Err(error) = hidden_folder::sweep_into(&parent, &mut swept) {
            swept.failed.push(error);
        }
        let hidden = HiddenFolder::create_for(&parent, &name)?;
        let target = parent_path.join(&name);
        let remover = Some(std::process::id());
        Ok(AtomicFolder { parent, target, hidden, files: Arc::default(), swept, remover })
    }

    /// The absolute path under which the folder will appear.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// The absolute path of the hidden folder. Files that others put there are published with the rest, but nothing
    /// makes them durable.
    pub fn path(&self) -> &Path {
        &self.hidden.folder.path
    }

    /// The leftovers of earlier writers that were found in the parent.
    pub fn swept(&self) -> &SweepReport {
        &self.swept
    }

    /// Makes a new, empty file in the folder. `name` is one plain file name.
    ///
    /// # Errors
    /// [`CommitError::InvalidName`] and [`CommitError::FileExists`], which leave the folder as it was;
    /// [`CommitError::Io`], after which it cannot be published; [`CommitError::Poisoned`] when that is so already.
    pub fn create_file(&self, name: &str) -> Result<FolderFile, CommitError> {
        hidden_names::check_file_name(self.path(), name)?;
        status_of(&self.files).failure.check()?;
        let path = self.path().join(name);
        let file = match RealDisk.create_file(&self.hidden.folder.folder, OsStr::new(name), &path) {
            Err(error) if error.is(Errno::EXIST) => return Err(CommitError::FileExists { path }),
            outcome => record(&self.files, outcome)?,
        };
        status_of(&self.files).unfinished.push(path.clone());
        Ok(FolderFile { file, path, length: 0, writeback: Writeback::new(), files: Arc::clone(&self.files) })
    }

    /// Makes the folder durable and gives it its final name.
    ///
    /// Of several writers to one target exactly one succeeds, if their folders hold any file: an empty folder under
    /// the target's name counts as absent and is replaced.
    ///
    /// # Errors
    /// With every error but the last the hidden folder is removed and the target is as it was.
    ///
    /// - [`CommitError::Unfinished`]: a file was not finished.
    /// - [`CommitError::Poisoned`]: a write or fsync failed earlier.
    /// - [`CommitError::TargetExists`]: another writer was first.
    /// - [`CommitError::NotPublishable`]: somebody else put another folder in the place of the hidden one.
    /// - [`CommitError::ParentMissing`]: the parent was removed meanwhile.
    /// - [`CommitError::Io`]: the fsync of the folder or the rename failed.
    /// - [`CommitError::NotDurable`]: the fsync of the parent failed after the rename. The folder is whole, its
    ///   contents are durable, and it is visible: others may be reading it, so it is not taken back. A crash
    ///   of the machine may undo the rename as a whole; the folder is then a leftover that the next sweep removes. Do
    ///   not count it as saved, and do not delete its predecessor. To be sure of it, remove it and publish again.
    pub fn publish(mut self) -> Result<(), CommitError> {
        {
            let files = status_of(&self.files);
            files.failure.check()?;
            if let Some(path) = files.unfinished.first() {
                return Err(CommitError::Unfinished { path: path.clone() });
            }
        }
        self.hidden.complete()?;
        self.check_leads_to_ours(&self.hidden.name)?;
        let name = hidden_names::last_part(&self.target);
        self.hidden.rename(&self.parent, name, Replacing::EmptyFolder).map_err(|error| self.explain_rename(error))?;
        // Others who may write to the parent may have renamed it since the check.
        self.check_leads_to_ours(name)?;
        self.remover = None;
        self.parent.sync_name(&self.target)
    }

    /// Refuses another folder under a name that should lead to this one.
    fn check_leads_to_ours(&self, name: &OsStr) -> Result<(), CommitError> {
        // A missing one cannot be renamed, which says more.
        if self.parent.look_at(name)?.is_none() || self.parent.has(name, &self.hidden.folder)? {
            return Ok(());
        }
        let reason = "somebody put another folder in its place".to_owned();
        Err(CommitError::NotPublishable { path: self.path().to_path_buf(), reason })
    }

    fn explain_rename(&self, error: CommitError) -> CommitError {
        if error.is(Errno::NOTEMPTY) || error.is(Errno::EXIST) || error.is(Errno::NOTDIR) {
            return CommitError::TargetExists { path: self.target.clone() };
        }
        if error.is(Errno::NOENT)
            && let Err(missing) = RealDisk.open_path(&self.parent.path)
        {
            return missing;
        }
        error
    }
}

impl Drop for AtomicFolder {
    fn drop(&mut self) {
        if self.remover == Some(std::process::id()) {
            // The next sweep removes what cannot be removed now: its lock ends with this descriptor.
            let _ = self.hidden.remove(&self.parent);
        }
    }
}

/// Free bytes for a folder that will appear as `target`; `None` where the file system does not say.
///
/// # Errors
/// [`CommitError::ParentMissing`], [`CommitError::NotADirectory`], [`CommitError::InvalidName`] and
/// [`CommitError::Io`].
pub fn free_space(target: impl AsRef<Path>) -> Result<Option<u64>, CommitError> {
    let (parent_path, _) = hidden_names::split_target(target.as_ref())?;
    let parent = OpenFolder::open(&RealDisk, &parent_path)?;
    let free = RealDisk.free_room(&parent.folder, &parent_path)?.bytes;
    Ok((free < u64::MAX).then_some(free))
}

/// Replaces the file `target`, whose parent must exist, by `bytes` in one step. Readers find the whole new file or the
/// old one, also after a crash of the machine.
///
/// A symbolic link is replaced itself. The new file gets the mode that the umask leaves. Until it is complete it lies
/// in a hidden folder as for an [`AtomicFolder`], so that sweeps remove what a dead writer left; this call sweeps too.
///
/// # Errors
/// As [`AtomicFolder::create`], [`FolderFile::append`] and [`AtomicFolder::publish`]; instead of
/// [`CommitError::TargetExists`], `EISDIR` for a target that is a directory. With every error but
/// [`CommitError::NotDurable`] the target is as it was.
pub fn replace_file(target: impl AsRef<Path>, bytes: &[u8]) -> Result<(), CommitError> {
    let folder = AtomicFolder::begin(target.as_ref(), check_target_is_no_folder)?;
    let mut file = folder.create_file("file")?;
    file.append(bytes)?;
    let file = file.finish_open()?;
    let (hidden, parent) = (&folder.hidden.folder, &folder.parent);
    hidden.sync()?;
    let moved = RealDisk.file_stat(&file, &folder.target)?;
    let name = hidden_names::last_part(&folder.target);
    let renamed = RealDisk.rename((&hidden.folder, OsStr::new("file")), (&parent.folder, name), &folder.target);
    parent.confirm_rename(name, Some(moved), renamed).map_err(|error| folder.explain_rename(error))?;
    // Dropping the folder removes the empty hidden folder.
    parent.sync_name(&folder.target)
}

fn check_target_is_no_folder(parent: &OpenFolder<RealDisk>, name: &OsStr) -> Result<(), CommitError> {
    if parent.has_folder(name)? {
        return Err(CommitError::io("put a file in the place of", &parent.path.join(name), Errno::ISDIR));
    }
    Ok(())
}

fn check_target_is_free(parent: &OpenFolder<RealDisk>, name: &OsStr) -> Result<(), CommitError> {
    let path = parent.path.join(name);
    let Some(stat) = parent.look_at(name)? else {
        return Ok(());
    };
    if stat.kind != EntryKind::Folder {
        return Err(CommitError::TargetExists { path });
    }
    let folder = match parent.open_folder(name) {
        Err(error) if error.is(Errno::NOENT) => return Ok(()),
        outcome => outcome?,
    };
    if !folder.list()?.is_empty() {
        return Err(CommitError::TargetExists { path });
    }
    if stat.device != parent.stat()?.device {
        return Err(CommitError::io("rename over the mounted file system at", &path, Errno::BUSY));
    }
    Ok(())
}

// ---- The files of a folder ----

/// The files that are not finished, and the first failure. The folder and its files share it; several threads may write.
#[derive(Debug, Default)]
struct FilesStatus {
    unfinished: Vec<PathBuf>,
    failure: FirstFailure,
}

fn status_of(files: &Mutex<FilesStatus>) -> MutexGuard<'_, FilesStatus> {
    files.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns an outcome unchanged; records a failed system call.
fn record<T>(files: &Mutex<FilesStatus>, outcome: Result<T, CommitError>) -> Result<T, CommitError> {
    outcome.inspect_err(|error| status_of(files).failure.record(error.again()))
}

/// A file of an [`AtomicFolder`], made by [`AtomicFolder::create_file`].
///
/// Each call writes without a buffer: append chunks of some kilobytes or more. The file counts as part of the folder
/// only after [`finish`](FolderFile::finish); dropping it before keeps the folder from being published. Several threads
/// may write files of one folder.
#[derive(Debug)]
pub struct FolderFile {
    file: File,
    path: PathBuf,
    /// The end of the last byte written.
    length: u64,
    writeback: Writeback,
    files: Arc<Mutex<FilesStatus>>,
}

impl FolderFile {
    /// Writes all of `bytes` at the end.
    ///
    /// # Errors
    /// [`CommitError::Io`] when a write fails, as on a full disk; [`CommitError::Poisoned`] when one failed before in
    /// any file of the folder. After either the folder cannot be published.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), CommitError> {
        self.write_at(self.length, bytes)
    }

    /// Writes all of `bytes` at `offset`, for a header that is known last. A gap reads as zeros.
    ///
    /// # Errors
    /// As [`append`](FolderFile::append); `EFBIG` for an end beyond 2⁶³ − 1.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), CommitError> {
        status_of(&self.files).failure.check()?;
        let FolderFile { file, path, length, writeback, files } = self;
        let written = disk::write_all(&RealDisk, file, offset, bytes, path, |written| {
            *length = (*length).max(written.end);
            writeback.wrote(&RealDisk, file, written, path)
        });
        record(files, written)
    }

    /// Cuts the file to `length` bytes; does nothing to a shorter file.
    ///
    /// # Errors
    /// As [`append`](FolderFile::append).
    pub fn truncate(&mut self, length: u64) -> Result<(), CommitError> {
        status_of(&self.files).failure.check()?;
        if length < self.length {
            record(&self.files, RealDisk.truncate(&self.file, length, &self.path))?;
            self.length = length;
        }
        Ok(())
    }

    /// Makes the bytes durable and closes the file.
    ///
    /// # Errors
    /// As [`append`](FolderFile::append). A failed fsync is final.
    pub fn finish(self) -> Result<(), CommitError> {
        self.finish_open().map(drop)
    }

    /// As [`finish`](FolderFile::finish), but returns the open file.
    ///
    /// # Errors
    /// As [`finish`](FolderFile::finish).
    pub fn finish_open(self) -> Result<File, CommitError> {
        status_of(&self.files).failure.check()?;
        record(&self.files, RealDisk.fsync(&self.file, &self.path))?;
        status_of(&self.files).unfinished.retain(|unfinished| *unfinished != self.path);
        Ok(self.file)
    }
}

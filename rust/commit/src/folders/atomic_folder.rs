//! [`AtomicFolder`], a folder that appears under its name in one rename; and [`replace_file`] for a single file.

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;

use super::folder_file::FolderFile;
use super::sweep::{self, SweepReport};
use super::unfinished_folder::UnfinishedFolder;
use super::write_status::WriteStatus;
use crate::disk::{Disk, EntryKind, FileStat, RealDisk, confirm_rename};
use crate::error::CommitError;
use crate::hidden_names;

/// A folder that is being written under a hidden name beside its target.
///
/// Dropping it without [`publish`](AtomicFolder::publish) removes what it wrote. Files and folder get the modes that
/// the umask leaves. Only the process that made it removes it: in a child made by `fork`, dropping it does nothing. As
/// long as such a child lives, the folder of a dead writer counts as live.
#[derive(Debug)]
pub struct AtomicFolder {
    parent: OwnedFd,
    parent_path: PathBuf,
    target: PathBuf,
    target_name: OsString,
    unfinished: UnfinishedFolder,
    write_status: Arc<WriteStatus>,
    swept: SweepReport,
    /// The process whose drop removes the hidden folder; `None` when there is nothing to remove.
    remover: Option<u32>,
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

    /// Begins a folder after `check` accepted the open parent, the target's name and its path.
    fn begin(
        target: &Path,
        check: impl FnOnce(&OwnedFd, &OsStr, &Path) -> Result<(), CommitError>,
    ) -> Result<AtomicFolder, CommitError> {
        let (parent_path, target_name) = hidden_names::split_target(target)?;
        let target = parent_path.join(&target_name);
        let parent = RealDisk.open_path(&parent_path)?;
        check(&parent, &target_name, &target)?;
        let mut swept = SweepReport::default();
        // A leftover that cannot be removed must not keep this folder from being written.
        if let Err(error) = sweep::sweep_into(&parent, &parent_path, &mut swept) {
            swept.failed.push(error);
        }
        let unfinished = UnfinishedFolder::create(&parent, &parent_path, &target_name)?;
        Ok(AtomicFolder {
            parent,
            parent_path,
            target,
            target_name,
            unfinished,
            write_status: Arc::default(),
            swept,
            remover: Some(std::process::id()),
        })
    }

    /// The absolute path under which the folder will appear.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// The absolute path of the hidden folder. Files that others put there are published with the rest, but nothing
    /// makes them durable.
    pub fn path(&self) -> &Path {
        &self.unfinished.path
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
        hidden_names::check_file_name(&self.unfinished.path, name)?;
        self.write_status.check()?;
        let path = self.unfinished.path.join(name);
        let file = match RealDisk.create_file(&self.unfinished.folder, OsStr::new(name), &path) {
            Err(error) if error.is(Errno::EXIST) => return Err(CommitError::FileExists { path }),
            outcome => self.write_status.record(outcome)?,
        };
        Ok(FolderFile::new(file, path, Arc::clone(&self.write_status)))
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
        self.write_status.check_complete()?;
        RealDisk.open_to_readers(&self.unfinished.folder, &self.unfinished.path)?;
        RealDisk.fsync_folder(&self.unfinished.folder, &self.unfinished.path)?;
        self.check_leads_to_ours(&self.unfinished.name)?;
        let moved = RealDisk.folder_stat(&self.unfinished.folder, &self.unfinished.path)?;
        let renamed =
            RealDisk.rename((&self.parent, &self.unfinished.name), (&self.parent, &self.target_name), &self.target);
        self.confirm(renamed, moved)?;
        // Others who may write to the parent may have renamed it since the check.
        self.check_leads_to_ours(&self.target_name)?;
        self.remover = None;
        RealDisk.unmark(&self.unfinished.folder);
        self.make_name_durable()
    }

    fn confirm(&self, renamed: Result<(), CommitError>, moved: FileStat) -> Result<(), CommitError> {
        let target = (&self.parent, self.target_name.as_os_str());
        confirm_rename(&RealDisk, target, &self.target, Some(moved), renamed)
            .map_err(|error| self.explain_rename(error))
    }

    /// Refuses another folder under a name that should lead to this one.
    fn check_leads_to_ours(&self, name: &OsStr) -> Result<(), CommitError> {
        let UnfinishedFolder { folder, path, .. } = &self.unfinished;
        let own = RealDisk.folder_stat(folder, path)?;
        match RealDisk.look_at(&self.parent, name, path)? {
            Some(named) if !named.is_same(&own) => {
                let reason = "somebody put another folder in its place".to_owned();
                Err(CommitError::NotPublishable { path: path.clone(), reason })
            }
            // A missing one cannot be renamed, which says more.
            _ => Ok(()),
        }
    }

    fn make_name_durable(&self) -> Result<(), CommitError> {
        RealDisk.fsync_folder(&self.parent, &self.parent_path).map_err(|error| match error {
            CommitError::Io { source, .. } => CommitError::NotDurable { path: self.target.clone(), source },
            other => other,
        })
    }

    fn explain_rename(&self, error: CommitError) -> CommitError {
        if error.is(Errno::NOTEMPTY) || error.is(Errno::EXIST) || error.is(Errno::NOTDIR) {
            return CommitError::TargetExists { path: self.target.clone() };
        }
        if error.is(Errno::NOENT)
            && let Err(missing) = RealDisk.open_path(&self.parent_path)
        {
            return missing;
        }
        error
    }
}

/// Free bytes for a folder that will appear as `target`; `None` where the file system does not say.
///
/// # Errors
/// [`CommitError::ParentMissing`], [`CommitError::NotADirectory`], [`CommitError::InvalidName`] and
/// [`CommitError::Io`].
pub fn free_space(target: impl AsRef<Path>) -> Result<Option<u64>, CommitError> {
    let (parent_path, _) = hidden_names::split_target(target.as_ref())?;
    let parent = RealDisk.open_path(&parent_path)?;
    let free = RealDisk.free_room(&parent, &parent_path)?.bytes;
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
    let name = "file";
    let mut file = folder.create_file(name)?;
    file.append(bytes)?;
    let file = file.finish_open()?;
    RealDisk.fsync_folder(&folder.unfinished.folder, &folder.unfinished.path)?;
    let moved = RealDisk.file_stat(&file, &folder.target)?;
    let renamed = RealDisk.rename(
        (&folder.unfinished.folder, OsStr::new(name)),
        (&folder.parent, &folder.target_name),
        &folder.target,
    );
    folder.confirm(renamed, moved)?;
    // Dropping the folder removes the empty hidden folder.
    folder.make_name_durable()
}

impl Drop for AtomicFolder {
    fn drop(&mut self) {
        if self.remover == Some(std::process::id()) {
            // The next sweep removes what cannot be removed now: its lock ends with this descriptor.
            let _ = sweep::remove_locked(
                &self.parent,
                &self.unfinished.name,
                &self.unfinished.folder,
                &self.unfinished.path,
            );
        }
    }
}

fn check_target_is_no_folder(parent: &OwnedFd, name: &OsStr, path: &Path) -> Result<(), CommitError> {
    match RealDisk.look_at(parent, name, path)? {
        Some(stat) if stat.kind == EntryKind::Folder => {
            Err(CommitError::io("put a file in the place of", path, Errno::ISDIR))
        }
        _ => Ok(()),
    }
}

fn check_target_is_free(parent: &OwnedFd, name: &OsStr, path: &Path) -> Result<(), CommitError> {
    let taken = || CommitError::TargetExists { path: path.to_path_buf() };
    let Some(stat) = RealDisk.look_at(parent, name, path)? else {
        return Ok(());
    };
    if stat.kind != EntryKind::Folder {
        return Err(taken());
    }
    let folder = match RealDisk.open_folder(parent, name, path) {
        Err(error) if error.is(Errno::NOENT) => return Ok(()),
        outcome => outcome?,
    };
    if !RealDisk.list(&folder, path)?.is_empty() {
        return Err(taken());
    }
    if stat.device != RealDisk.folder_stat(parent, path)?.device {
        return Err(CommitError::io("rename over the mounted file system at", path, Errno::BUSY));
    }
    Ok(())
}

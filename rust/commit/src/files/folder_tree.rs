//! A checkpoint's folder and the inner folders of its files, all open.
//!
//! Invariants: names are checked before anything is created. Every folder is opened relative to its parent and never
//! through a symbolic link, so nothing outside the first folder can be reached.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::disk::{Disk, FileStat, LockMode, LockOutcome};
use crate::error::CommitError;
use crate::{hidden_names, manifest};

/// Open folders, each after its parent.
pub(crate) struct FolderTree<D: Disk> {
    /// The parent of the first folder.
    parent: FileStat,
    folders: Vec<TreeFolder<D>>,
}

struct TreeFolder<D: Disk> {
    /// Relative to the first folder; empty for that itself.
    name: String,
    path: PathBuf,
    folder: D::Folder,
}

/// A file in a tree.
#[derive(Debug)]
pub(crate) struct TreeFile {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    folder: usize,
    base_name: OsString,
}

impl<D: Disk> FolderTree<D> {
    /// Opens `folder` and creates the missing inner folders of the files `names`.
    pub(crate) fn open<'a>(
        disk: &D,
        folder: &Path,
        names: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<(Self, Vec<TreeFile>), CommitError> {
        manifest::check_names(names.clone())
            .map_err(|reason| CommitError::InvalidWrite { path: folder.to_path_buf(), reason })?;
        let (parent_path, base_name) = hidden_names::split(folder)?;
        let parent = disk.open_path(&parent_path)?;
        let opened = disk.open_folder(&parent, &base_name, folder).map_err(|error| match error {
            error if error.is(Errno::NOENT) => CommitError::ParentMissing { path: folder.to_path_buf() },
            // It may be a symbolic link that somebody put in the place of the folder.
            error if error.is(Errno::NOTDIR) || error.is(Errno::LOOP) => {
                CommitError::NotADirectory { path: folder.to_path_buf() }
            }
            error => error,
        })?;
        let parent = disk.folder_stat(&parent, &parent_path)?;
        let first = TreeFolder { name: String::new(), path: folder.to_path_buf(), folder: opened };
        // The lock shows the next owner of the root that somebody writes here. A process that already holds an
        // exclusive lock is about to remove the folder.
        if disk.lock_folder(&first.folder, LockMode::Shared, folder)? == LockOutcome::HeldByAnother {
            return Err(CommitError::ParentMissing { path: folder.to_path_buf() });
        }
        let mut tree = FolderTree { parent, folders: vec![first] };
        let tree_files = names.map(|name| tree.add_file(disk, name)).collect::<Result<_, _>>()?;
        Ok((tree, tree_files))
    }

    fn add_file(&mut self, disk: &D, name: &str) -> Result<TreeFile, CommitError> {
        let mut folder = 0;
        for (end, _) in name.match_indices('/') {
            folder = match self.folders.iter().position(|open| open.name == name[..end]) {
                Some(found) => found,
                None => self.make_folder(disk, folder, &name[..end])?,
            };
        }
        let base_name = OsString::from(name.rsplit('/').next().unwrap_or(name));
        Ok(TreeFile { name: name.to_owned(), path: self.folders[0].path.join(name), folder, base_name })
    }

    fn make_folder(&mut self, disk: &D, parent: usize, name: &str) -> Result<usize, CommitError> {
        let path = self.folders[0].path.join(name);
        let base_name = OsStr::new(name.rsplit('/').next().unwrap_or(name));
        let parent = &self.folders[parent].folder;
        match disk.create_folder(parent, base_name, &path) {
            Err(error) if !error.is(Errno::EXIST) => return Err(error),
            _ => {}
        }
        let folder = disk.open_folder(parent, base_name, &path)?;
        self.folders.push(TreeFolder { name: name.to_owned(), path, folder });
        Ok(self.folders.len() - 1)
    }

    /// The first folder.
    pub(crate) fn top(&self) -> &D::Folder {
        &self.folders[0].folder
    }

    /// The status of the first folder's parent.
    pub(crate) fn parent(&self) -> &FileStat {
        &self.parent
    }

    /// The path of the first folder.
    pub(crate) fn path(&self) -> &Path {
        &self.folders[0].path
    }

    /// Creates the file, which must not exist.
    pub(crate) fn create(&self, disk: &D, tree_file: &TreeFile) -> Result<D::File, CommitError> {
        match disk.create_file(self.folder_of(tree_file), &tree_file.base_name, &tree_file.path) {
            Err(error) if error.is(Errno::EXIST) => Err(CommitError::FileExists { path: tree_file.path.clone() }),
            outcome => outcome,
        }
    }

    pub(crate) fn open_for_writing(&self, disk: &D, tree_file: &TreeFile) -> Result<D::File, CommitError> {
        disk.open_file_for_writing(self.folder_of(tree_file), &tree_file.base_name, &tree_file.path)
    }

    pub(crate) fn open_for_direct_writing(
        &self,
        disk: &D,
        tree_file: &TreeFile,
    ) -> Result<Option<D::File>, CommitError> {
        disk.open_file_for_direct_writing(self.folder_of(tree_file), &tree_file.base_name, &tree_file.path)
    }

    /// Makes the names of all files and folders durable, the innermost first.
    pub(crate) fn fsync(&self, disk: &D) -> Result<(), CommitError> {
        self.folders.iter().rev().try_for_each(|open| disk.fsync_folder(&open.folder, &open.path))
    }

    fn folder_of(&self, tree_file: &TreeFile) -> &D::Folder {
        &self.folders[tree_file.folder].folder
    }
}

//! A checkpoint's folder and the inner folders of its files, all open, in which files are created.
//!
//! Invariants: names are checked before anything is created. Every folder is opened relative to its parent and never
//! through a symbolic link, so nothing outside the first folder can be reached.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::RealDisk;
use crate::checksum::Checksum;
use crate::disk::{self, Disk, LockMode, LockOutcome};
use crate::error::CommitError;
use crate::manifest::FileMetadata;
use crate::open_folder::OpenFolder;
use crate::{hidden_names, manifest};

/// Open folders, each after its parent.
pub(crate) struct FolderTree<D: Disk> {
    /// With the name of each relative to the first, which is empty for that itself.
    folders: Vec<(String, OpenFolder<D>)>,
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
        let parent = OpenFolder::open(disk, &parent_path)?;
        let opened = disk.open_folder(&parent.folder, &base_name, folder).map_err(|error| match error {
            error if error.is(Errno::NOENT) => CommitError::ParentMissing { path: folder.to_path_buf() },
            // It may be a symbolic link that somebody put in the place of the folder.
            error if error.is(Errno::NOTDIR) || error.is(Errno::LOOP) => {
                CommitError::NotADirectory { path: folder.to_path_buf() }
            }
            error => error,
        })?;
        let first = OpenFolder { disk: disk.clone(), folder: opened, path: folder.to_path_buf() };
        // The lock shows the next owner of the root that somebody writes here. A process that already holds an
        // exclusive lock is about to remove the folder.
        if disk.lock_folder(&first.folder, LockMode::Shared, folder)? == LockOutcome::HeldByAnother {
            return Err(CommitError::ParentMissing { path: folder.to_path_buf() });
        }
        let mut tree = FolderTree { folders: vec![(String::new(), first)] };
        let tree_files = names.map(|name| tree.add_file(name)).collect::<Result<_, _>>()?;
        Ok((tree, tree_files))
    }

    fn add_file(&mut self, name: &str) -> Result<TreeFile, CommitError> {
        let mut folder = 0;
        for (end, _) in name.match_indices('/') {
            folder = match self.folders.iter().position(|(open, _)| *open == name[..end]) {
                Some(found) => found,
                None => self.make_folder(folder, &name[..end])?,
            };
        }
        Ok(TreeFile { name: name.to_owned(), path: self.path().join(name), folder, base_name: base_name_of(name) })
    }

    fn make_folder(&mut self, parent: usize, name: &str) -> Result<usize, CommitError> {
        let (_, parent) = &self.folders[parent];
        let base_name = base_name_of(name);
        match parent.disk.create_folder(&parent.folder, &base_name, &self.path().join(name)) {
            Err(error) if !error.is(Errno::EXIST) => return Err(error),
            _ => {}
        }
        let folder = parent.open_folder(&base_name)?;
        self.folders.push((name.to_owned(), folder));
        Ok(self.folders.len() - 1)
    }

    /// The first folder.
    pub(crate) fn top(&self) -> &OpenFolder<D> {
        &self.folders[0].1
    }

    /// The path of the first folder.
    pub(crate) fn path(&self) -> &Path {
        &self.top().path
    }

    /// Creates the file, which must not exist.
    pub(crate) fn create(&self, tree_file: &TreeFile) -> Result<D::File, CommitError> {
        let folder = self.folder_of(tree_file);
        match folder.disk.create_file(&folder.folder, &tree_file.base_name, &tree_file.path) {
            Err(error) if error.is(Errno::EXIST) => Err(CommitError::FileExists { path: tree_file.path.clone() }),
            outcome => outcome,
        }
    }

    pub(crate) fn open_for_writing(&self, tree_file: &TreeFile) -> Result<D::File, CommitError> {
        let folder = self.folder_of(tree_file);
        folder.disk.open_file_for_writing(&folder.folder, &tree_file.base_name, &tree_file.path)
    }

    pub(crate) fn open_for_direct_writing(&self, tree_file: &TreeFile) -> Result<Option<D::File>, CommitError> {
        let folder = self.folder_of(tree_file);
        folder.disk.open_file_for_direct_writing(&folder.folder, &tree_file.base_name, &tree_file.path)
    }

    /// Makes the names of all files and folders durable, the innermost first.
    pub(crate) fn sync(&self) -> Result<(), CommitError> {
        self.folders.iter().rev().try_for_each(|(_, folder)| folder.sync())
    }

    fn folder_of(&self, tree_file: &TreeFile) -> &OpenFolder<D> {
        &self.folders[tree_file.folder].1
    }
}

fn base_name_of(name: &str) -> OsString {
    OsString::from(name.rsplit('/').next().unwrap_or(name))
}

/// Writes `bytes` as the new file `name`, relative to `folder`, and makes it and the folders it lies in durable.
///
/// Missing inner folders are created. Modes are those that the umask leaves.
///
/// # Errors
/// [`CommitError::InvalidWrite`] for an invalid file name, [`CommitError::FileExists`],
/// [`CommitError::ParentMissing`] and [`CommitError::Io`].
pub fn write_small_file(folder: impl AsRef<Path>, name: &str, bytes: &[u8]) -> Result<FileMetadata, CommitError> {
    let (tree, tree_files) = FolderTree::open(&RealDisk, folder.as_ref(), std::iter::once(name))?;
    for tree_file in &tree_files {
        let file = tree.create(tree_file)?;
        disk::write_all(&RealDisk, &file, 0, bytes, &tree_file.path, |_| Ok(()))?;
        RealDisk.fsync(&file, &tree_file.path)?;
    }
    tree.sync()?;
    Ok(FileMetadata { name: name.to_owned(), size: bytes.len() as u64, checksum: Some(Checksum::of(bytes)) })
}

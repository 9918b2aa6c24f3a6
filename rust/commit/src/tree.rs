//! A folder and the folders in it that some files lie in.
//!
//! What always holds: names are checked before anything is made; every folder, the first too, is opened relative to the
//! one that it lies in and never through a symbolic link, so that nothing outside the first can be reached.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::disk::{Disk, Lock, Sharing, Status};
use crate::error::CommitError;
use crate::{manifest, name};

/// Open folders, each after the one that it lies in.
pub(crate) struct Tree<D: Disk> {
    /// What the first lies in.
    parent: Status,
    folders: Vec<Open<D>>,
}

struct Open<D: Disk> {
    /// Relative to the first; empty for that itself.
    name: String,
    path: PathBuf,
    folder: D::Folder,
}

/// Where a file lies in a tree.
#[derive(Debug)]
pub(crate) struct Place {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    folder: usize,
    leaf: OsString,
}

impl<D: Disk> Tree<D> {
    /// Opens `folder`, and makes what it lacks of the folders that the files `names` lie in.
    ///
    /// # Errors
    /// [`CommitError::InvalidWrite`] for names that cannot be those of a checkpoint's files.
    pub(crate) fn make<'a>(
        disk: &D,
        folder: &Path,
        names: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<(Self, Vec<Place>), CommitError> {
        manifest::check_names(names.clone())
            .map_err(|reason| CommitError::InvalidWrite { path: folder.to_path_buf(), reason })?;
        let (parent_path, leaf) = name::split(folder)?;
        let parent = disk.open_path(&parent_path)?;
        let opened = disk.open_folder(&parent, &leaf, folder).map_err(|error| match error {
            error if error.is(Errno::NOENT) => CommitError::ParentMissing { path: folder.to_path_buf() },
            // A symbolic link is one too: somebody has put it in the place of the folder that was made.
            error if error.is(Errno::NOTDIR) || error.is(Errno::LOOP) => {
                CommitError::NotADirectory { path: folder.to_path_buf() }
            }
            error => error,
        })?;
        let parent = disk.folder_status(&parent, &parent_path)?;
        let first = Open { name: String::new(), path: folder.to_path_buf(), folder: opened };
        // Tells whoever opens the root next that somebody writes here; who has it already is about to remove the
        // folder.
        if disk.lock_folder(&first.folder, Sharing::Shared, folder)? == Lock::HeldByAnother {
            return Err(CommitError::ParentMissing { path: folder.to_path_buf() });
        }
        let mut tree = Tree { parent, folders: vec![first] };
        let places = names.map(|name| tree.place(disk, name)).collect::<Result<_, _>>()?;
        Ok((tree, places))
    }

    fn place(&mut self, disk: &D, name: &str) -> Result<Place, CommitError> {
        let mut folder = 0;
        for (end, _) in name.match_indices('/') {
            folder = match self.folders.iter().position(|open| open.name == name[..end]) {
                Some(found) => found,
                None => self.make_folder(disk, folder, &name[..end])?,
            };
        }
        let leaf = OsString::from(name.rsplit('/').next().unwrap_or(name));
        Ok(Place { name: name.to_owned(), path: self.folders[0].path.join(name), folder, leaf })
    }

    fn make_folder(&mut self, disk: &D, parent: usize, name: &str) -> Result<usize, CommitError> {
        let path = self.folders[0].path.join(name);
        let leaf = OsStr::new(name.rsplit('/').next().unwrap_or(name));
        let parent = &self.folders[parent].folder;
        match disk.create_folder(parent, leaf, &path) {
            Err(error) if !error.is(Errno::EXIST) => return Err(error),
            _ => {}
        }
        let folder = disk.open_folder(parent, leaf, &path)?;
        self.folders.push(Open { name: name.to_owned(), path, folder });
        Ok(self.folders.len() - 1)
    }

    /// The first folder.
    pub(crate) fn top(&self) -> &D::Folder {
        &self.folders[0].folder
    }

    /// The folder that the first lies in.
    pub(crate) fn parent(&self) -> &Status {
        &self.parent
    }

    /// The path of the first folder.
    pub(crate) fn path(&self) -> &Path {
        &self.folders[0].path
    }

    /// Makes the file, which must not be there.
    pub(crate) fn create(&self, disk: &D, place: &Place) -> Result<D::File, CommitError> {
        match disk.create_file(self.folder_of(place), &place.leaf, &place.path) {
            Err(error) if error.is(Errno::EXIST) => Err(CommitError::FileExists { path: place.path.clone() }),
            outcome => outcome,
        }
    }

    pub(crate) fn open_for_writing(&self, disk: &D, place: &Place) -> Result<D::File, CommitError> {
        disk.open_file_for_writing(self.folder_of(place), &place.leaf, &place.path)
    }

    pub(crate) fn open_for_direct_writing(&self, disk: &D, place: &Place) -> Result<Option<D::File>, CommitError> {
        disk.open_file_for_direct_writing(self.folder_of(place), &place.leaf, &place.path)
    }

    /// Makes the names of all files and folders durable, the innermost first.
    pub(crate) fn fsync(&self, disk: &D) -> Result<(), CommitError> {
        self.folders.iter().rev().try_for_each(|open| disk.fsync_folder(&open.folder, &open.path))
    }

    fn folder_of(&self, place: &Place) -> &D::Folder {
        &self.folders[place.folder].folder
    }
}

//! The one error of this crate. Every variant names the path it is about.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// Why a folder could not be written, published or swept.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// A system call failed.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// What was tried, a verb phrase such as `"write"` or `"create folder"`.
        operation: &'static str,
        /// What it was tried on.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// The target exists and is not an empty directory, or another writer published it first.
    #[error("{} exists already and is not an empty folder; nothing was changed there", path.display())]
    TargetExists {
        /// The target.
        path: PathBuf,
    },
    /// The folder that is to hold the target does not exist (any more).
    #[error("the folder {} does not exist; make it first", path.display())]
    ParentMissing {
        /// The missing folder.
        path: PathBuf,
    },
    /// What is to hold the target is not a directory.
    #[error("{} is not a folder", path.display())]
    NotADirectory {
        /// The path that should be a directory.
        path: PathBuf,
    },
    /// A target or file name that cannot be used.
    #[error("{} cannot be used: {reason}", path.display())]
    InvalidName {
        /// The name, with the folder it was meant for where there is one.
        path: PathBuf,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A file of this name was already made in this folder.
    #[error("{} was already made in this folder", path.display())]
    FileExists {
        /// The file.
        path: PathBuf,
    },
    /// The folder was to be published before [`FolderFile::finish`](crate::FolderFile::finish) of this file.
    #[error("{} was not finished, so its folder is not published", path.display())]
    Unfinished {
        /// The first such file.
        path: PathBuf,
    },
    /// An earlier write or fsync in this folder failed, so the folder cannot be published.
    #[error("not published because {operation} failed earlier on {}: {source}", path.display())]
    Poisoned {
        /// What failed first.
        operation: &'static str,
        /// What it failed on.
        path: PathBuf,
        /// The operating system's answer at that time.
        source: io::Error,
    },
    /// The folder is complete and visible under its final name, but the fsync of its parent failed: a crash of
    /// the machine may take the name away again (never a part of the folder). See
    /// [`Folder::publish`](crate::Folder::publish).
    #[error(
        "{} is complete and visible, but may not survive a crash of the machine: fsync of its parent folder \
         failed: {source}", path.display()
    )]
    NotDurable {
        /// The target.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
}

impl CommitError {
    pub(crate) fn io(operation: &'static str, path: &Path, errno: Errno) -> Self {
        CommitError::Io { operation, path: path.to_path_buf(), source: errno.into() }
    }

    /// The path the error is about.
    pub fn path(&self) -> &Path {
        match self {
            CommitError::Io { path, .. }
            | CommitError::TargetExists { path }
            | CommitError::ParentMissing { path }
            | CommitError::NotADirectory { path }
            | CommitError::InvalidName { path, .. }
            | CommitError::FileExists { path }
            | CommitError::Unfinished { path }
            | CommitError::Poisoned { path, .. }
            | CommitError::NotDurable { path, .. } => path,
        }
    }

    /// The error number that fits: the operating system's where it gave one, else the one that says the same
    /// (`EEXIST` for [`TargetExists`](CommitError::TargetExists)). `None` for
    /// [`Unfinished`](CommitError::Unfinished), an error of the calling program.
    pub fn raw_os_error(&self) -> Option<i32> {
        let errno = match self {
            CommitError::Io { source, .. }
            | CommitError::Poisoned { source, .. }
            | CommitError::NotDurable { source, .. } => return source.raw_os_error(),
            CommitError::TargetExists { .. } | CommitError::FileExists { .. } => Errno::EXIST,
            CommitError::ParentMissing { .. } => Errno::NOENT,
            CommitError::NotADirectory { .. } => Errno::NOTDIR,
            CommitError::InvalidName { .. } => Errno::INVAL,
            CommitError::Unfinished { .. } => return None,
        };
        Some(errno.raw_os_error())
    }

    pub(crate) fn is(&self, errno: Errno) -> bool {
        self.raw_os_error() == Some(errno.raw_os_error())
    }
}

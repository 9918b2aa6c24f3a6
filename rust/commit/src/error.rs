//! The error of this crate. Every variant names a path.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::manifest::CheckpointKind;

/// Why a folder, a file or a checkpoint could not be written, published, read or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    // ---- Folders, files and shards, also those of a root ----
    /// A system call failed.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// The attempted operation, such as `"write"` or `"create folder"`.
        operation: &'static str,
        /// The path of the operation.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// The target exists and is not an empty directory, or another writer published it first.
    #[error(
        "{} exists already and is not an empty folder; nothing was changed there: name another one, or remove it first",
        path.display()
    )]
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
    /// The parent of the target is not a directory.
    #[error("{} is not a folder; give another path", path.display())]
    NotADirectory {
        /// The path that should be a directory.
        path: PathBuf,
    },
    /// A target or file name that cannot be used.
    #[error("{} cannot be used: {reason}", path.display())]
    InvalidName {
        /// The name, with the folder it was meant for where there is one.
        path: PathBuf,
        /// The rule that it breaks.
        reason: &'static str,
    },
    /// A file of this name was already made in this folder.
    #[error("{} was already made in this folder", path.display())]
    FileExists {
        /// The file.
        path: PathBuf,
    },
    /// The folder was published before [`FolderFile::finish`](crate::FolderFile::finish) of this file.
    #[error("{} was not finished, so its folder is not published", path.display())]
    Unfinished {
        /// The first such file.
        path: PathBuf,
    },
    /// An earlier write or fsync in this folder failed, so the folder cannot be published.
    #[error("not published because {operation} failed earlier on {}: {source}", path.display())]
    Poisoned {
        /// The operation that failed first.
        operation: &'static str,
        /// The path of that operation.
        path: PathBuf,
        /// The operating system's answer at that time.
        source: io::Error,
    },
    /// Bytes that cannot be a part of the file they were meant for.
    #[error("{} cannot be written so: {reason}", path.display())]
    InvalidWrite {
        /// The file.
        path: PathBuf,
        /// The problem and its remedy.
        reason: String,
    },
    /// A thread that wrote ended by a panic: an error of this library.
    #[error("the writing of {} ended by a panic: {message}", path.display())]
    Panicked {
        /// The file that it was at.
        path: PathBuf,
        /// The message of the panic.
        message: String,
    },
    /// The caller gave up.
    #[error("interrupted at {}", path.display())]
    Interrupted {
        /// The path that was being worked on.
        path: PathBuf,
    },

    // ---- Checkpoint roots ----
    /// Another process owns the checkpoint root.
    #[error("{} is owned by {owner}; end that process, or save elsewhere", path.display())]
    RootInUse {
        /// The root.
        path: PathBuf,
        /// Its process and host.
        owner: String,
    },
    /// This process has the checkpoint root open already.
    #[error(
        "{} is open in this process ({process}) already: close the checkpointer that has it open, or save elsewhere",
        path.display()
    )]
    RootOpenHere {
        /// The root.
        path: PathBuf,
        /// The number of this process.
        process: u32,
    },
    /// The root no longer belongs to this process.
    #[error("{} no longer belongs to this process: {reason}", path.display())]
    RootLost {
        /// The root.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// Something that this library did not make has a name that it needs in a root.
    #[error("{} is in the way: the name is needed for {needed_for}; move it elsewhere", path.display())]
    NameTaken {
        /// The path of the obstacle.
        path: PathBuf,
        /// The use of the name.
        needed_for: &'static str,
    },
    /// A checkpoint of this kind and step is there already, or being written.
    #[error("{} {reason}", path.display())]
    StepExists {
        /// Its folder.
        path: PathBuf,
        /// The existing checkpoint and the remedy.
        reason: String,
    },
    /// A step below the newest of its kind.
    #[error(
        "{kind} step {step} is below step {newest}, the newest in {}: after a rollback set the newer ones aside \
         with discard_after first", path.display()
    )]
    StepOrder {
        /// The root.
        path: PathBuf,
        /// The kind.
        kind: CheckpointKind,
        /// The step that was asked for.
        step: u64,
        /// The newest that is there or being written.
        newest: u64,
    },
    /// A checkpoint cannot be removed or set aside now.
    #[error("{} stays: {reason}", path.display())]
    CheckpointInUse {
        /// Its folder.
        path: PathBuf,
        /// Why not.
        reason: &'static str,
    },
    /// A checkpoint exists, but readers are locked out of it.
    #[error(
        "{} cannot be read now: another process locks readers out of its tundish.json and does not release the lock; \
         find that process with `fuser`, and end it",
        path.display()
    )]
    CheckpointLocked {
        /// Its folder.
        path: PathBuf,
    },
    /// There is no such checkpoint.
    #[error("there is no checkpoint {}", path.display())]
    NoSuchCheckpoint {
        /// Its path.
        path: PathBuf,
    },
    /// A checkpoint cannot be published: it was not begun, or it failed before.
    #[error("{} cannot be published: {reason}", path.display())]
    NotPublishable {
        /// Its hidden folder.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The folder of a checkpoint does not hold what its manifest says.
    #[error("{} does not hold what its manifest says: {reason}", path.display())]
    Corrupt {
        /// The folder.
        path: PathBuf,
        /// The first difference, and how many more there are.
        reason: String,
        /// The files that differ, relative to the folder.
        files: Vec<String>,
    },
    /// The file system cannot exchange two folders in one step.
    #[error(
        "{} cannot be overwritten: this file system cannot exchange two folders in one step, and to remove one \
         before the other is there could lose both; save another step, or remove this one first", path.display()
    )]
    ExchangeUnsupported {
        /// The folder that was to be replaced.
        path: PathBuf,
    },

    // ---- Folders and checkpoints ----
    /// The folder is complete and visible under its final name, but the fsync of its parent failed. A crash of the
    /// machine may take the name away again, never a part of the folder. See
    /// [`AtomicFolder::publish`](crate::AtomicFolder::publish).
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

    /// The same failure of a system call, reported as that of a larger operation.
    pub(crate) fn about(self, operation: &'static str, path: &Path) -> Self {
        match self {
            CommitError::Io { source, .. } => CommitError::Io { operation, path: path.to_path_buf(), source },
            other => other,
        }
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
            | CommitError::InvalidWrite { path, .. }
            | CommitError::Panicked { path, .. }
            | CommitError::Interrupted { path }
            | CommitError::RootInUse { path, .. }
            | CommitError::RootOpenHere { path, .. }
            | CommitError::RootLost { path, .. }
            | CommitError::NameTaken { path, .. }
            | CommitError::StepExists { path, .. }
            | CommitError::StepOrder { path, .. }
            | CommitError::CheckpointInUse { path, .. }
            | CommitError::CheckpointLocked { path }
            | CommitError::NoSuchCheckpoint { path }
            | CommitError::NotPublishable { path, .. }
            | CommitError::Corrupt { path, .. }
            | CommitError::ExchangeUnsupported { path }
            | CommitError::NotDurable { path, .. } => path,
        }
    }

    /// The error number that fits: the operating system's where it gave one, else the one that says the same
    /// (`EEXIST` for [`TargetExists`](CommitError::TargetExists)). `None` for
    /// [`Unfinished`](CommitError::Unfinished) and [`Panicked`](CommitError::Panicked), errors of a program.
    pub fn raw_os_error(&self) -> Option<i32> {
        let errno = match self {
            CommitError::Io { source, .. }
            | CommitError::Poisoned { source, .. }
            | CommitError::NotDurable { source, .. } => return source.raw_os_error(),
            CommitError::TargetExists { .. }
            | CommitError::FileExists { .. }
            | CommitError::NameTaken { .. }
            | CommitError::StepExists { .. } => Errno::EXIST,
            CommitError::ParentMissing { .. } | CommitError::NoSuchCheckpoint { .. } => Errno::NOENT,
            CommitError::RootInUse { .. } | CommitError::RootOpenHere { .. } | CommitError::RootLost { .. } => {
                Errno::AGAIN
            }
            CommitError::CheckpointInUse { .. } | CommitError::CheckpointLocked { .. } => Errno::BUSY,
            CommitError::ExchangeUnsupported { .. } => Errno::OPNOTSUPP,
            CommitError::StepOrder { .. } | CommitError::NotPublishable { .. } => Errno::INVAL,
            CommitError::NotADirectory { .. } => Errno::NOTDIR,
            CommitError::InvalidName { .. } => Errno::INVAL,
            CommitError::InvalidWrite { .. } => Errno::INVAL,
            CommitError::Interrupted { .. } => Errno::INTR,
            CommitError::Unfinished { .. } | CommitError::Panicked { .. } | CommitError::Corrupt { .. } => return None,
        };
        Some(errno.raw_os_error())
    }

    /// An error that refers to this one as an earlier failure.
    pub(crate) fn again(&self) -> Self {
        let path = self.path().to_path_buf();
        match self {
            CommitError::Panicked { message, .. } => CommitError::Panicked { path, message: message.clone() },
            CommitError::Io { operation, source, .. } | CommitError::Poisoned { operation, source, .. } => {
                let errno = source.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
                CommitError::Poisoned { operation, path, source: io::Error::from_raw_os_error(errno) }
            }
            CommitError::NotPublishable { reason, .. } => CommitError::NotPublishable { path, reason: reason.clone() },
            other => {
                let reason = format!("it failed before, so begin it again: {other}");
                CommitError::NotPublishable { path, reason }
            }
        }
    }

    /// Whether the disk was full. A failed fsync is final even if it reports that.
    pub(crate) fn is_out_of_space(&self) -> bool {
        let is_fsync = matches!(self, CommitError::Io { operation: "fsync", .. });
        !is_fsync && [Errno::NOSPC, Errno::DQUOT].into_iter().any(|errno| self.is(errno))
    }

    /// Whether this process lacks descriptors or memory; then it says nothing about the path.
    pub(crate) fn is_shortage(&self) -> bool {
        [Errno::MFILE, Errno::NFILE, Errno::NOMEM].into_iter().any(|errno| self.is(errno))
    }

    pub(crate) fn is(&self, errno: Errno) -> bool {
        self.raw_os_error() == Some(errno.raw_os_error())
    }
}

/// The first failure of those who write the files of a folder. It is never forgotten: a save that failed stays failed.
#[derive(Debug, Default)]
pub(crate) struct FirstFailure(Option<CommitError>);

impl FirstFailure {
    pub(crate) fn record(&mut self, error: CommitError) {
        self.0.get_or_insert(error);
    }

    pub(crate) fn is_recorded(&self) -> bool {
        self.0.is_some()
    }

    /// Refuses once anything failed, with an error that refers to it.
    pub(crate) fn check(&self) -> Result<(), CommitError> {
        self.0.as_ref().map_or(Ok(()), |failure| Err(failure.again()))
    }

    /// The failure, if there is one: the original error the first time, then one that refers to it.
    pub(crate) fn report(&mut self) -> Result<(), CommitError> {
        let Some(failure) = self.0.as_ref() else { return Ok(()) };
        let again = failure.again();
        self.0.replace(again).map_or(Ok(()), Err)
    }
}

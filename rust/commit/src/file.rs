//! One file of a folder that is being written.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::disk::{self, Disk, RealDisk};
use crate::error::CommitError;
use crate::ledger::Ledger;
use crate::writeback::{WINDOW, Writeback};

/// A file of a [`Folder`](crate::Folder), made by [`Folder::create_file`](crate::Folder::create_file).
///
/// Each call writes straight to the file, without a buffer of its own: append in pieces of some kilobytes or more.
/// The file counts as part of the folder only after [`finish`](FolderFile::finish); dropped before that, it
/// keeps its folder from being published. Files of one folder may be written from several threads.
#[derive(Debug)]
pub struct FolderFile {
    file: File,
    path: PathBuf,
    length: u64,
    writeback: Writeback,
    ledger: Arc<Ledger>,
}

impl FolderFile {
    pub(crate) fn new(file: File, path: PathBuf, ledger: Arc<Ledger>) -> Self {
        ledger.begin(&path);
        FolderFile { file, path, length: 0, writeback: Writeback::new(), ledger }
    }

    /// Where the file lies until its folder is published.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes from the start to the end of the last byte written.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Whether nothing was written yet.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Writes all of `bytes` at the end.
    ///
    /// # Errors
    /// [`CommitError::Io`] when a write fails (a full disk, for one), [`CommitError::Poisoned`] when one failed
    /// before, in whichever file of the folder. After either the folder cannot be published.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), CommitError> {
        self.write_at(self.length, bytes)
    }

    /// Writes all of `bytes` at `offset`, for a header that is known last. A gap that is left reads as zeros.
    ///
    /// # Errors
    /// As [`append`](FolderFile::append); `EFBIG` for an end beyond 2⁶³ − 1.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), CommitError> {
        self.ledger.check()?;
        let outcome = self.write_all(offset, bytes);
        self.ledger.note(outcome)
    }

    /// Cuts off everything from `length` bytes on; does nothing to a file that is not longer.
    ///
    /// # Errors
    /// As [`append`](FolderFile::append).
    pub fn truncate(&mut self, length: u64) -> Result<(), CommitError> {
        self.ledger.check()?;
        if length < self.length {
            self.ledger.note(RealDisk.truncate(&self.file, length, &self.path))?;
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

    /// [`finish`](FolderFile::finish), for who closes the file later, or asks where it went.
    ///
    /// # Errors
    /// As [`finish`](FolderFile::finish).
    pub fn finish_open(self) -> Result<File, CommitError> {
        self.ledger.check()?;
        self.ledger.note(RealDisk.fsync(&self.file, &self.path))?;
        self.ledger.finish(&self.path);
        Ok(self.file)
    }

    fn write_all(&mut self, offset: u64, bytes: &[u8]) -> Result<(), CommitError> {
        let FolderFile { file, path, length, writeback, .. } = self;
        disk::write_all(&RealDisk, file, offset, bytes, path, WINDOW as usize, |written| {
            *length = (*length).max(written.end);
            writeback.wrote(&RealDisk, file, written, path)
        })
    }
}

//! A file of an [`AtomicFolder`](crate::AtomicFolder) that is being written.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use crate::disk::{self, Disk, RealDisk};
use crate::error::CommitError;
use crate::files::{WINDOW, Writeback};
use crate::folders::write_status::WriteStatus;

/// A file of an [`AtomicFolder`](crate::AtomicFolder), made by
/// [`AtomicFolder::create_file`](crate::AtomicFolder::create_file).
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
    write_status: Arc<WriteStatus>,
}

impl FolderFile {
    pub(crate) fn new(file: File, path: PathBuf, write_status: Arc<WriteStatus>) -> Self {
        write_status.begin(&path);
        FolderFile { file, path, length: 0, writeback: Writeback::new(), write_status }
    }

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
        self.write_status.check()?;
        let outcome = self.write_all(offset, bytes);
        self.write_status.record(outcome)
    }

    /// Cuts the file to `length` bytes; does nothing to a shorter file.
    ///
    /// # Errors
    /// As [`append`](FolderFile::append).
    pub fn truncate(&mut self, length: u64) -> Result<(), CommitError> {
        self.write_status.check()?;
        if length < self.length {
            self.write_status.record(RealDisk.truncate(&self.file, length, &self.path))?;
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
        self.write_status.check()?;
        self.write_status.record(RealDisk.fsync(&self.file, &self.path))?;
        self.write_status.finish(&self.path);
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

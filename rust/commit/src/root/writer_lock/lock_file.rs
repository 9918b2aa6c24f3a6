//! The open lock file of a root's owner; shared by the owner and its heartbeat.

use std::path::PathBuf;
use std::time::Duration;

use super::lock_record::{self, LockRecord};
use crate::disk::{Disk, write_all};
use crate::error::CommitError;

/// How the owners of one root keep time. All of them use the same values.
#[derive(Debug, Clone, Copy)]
pub struct HeartbeatTiming {
    /// Between two heartbeats.
    pub beat: Duration,
    /// A record that was unchanged for this long belongs to a dead owner.
    pub stale: Duration,
}

impl Default for HeartbeatTiming {
    fn default() -> Self {
        Self { beat: Duration::from_secs(3), stale: Duration::from_secs(20) }
    }
}

pub(crate) struct LockFile<D: Disk> {
    pub(crate) disk: D,
    pub(crate) file: D::File,
    pub(crate) path: PathBuf,
    pub(crate) own: LockRecord,
    /// Writes have to be sent to a server before other machines see them.
    pub(crate) is_shared: bool,
    pub(crate) timing: HeartbeatTiming,
}

impl<D: Disk> LockFile<D> {
    /// Reads the record as other machines see it. Network file systems ask their server again after a lock; taking a
    /// lock that is already held changes nothing.
    pub(crate) fn read_again(&self) -> Result<Option<LockRecord>, CommitError> {
        self.disk.lock_file_for_process(&self.file, &self.path)?;
        Ok(LockRecord::parse(&lock_record::read(&self.disk, &self.file, &self.path)?))
    }

    pub(crate) fn write(&self, record: &LockRecord) -> Result<(), CommitError> {
        let bytes = record.to_bytes();
        write_all(&self.disk, &self.file, 0, &bytes, &self.path, bytes.len(), |_| Ok(()))?;
        // The fsync sends it to the server. Nobody needs a heartbeat after a crash.
        if self.is_shared { self.disk.fsync(&self.file, &self.path) } else { Ok(()) }
    }

    /// Releases the lock if it is held. Best effort: the next owner sees that the process is gone, or that the
    /// heartbeat has stopped.
    pub(crate) fn release(&self) {
        if matches!(self.read_again(), Ok(Some(record)) if record.nonce == self.own.nonce) {
            let _ = self.write(&self.own.release());
        }
    }

    /// Writes heartbeat number `beat`; `false` when another process owns the root.
    pub(crate) fn beat(&self, beat: u64) -> Result<bool, CommitError> {
        match self.read_again()? {
            Some(record) if record.nonce != self.own.nonce => Ok(false),
            _ => self.write(&self.own.after(beat)).map(|()| true),
        }
    }
}

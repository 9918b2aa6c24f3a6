//! The contents of the lock file: the owner of the root and the number of its heartbeats.
//!
//! The record is overwritten in place, because replacing the file would replace the lock. A heartbeat changes only
//! digits at fixed places, so that a concurrent reader always finds a valid record.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::process_identity::ProcessIdentity;
use crate::disk::Disk;
use crate::error::CommitError;

/// Bytes of a record. Longer than any: the longest name of a host has 64.
pub(crate) const LENGTH: usize = 512;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LockRecord {
    #[serde(flatten)]
    pub(crate) owner: ProcessIdentity,
    /// Distinguishes this ownership from all others, also of the same process.
    pub(crate) nonce: String,
    /// The number of heartbeats, always with the same number of digits.
    beat: String,
    /// The owner released the root.
    pub(crate) released: bool,
}

impl LockRecord {
    /// The first record of a new ownership.
    pub(crate) fn new(owner: ProcessIdentity, nonce: String) -> Self {
        Self { owner, nonce, beat: digits(0), released: false }
    }

    /// The same record after `beats` heartbeats.
    pub(crate) fn after(&self, beats: u64) -> Self {
        Self { beat: digits(beats), ..self.clone() }
    }

    /// The last record of an ownership.
    pub(crate) fn release(&self) -> Self {
        Self { released: true, ..self.clone() }
    }

    /// The bytes of the file.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).unwrap_or_default();
        bytes.resize(LENGTH - 1, b' ');
        bytes.push(b'\n');
        bytes
    }

    /// `None` for anything else, as after a crash during the first write.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    /// The owner, for messages.
    pub(crate) fn describe(&self) -> String {
        format!("process {} on host {}", self.owner.pid, self.owner.host)
    }
}

/// Reads the bytes of a record, and one more if the file is longer: a foreign file may have any size.
pub(crate) fn read<D: Disk>(disk: &D, file: &D::File, path: &Path) -> Result<Vec<u8>, CommitError> {
    let mut bytes = vec![0; LENGTH + 1];
    let mut end = 0;
    while end < bytes.len() {
        match disk.read_at(file, end as u64, &mut bytes[end..], path)? {
            0 => break,
            count => end += count,
        }
    }
    bytes.truncate(end);
    Ok(bytes)
}

fn digits(beats: u64) -> String {
    format!("{beats:020}")
}

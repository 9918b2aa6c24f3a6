//! What the owner's file says: who owns the root, and how often its heart has beaten.
//!
//! The record is written in place: taking the file's place would take the lock along. A beat changes digits only, each
//! at its place, so that whoever reads while it is written finds a record all the same.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::identity::Identity;
use crate::disk::Disk;
use crate::error::CommitError;

/// Bytes of a record. Longer than any: the longest name of a host has 64.
pub(super) const LENGTH: usize = 512;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    #[serde(flatten)]
    pub(super) owner: Identity,
    /// Tells this ownership from all others, of the same process too.
    pub(super) nonce: String,
    /// As many digits as any number of beats has.
    beat: String,
    /// The owner let go by itself.
    pub(super) released: bool,
}

impl Record {
    /// The first record of a new ownership.
    pub(super) fn new(owner: Identity, nonce: String) -> Self {
        Self { owner, nonce, beat: digits(0), released: false }
    }

    /// The same after so many beats.
    pub(super) fn after(&self, beats: u64) -> Self {
        Self { beat: digits(beats), ..self.clone() }
    }

    /// The last record of an ownership.
    pub(super) fn release(&self) -> Self {
        Self { released: true, ..self.clone() }
    }

    /// As it lies in the file.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).unwrap_or_default();
        bytes.resize(LENGTH - 1, b' ');
        bytes.push(b'\n');
        bytes
    }

    /// `None` for anything that is no record, as where a machine died while it wrote the first.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    /// The owner, for messages.
    pub(super) fn describe(&self) -> String {
        format!("process {} on host {}", self.owner.pid, self.owner.host)
    }
}

/// The bytes of a record, and one more of what is longer than any: such a file may be of any size.
pub(super) fn read<D: Disk>(disk: &D, file: &D::File, path: &Path) -> Result<Vec<u8>, CommitError> {
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

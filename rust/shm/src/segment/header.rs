//! The header of a segment, its first page: identity, generation, maker, length and layout of the data.
//!
//! Invariants: the owner writes it before any other process knows the segment, or under the exclusive lock. A process
//! that attaches reads a copy of it under the shared lock, and compares every length with the file's.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use rustix::rand::{GetRandomFlags, getrandom};

use crate::error::ShmError;
use crate::memory::DATA_START;
use crate::memory::Mapping;

/// Begins every segment; the last byte is the version of this layout.
const MAGIC: u64 = u64::from_le_bytes(*b"tundish\x01");

// The offset of each word.
const AT_MAGIC: usize = 0;
const AT_IDENTITY: usize = 8;
const AT_GENERATION: usize = 16;
const AT_ACKNOWLEDGED: usize = 24;
const AT_RETIRED: usize = 32;
const AT_DATA_LEN: usize = 40;
const AT_MAKER: usize = 48;
const AT_LAYOUT_LEN: usize = 80;
const AT_LAYOUT: usize = 1024;

/// The most bytes of the description of the data.
pub const LAYOUT_ROOM: usize = DATA_START - AT_LAYOUT;

/// The contents of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// Random number of the segment. An inode number would not do: the kernel uses it again.
    pub identity: u64,
    /// Number of the use of the segment, counted from 1.
    pub generation: u64,
    /// Bytes of data.
    pub data_len: usize,
    /// The process that made it, for people to read: its id may be used again, or differ between namespaces.
    pub maker: u32,
    /// The maker's description of the data.
    pub layout: Vec<u8>,
}

/// Returns a random number for `what`; see [`SegmentHeader::identity`].
///
/// # Errors
/// [`ShmError::Io`] if the system gives none.
pub(crate) fn random_identity(what: &str) -> Result<u64, ShmError> {
    let mut bytes = [0u8; 8];
    // So few bytes are never read in part.
    rustix::io::retry_on_intr(|| getrandom(&mut bytes, GetRandomFlags::empty()))
        .map_err(|errno| ShmError::io("get a random number for", what, errno))?;
    Ok(u64::from_ne_bytes(bytes))
}

impl SegmentHeader {
    /// Reads the header of a file of `size` bytes; `segment` names it in errors.
    ///
    /// # Errors
    /// [`ShmError::NotASegment`] if it is not one, or claims more than the file holds.
    pub(crate) fn read(file: BorrowedFd<'_>, size: usize, segment: &str) -> Result<Self, ShmError> {
        let mut page = [0u8; DATA_START];
        let read = rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut page, 0))
            .map_err(|errno| ShmError::io("read", segment, errno))?;
        Self::parse(&page[..read], size, segment)
    }

    /// Parses the first page of a segment of `size` bytes; `segment` names it in errors.
    ///
    /// # Errors
    /// As of [`read`](Self::read).
    pub(crate) fn parse(page: &[u8], size: usize, segment: &str) -> Result<Self, ShmError> {
        let refuse = |reason: String| ShmError::NotASegment { segment: segment.to_owned(), reason };
        if page.len() < DATA_START || size < DATA_START {
            return Err(refuse(format!("it has {} bytes, less than a header", page.len().min(size))));
        }
        let word = |at: usize| {
            let mut bytes = [0u8; 8];
            bytes.copy_from_slice(&page[at..at + 8]);
            u64::from_ne_bytes(bytes)
        };
        if word(AT_MAGIC) != MAGIC {
            return Err(refuse("no segment of this library and version begins so".to_owned()));
        }
        let (data_len, layout_len) = (word(AT_DATA_LEN), word(AT_LAYOUT_LEN));
        if data_len > (size - DATA_START) as u64 {
            return Err(refuse(format!("its header claims {data_len} bytes and it has {}", size - DATA_START)));
        }
        if layout_len > LAYOUT_ROOM as u64 {
            return Err(refuse(format!("its header claims a description of {layout_len} bytes")));
        }
        Ok(SegmentHeader {
            identity: word(AT_IDENTITY),
            generation: word(AT_GENERATION),
            data_len: data_len as usize,
            maker: word(AT_MAKER) as u32,
            layout: page[AT_LAYOUT..AT_LAYOUT + layout_len as usize].to_vec(),
        })
    }

    /// Writes the header of a segment that no other process has.
    ///
    /// # Panics
    /// When the layout is longer than [`LAYOUT_ROOM`].
    pub(crate) fn write(&self, map: &Mapping) {
        assert!(self.layout.len() <= LAYOUT_ROOM && map.len() >= DATA_START, "a header that does not fit");
        let words = [
            (AT_MAGIC, MAGIC),
            (AT_IDENTITY, self.identity),
            (AT_GENERATION, self.generation),
            (AT_RETIRED, 0),
            (AT_DATA_LEN, self.data_len as u64),
            (AT_MAKER, u64::from(self.maker)),
            (AT_LAYOUT_LEN, self.layout.len() as u64),
        ];
        for (at, value) in words {
            map.word(at).store(value, Ordering::Relaxed);
        }
        // SAFETY: within the first page, which is mapped for writing; no other process has it yet.
        unsafe { map.start().add(AT_LAYOUT).copy_from_nonoverlapping(self.layout.as_ptr(), self.layout.len()) };
    }
}

/// Returns the number of the current use of the segment.
pub(crate) fn generation(map: &Mapping) -> u64 {
    map.word(AT_GENERATION).load(Ordering::Acquire)
}

/// Invalidates handles of earlier generations. The caller has the exclusive lock.
pub(crate) fn set_generation(map: &Mapping, generation: u64) {
    map.word(AT_GENERATION).store(generation, Ordering::Release);
}

/// Returns the last generation that a receiver acknowledged.
pub(crate) fn acknowledged(map: &Mapping) -> u64 {
    map.word(AT_ACKNOWLEDGED).load(Ordering::Acquire)
}

/// Acknowledges `generation`: its receiver has the lease.
pub(crate) fn acknowledge(map: &Mapping, generation: u64) {
    map.word(AT_ACKNOWLEDGED).fetch_max(generation, Ordering::AcqRel);
}

/// Retires the segment: its owner sends nothing in it after generation `last`; 0 if all buffers were received.
pub(crate) fn retire(map: &Mapping, last: u64) {
    map.word(AT_RETIRED).store(last + 1, Ordering::Release);
}

/// Returns the last generation of a retired segment; 0 if all buffers were received.
pub(crate) fn last_generation(map: &Mapping) -> Option<u64> {
    map.word(AT_RETIRED).load(Ordering::Acquire).checked_sub(1)
}

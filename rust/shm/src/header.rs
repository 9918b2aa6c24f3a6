//! The header of a segment, its first page: identity, generation, owner, length and layout of the data.
//!
//! Invariants: an owner writes it before it tells anybody of the segment, or under the exclusive lock. A process that
//! attaches reads a copy of it under the shared lock, and compares every length with the file's.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use rustix::rand::{GetRandomFlags, getrandom};

use crate::error::ShmError;
use crate::mapping::Mapping;
use crate::memory_file::DATA_START;
use crate::owner::Owner;

/// Begins every segment; the last byte is the version of this layout.
const MAGIC: u64 = u64::from_le_bytes(*b"tundish\x01");

// Where each word lies.
const AT_MAGIC: usize = 0;
const AT_IDENTITY: usize = 8;
const AT_GENERATION: usize = 16;
const AT_ACKNOWLEDGED: usize = 24;
const AT_RETIRED: usize = 32;
const AT_DATA_LEN: usize = 40;
const AT_OWNER: usize = 48;
const AT_LAYOUT_LEN: usize = 80;
const AT_LAYOUT: usize = 1024;

/// Bytes that the description of the data may take.
pub const LAYOUT_ROOM: usize = DATA_START - AT_LAYOUT;

/// What a header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Drawn at random when the segment was made: tells it from any other, also from one whose inode has its number.
    pub identity: u64,
    /// How often it was used, this time included.
    pub generation: u64,
    /// Bytes of data.
    pub data_len: usize,
    /// Who made it.
    pub owner: Owner,
    /// What the data are, in words of anyone who made it.
    pub layout: Vec<u8>,
}

/// A number that tells `what` from anything else; see [`Facts::identity`].
///
/// # Errors
/// [`ShmError::Io`] where the system gives none.
pub(crate) fn draw_identity(what: &str) -> Result<u64, ShmError> {
    let mut drawn = [0u8; 8];
    // Eight bytes come whole or not at all.
    rustix::io::retry_on_intr(|| getrandom(&mut drawn, GetRandomFlags::empty()))
        .map_err(|errno| ShmError::io("draw a number for", what, errno))?;
    Ok(u64::from_ne_bytes(drawn))
}

impl Facts {
    /// Reads the header of a file of `size` bytes; `segment` names it in errors.
    ///
    /// # Errors
    /// [`ShmError::NotASegment`] where it is not one, or claims more than the file holds.
    pub(crate) fn read(file: BorrowedFd<'_>, size: usize, segment: &str) -> Result<Self, ShmError> {
        let mut page = [0u8; DATA_START];
        let read = rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut page, 0))
            .map_err(|errno| ShmError::io("read", segment, errno))?;
        Self::parse(&page[..read], size, segment)
    }

    /// What the first page of a segment of `size` bytes says; `segment` names it in errors.
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
        let mut owner = [0u8; Owner::BYTES];
        owner.copy_from_slice(&page[AT_OWNER..AT_OWNER + Owner::BYTES]);
        Ok(Facts {
            identity: word(AT_IDENTITY),
            generation: word(AT_GENERATION),
            data_len: data_len as usize,
            owner: Owner::from_bytes(&owner),
            layout: page[AT_LAYOUT..AT_LAYOUT + layout_len as usize].to_vec(),
        })
    }

    /// Writes the header of a segment that nobody else looks at.
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
            (AT_LAYOUT_LEN, self.layout.len() as u64),
        ];
        for (at, value) in words {
            map.word(at).store(value, Ordering::Relaxed);
        }
        for (at, bytes) in [(AT_OWNER, &self.owner.to_bytes()[..]), (AT_LAYOUT, &self.layout)] {
            // SAFETY: within the first page, which is mapped for writing; nobody looks at it yet.
            unsafe { map.start().add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        }
    }
}

/// How often the segment was used, this time included.
pub(crate) fn generation(map: &Mapping) -> u64 {
    map.word(AT_GENERATION).load(Ordering::Acquire)
}

/// From here on handles of an earlier generation lead to nothing. For who has the exclusive lock.
pub(crate) fn set_generation(map: &Mapping, generation: u64) {
    map.word(AT_GENERATION).store(generation, Ordering::Release);
}

/// The last generation whose reader came.
pub(crate) fn acknowledged(map: &Mapping) -> u64 {
    map.word(AT_ACKNOWLEDGED).load(Ordering::Acquire)
}

/// The reader of `generation` came, and has its lease.
pub(crate) fn acknowledge(map: &Mapping, generation: u64) {
    map.word(AT_ACKNOWLEDGED).fetch_max(generation, Ordering::AcqRel);
}

/// The owner let go of the segment: nothing will be sent in it after what was sent as generation `last`; 0 where the
/// readers of all came.
pub(crate) fn retire(map: &Mapping, last: u64) {
    map.word(AT_RETIRED).store(last + 1, Ordering::Release);
}

/// Whether the owner let go of the segment, and the reader of what was sent in it last came.
pub(crate) fn is_retired(map: &Mapping) -> bool {
    is_over(acknowledged(map), map.word(AT_RETIRED).load(Ordering::Acquire))
}

/// The same, for who has a segment open and not mapped.
///
/// # Errors
/// [`ShmError::Io`] where the file cannot be read; one that is too short is no segment, and nothing is awaited of it.
pub fn is_retired_behind(file: BorrowedFd<'_>) -> Result<bool, ShmError> {
    let mut words = [[0u8; 8]; 2];
    let read = rustix::io::retry_on_intr(|| rustix::io::pread(file, words.as_flattened_mut(), AT_ACKNOWLEDGED as u64))
        .map_err(|errno| ShmError::io("read", "a segment", errno))?;
    let [acknowledged, retired] = words.map(u64::from_ne_bytes);
    Ok(read < words.as_flattened().len() || is_over(acknowledged, retired))
}

fn is_over(acknowledged: u64, retired: u64) -> bool {
    retired != 0 && acknowledged >= retired - 1
}

// Both words are read at once.
const _: () = assert!(AT_RETIRED == AT_ACKNOWLEDGED + 8);

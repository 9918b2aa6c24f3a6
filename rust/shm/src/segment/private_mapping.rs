//! Private mappings of segments: a page is shared until it is written to, and no other process sees the change.
#![allow(unsafe_code)]

use std::ops::Range;
use std::os::fd::BorrowedFd;

use crate::error::ShmError;
use crate::memory::mapping::{Access, Mapping};
use crate::memory::memory_file::{DATA_START, HUGE_PAGE};
use crate::segment::attachment::Keeper;

/// Some of a segment's data, for this process alone to write to.
#[derive(Debug)]
pub struct PrivateMapping {
    map: Mapping,
    /// Where the mapping begins in the segment.
    start: usize,
    /// Dropped last.
    _keeper: Option<Keeper>,
}

impl PrivateMapping {
    /// Maps `bytes` of the data of a segment of `size` bytes. `file` has the shared lock, which the mapping keeps.
    ///
    /// # Errors
    /// [`ShmError::Io`] if the address space has no room.
    pub(crate) fn new(
        file: BorrowedFd<'_>,
        size: usize,
        bytes: Range<usize>,
        keeper: Option<Keeper>,
    ) -> Result<Self, ShmError> {
        let page = rustix::param::page_size();
        // A huge page is mapped as one where addresses and offsets agree.
        let unit = if bytes.len() >= HUGE_PAGE { HUGE_PAGE } else { page };
        let start = (DATA_START + bytes.start) / unit * unit;
        let end = (DATA_START + bytes.end).next_multiple_of(page).min(size.next_multiple_of(page));
        let len = end.saturating_sub(start).max(page);
        let map = Mapping::of_part(file, start as u64, len, Access::Private)?;
        Ok(PrivateMapping { map, start, _keeper: keeper })
    }

    /// The first byte of the segment's data. Only the bytes that the mapping was made for may be used.
    pub fn data(&self) -> *mut u8 {
        self.map.start().wrapping_add(DATA_START).wrapping_sub(self.start)
    }
}

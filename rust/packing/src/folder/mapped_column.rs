//! A plan's columns, mapped from their files. Dropping a column unmaps it.
//!
//! Invariants: a column is mapped from the open file that was checked, so a file that takes its name later is never read.
//! Values are read through raw pointers, so that a process that writes to the file changes values and nothing else.
//!
//! A file that is truncated after it was mapped ends a process that reads the lost part (SIGBUS).
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{Error, ErrorKind, Result};

use memmap2::{MmapOptions, MmapRaw};

use super::npy::{HEADER_BYTES, NpyHeader};
use crate::integers::{IntegerKind, Integers};

/// One column of a plan, in its file.
#[derive(Debug)]
pub struct MappedColumn {
    map: MmapRaw,
    wide: bool,
    len: usize,
}

impl MappedColumn {
    /// The column that `header` describes, in a file that has as many bytes as it says.
    pub(super) fn new(file: &File, header: NpyHeader) -> Result<Self> {
        let too_large = |_| Error::new(ErrorKind::FileTooLarge, "does not fit this machine's addresses");
        let bytes = usize::try_from(header.file_bytes()).map_err(too_large)?;
        let map = MmapOptions::new().len(bytes).map_raw_read_only(file)?;
        Ok(Self { map, wide: header.wide, len: (bytes - HEADER_BYTES) / header.width() })
    }

    /// Whether a value has 8 bytes; else 4.
    #[must_use]
    pub fn is_wide(&self) -> bool {
        self.wide
    }

    /// The first byte of the values, which are in little-endian order, and how many bytes they have.
    #[must_use]
    pub fn bytes(&self) -> (*const u8, usize) {
        // The map covers the header and the values.
        (self.map.as_ptr().wrapping_add(HEADER_BYTES), self.map.len() - HEADER_BYTES)
    }

    /// The values.
    #[must_use]
    pub fn view(&self) -> Integers<'_> {
        let (width, kind) = if self.wide { (8, IntegerKind::I64) } else { (4, IntegerKind::I32) };
        // SAFETY: the map holds so many values behind the header, and lives as long as `self` is borrowed.
        unsafe { Integers::from_raw(self.bytes().0, self.len, width, kind) }
    }
}

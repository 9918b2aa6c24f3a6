//! A copy of another process's segment, where nothing of it can be mapped.
//!
//! It is memory of this process alone, so nobody's lease is on it, and no page of it is shared.
#![allow(unsafe_code)]

use crate::error::ShmError;
use crate::file::DATA_START;
use crate::header::Facts;
use crate::mapping::Mapping;
use crate::segment::Address;

/// The bytes of a segment, in this process's own memory.
#[derive(Debug)]
pub struct Copied {
    map: Mapping,
    facts: Facts,
}

impl Copied {
    /// Memory for `len` bytes, header included, which `fill` fills.
    pub(super) fn receive(
        len: usize,
        address: &Address,
        fill: impl FnOnce(&mut [u8]) -> Result<(), ShmError>,
    ) -> Result<Self, ShmError> {
        let name = format!("the copy of a segment of process {}", address.process);
        if len < DATA_START {
            return Err(ShmError::NotASegment { segment: name, reason: format!("it has {len} bytes") });
        }
        let map = Mapping::anonymous(len)?;
        // SAFETY: the mapping's own range, which nobody else knows yet.
        let memory = unsafe { std::slice::from_raw_parts_mut(map.start(), len) };
        fill(memory)?;
        let facts = Facts::parse(&memory[..DATA_START], len, &name)?;
        if (facts.identity, facts.generation) != (address.identity, address.generation) {
            return Err(ShmError::Gone { segment: name, reason: "it was used again meanwhile".to_owned() });
        }
        Ok(Self { map, facts })
    }

    /// What the header says.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The first byte of data; valid for reads and writes of [`facts`](Self::facts)`.data_len` bytes as long as it
    /// lives.
    pub fn data(&self) -> *mut u8 {
        self.map.start().wrapping_add(DATA_START)
    }

    /// Another copy of the data.
    ///
    /// # Errors
    /// [`ShmError::Io`] where no more memory is to be had.
    pub fn again(&self) -> Result<Self, ShmError> {
        let map = Mapping::anonymous(self.map.len())?;
        // SAFETY: two mappings of one size; who writes to the data of this one meanwhile is in this process, and gets
        // some of it copied or not.
        unsafe { map.start().copy_from_nonoverlapping(self.map.start(), self.map.len()) };
        Ok(Self { map, facts: self.facts.clone() })
    }
}

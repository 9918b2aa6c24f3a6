//! A buffer that one process writes in an arena's segment, and one other process receives without a copy.
//!
//! Invariants: until the reference is taken, the sender alone writes to it; from then on its receiver may. The memory
//! is used again when the receiver has opened and dropped it, or when the sender revoked it and no view of it lives.

use std::sync::Arc;

use crate::arena::Arena;
use crate::error::ShmError;
use crate::memory::memory_file::CheckCancelled;
use crate::segment::{Segment, SegmentAddress};

/// The address and size of a buffer, for its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferReference {
    /// Its segment.
    pub address: SegmentAddress,
    /// The number of its bytes.
    pub len: usize,
}

/// A buffer to be sent.
#[derive(Debug)]
pub struct SendBuffer {
    /// Until it is given back.
    segment: Option<Segment>,
    arena: Arc<Arena>,
    len: usize,
    is_sent: bool,
}

impl SendBuffer {
    /// A buffer of `len` bytes, whose contents are not defined.
    ///
    /// # Errors
    /// As of [`Arena::take`].
    pub fn take(arena: &Arc<Arena>, len: usize, check_cancelled: CheckCancelled<'_>) -> Result<Self, ShmError> {
        let segment = arena.take(len, check_cancelled)?;
        Ok(SendBuffer { segment: Some(segment), arena: Arc::clone(arena), len, is_sent: false })
    }

    /// The number of its bytes.
    #[expect(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The first byte; valid for reads and writes of [`len`](SendBuffer::len) bytes as long as the buffer lives.
    pub fn data(&self) -> *mut u8 {
        self.segment.as_ref().map_or(std::ptr::dangling_mut(), Segment::data)
    }

    /// The descriptor of its memory in this process. A receiver that has it can open the buffer even when this process
    /// is dead.
    pub fn descriptor(&self) -> i32 {
        self.segment.as_ref().map_or(-1, |segment| segment.address().descriptor)
    }

    /// Returns the reference for its one receiver. From here on the buffer counts as sent.
    ///
    /// # Errors
    /// [`ShmError::Invalid`] in a child of the process that took it, which may not send it.
    pub fn reference(&mut self) -> Result<BufferReference, ShmError> {
        let refuse = || ShmError::Invalid("a buffer is sent by the process that took it alone".to_owned());
        let segment = self.segment.as_mut().filter(|segment| segment.is_own()).ok_or_else(refuse)?;
        if !self.is_sent {
            segment.publish(self.len, &[])?;
            self.is_sent = true;
        }
        Ok(BufferReference { address: segment.address(), len: self.len })
    }

    /// Revokes the buffer: once it is dropped, a receiver that opens it is refused.
    pub fn revoke(&mut self) {
        self.is_sent = false;
    }
}

impl Drop for SendBuffer {
    fn drop(&mut self) {
        if let Some(segment) = self.segment.take() {
            if self.is_sent { self.arena.give_sent(segment) } else { self.arena.give_back(segment) }
        }
    }
}

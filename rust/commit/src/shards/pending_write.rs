//! Bytes that were submitted to a shard writer.

use std::sync::Arc;

use crate::files::WINDOW;
use crate::staging::Memory;

/// Bytes for one file, and the memory that they lie in.
pub(super) struct SubmittedBytes {
    pub(super) file: usize,
    pub(super) offset: u64,
    pub(super) memory: Arc<dyn Memory>,
    pub(super) start: usize,
    pub(super) length: usize,
}

impl SubmittedBytes {
    /// Cuts off the first chunk, which one thread writes at a time: up to the next multiple of [`WINDOW`] in the file.
    pub(super) fn cut_chunk(&mut self) -> SubmittedBytes {
        let room = WINDOW - self.offset % WINDOW;
        let length = usize::try_from(room).map_or(self.length, |room| room.min(self.length));
        let memory = Arc::clone(&self.memory);
        let chunk = SubmittedBytes { file: self.file, offset: self.offset, memory, start: self.start, length };
        self.offset += length as u64;
        self.start += length;
        self.length -= length;
        chunk
    }
}

//! What a writer is given to write, and how it is cut for its threads.

use std::sync::Arc;

use crate::staging::FileImage;
use crate::writeback::WINDOW;

/// Bytes of an image for one file.
pub(super) struct Write {
    pub(super) file: usize,
    pub(super) offset: u64,
    pub(super) image: Arc<FileImage>,
    pub(super) start: usize,
    pub(super) length: usize,
}

impl Write {
    /// Takes what one thread writes at a time from the beginning: up to the next multiple of [`WINDOW`] in the file.
    pub(super) fn cut_piece(&mut self) -> Write {
        let room = WINDOW - self.offset % WINDOW;
        let length = usize::try_from(room).map_or(self.length, |room| room.min(self.length));
        let piece =
            Write { file: self.file, offset: self.offset, image: Arc::clone(&self.image), start: self.start, length };
        self.offset += length as u64;
        self.start += length;
        self.length -= length;
        piece
    }
}

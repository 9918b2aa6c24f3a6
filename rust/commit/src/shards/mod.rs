//! The shard writer: gets staged bytes onto the disk, fast and without being felt.
//!
//! A [`ShardWriter`] makes all files of a rank at their full length, takes bytes of images in any order, and
//! finishes when every byte of every file is durable. What always holds:
//!
//! 1. A disk without room is found before the first byte is written: all files are preallocated first.
//! 2. Every byte of a file is written exactly once; ranges that overlap are refused, and so is finishing a file
//!    with a gap.
//! 3. The first failure is final, whatever it is: a write, an fsync, a panic of a thread. What was not written then is
//!    given up, and [`finish`](ShardWriter::finish) reports the failure with the file's path.
//! 4. When `finish` has answered, and when the writer is dropped, no thread of it runs and it holds no image.
//! 5. A writer belongs to the process that made it. A child made by `fork` has none of its threads, and may find
//!    its lock held; there every call is refused and dropping it does nothing.
//! 6. At most `writers_per_node` writers under one root write at once on a node (see `slot.rs`). A writer holds its slot
//!    only while it has something to write, so that it may wait for bytes which another rank cannot give before it has
//!    written its own. Once all that it was given is written it holds none to make files durable, but where more than a
//!    piece went through the page cache; names are made durable without one.
//!
//! Bytes go to the disk directly, past the page cache, where the file system takes that and the image lies in memory
//! as the file does on the disk; else through it, with few dirty pages at a time, which are dropped from it
//! once they are written. A checksum is computed of what is written, by a thread that does not write meanwhile.

mod output;
mod priority;
mod progress;
mod slot;
mod state;
mod worker;
mod write;
mod writer;

pub(crate) use progress::Progress;
pub use slot::sweep_slots;
pub use writer::{ShardWriter, WriterOptions};

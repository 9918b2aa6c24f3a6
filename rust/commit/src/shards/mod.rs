//! The shard writer: writes the files of one rank from staged memory, fast and without disturbing training.
//!
//! A [`ShardWriter`] creates all files of a rank at their full length, accepts bytes of file images in any order, and
//! finishes when every byte of every file is durable.
//!
//! Invariants:
//!
//! 1. A full disk is found before the first byte is written: all files are preallocated.
//! 2. Every byte of a file is written exactly once. Overlapping ranges are refused, and so is finishing a file with a
//!    gap.
//! 3. The first failure is final: a write, an fsync, a panic of a thread. [`finish`](ShardWriter::finish) reports it
//!    with the file's path.
//! 4. After `finish` has answered, and after the writer is dropped, none of its threads runs and it holds no image.
//! 5. A writer belongs to the process that made it. In a child made by `fork` every call is refused, and dropping it
//!    does nothing.
//! 6. At most `writers_per_node` writers under one root write at once on a node (`writer_slots.rs`). A writer holds its
//!    slot only while it has something to write: the bytes that it waits for may come from a rank that needs a slot
//!    first.
//!
//! Bytes bypass the page cache where the file system has direct I/O and the image is laid out like the file. Otherwise
//! few pages are dirty at a time, and written pages are dropped from the cache. Each thread computes the checksum of a
//! chunk after it has written it: a disk reads faster from memory than from a processor's caches.

mod output_file;
mod pending_write;
mod shard_writer;
mod thread_priority;
mod work_queue;
mod writer_slots;
mod writer_threads;

pub use shard_writer::{ShardWriter, WriterOptions};
pub use writer_slots::sweep_slots;

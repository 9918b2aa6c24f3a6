//! A writer frees its slot before its fsync ends.

#![expect(clippy::disallowed_methods, reason = "the tests make the folders")]

#[path = "support/common/mod.rs"]
mod common;
#[macro_use]
#[path = "support/forwarding/mod.rs"]
mod forwarding;
#[path = "support/watched_disk/mod.rs"]
mod watched_disk;

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use common::image;
use tundish_commit::disk::{Disk, RealDisk};
use tundish_commit::shards::{ShardWriter, WriterOptions};
use watched_disk::WatchedDisk;

/// More than a chunk.
const SIZE: usize = 12 << 20;

/// Far longer than a step without a wait takes, and less than the time after which a slot counts as stalled.
const LONG: Duration = Duration::from_secs(10);

/// A disk whose first fsync reports that it began, and waits for a message.
fn standing_disk() -> (WatchedDisk, Receiver<()>, Sender<()>) {
    let (begins, begun) = channel();
    let (go, gone) = channel();
    let once = Mutex::new(Some((begins, gone)));
    let disk = WatchedDisk::new(move |call, _| {
        if call == "fsync" {
            let first = once.lock().unwrap().take();
            if let Some((begins, gone)) = first {
                begins.send(()).unwrap();
                // With a limit, in case the test fails.
                let _ = gone.recv_timeout(2 * LONG);
            }
        }
    });
    (disk, begun, go)
}

/// A writer of one file whose bytes are submitted; in memory they begin `lead` bytes after a page boundary.
fn writer<D: Disk>(disk: D, folder: &Path, lead: usize) -> ShardWriter<D> {
    fs::create_dir(folder).unwrap();
    let options = WriterOptions { checksum: true, writers_per_node: 1 };
    let files = [("a", SIZE as u64)];
    let writer = ShardWriter::on_disk(disk, folder, &files, options, &mut || ControlFlow::Continue(())).unwrap();
    writer.write("a", 0, &image(&vec![7; lead + SIZE]), lead, SIZE).unwrap();
    writer
}

#[test]
fn another_writer_writes_during_an_fsync() {
    let root = tempfile::tempdir().unwrap();
    let (disk, begun, go) = standing_disk();
    let first = writer(disk, &root.path().join("first"), 0);
    begun.recv_timeout(LONG).unwrap();
    let second = writer(RealDisk, &root.path().join("second"), 0);
    assert!(second.finish(LONG).unwrap().is_some());
    assert!(first.finish(Duration::ZERO).unwrap().is_none());
    go.send(()).unwrap();
    assert!(first.finish(LONG).unwrap().is_some());
}

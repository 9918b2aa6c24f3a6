//! Who of a node's writers writes meanwhile, while another one's fsync stands still.

#![expect(clippy::disallowed_methods, reason = "the tests make the folders")]

mod common;
#[macro_use]
mod forwarding;
mod watched;

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use common::image;
use tundish_commit::disk::{Disk, RealDisk};
use tundish_commit::shards::{ShardWriter, WriterOptions};
use watched::WatchedDisk;

/// More than a piece.
const SIZE: usize = 12 << 20;

/// Far longer than anything takes that does not wait, and less than a slot is held by who does nothing.
const LONG: Duration = Duration::from_secs(10);

/// How long somebody is watched who is to wait.
const MOMENT: Duration = Duration::from_millis(300);

/// A disk whose first fsync says that it begins, and waits until it is let go.
fn standing_disk() -> (WatchedDisk, Receiver<()>, Sender<()>) {
    let (begins, begun) = channel();
    let (go, gone) = channel();
    let once = Mutex::new(Some((begins, gone)));
    let disk = WatchedDisk::new(move |call, _| {
        if call == "fsync" {
            let first = once.lock().unwrap().take();
            if let Some((begins, gone)) = first {
                begins.send(()).unwrap();
                // Not without end, where the test has failed.
                let _ = gone.recv_timeout(2 * LONG);
            }
        }
    });
    (disk, begun, go)
}

/// A writer of one file, to which its bytes were given, from `lead` bytes behind the begin of a page on.
fn writer<D: Disk>(disk: D, folder: &Path, lead: usize) -> ShardWriter<D> {
    fs::create_dir(folder).unwrap();
    let options = WriterOptions { checksum: true, writers_per_node: 1 };
    let files = [("a", SIZE as u64)];
    let writer = ShardWriter::on_disk(disk, folder, &files, options, &mut || ControlFlow::Continue(())).unwrap();
    writer.write("a", 0, &image(&vec![7; lead + SIZE]), lead, SIZE).unwrap();
    writer
}

#[test]
fn another_writes_while_a_file_written_past_the_cache_is_made_durable() {
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

#[test]
fn nobody_writes_while_a_file_in_the_cache_is_made_durable() {
    let root = tempfile::tempdir().unwrap();
    let (disk, begun, go) = standing_disk();
    // One byte off: nothing can be written past the cache.
    let first = writer(disk, &root.path().join("first"), 1);
    begun.recv_timeout(LONG).unwrap();
    let second = writer(RealDisk, &root.path().join("second"), 0);
    assert!(second.finish(MOMENT).unwrap().is_none());
    assert_eq!(second.progress(), (0, SIZE as u64));
    go.send(()).unwrap();
    assert!(first.finish(LONG).unwrap().is_some() && second.finish(LONG).unwrap().is_some());
}

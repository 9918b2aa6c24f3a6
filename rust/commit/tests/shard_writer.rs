//! The shard writer on real disks: bytes, checksums, and refusals.

#![expect(clippy::disallowed_methods, reason = "the tests build what the crate has to cope with")]

#[path = "support/common/mod.rs"]
mod common;

use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::{Mount, crc64, image};
use proptest::prelude::*;
use tundish_commit::staging::FileImage;
use tundish_commit::{CommitError, FileMetadata, ShardWriter, write_small_file};

const ENOSPC: i32 = 28;
const MIB: usize = 1 << 20;
// time: what comes at all comes within this
const TIMEOUT: Duration = Duration::from_secs(60);

fn writer(folder: &Path, files: &[(&str, u64)]) -> Result<ShardWriter, CommitError> {
    ShardWriter::create(folder, files, true, &mut || ControlFlow::Continue(()))
}

fn finish(writer: &ShardWriter) -> Vec<FileMetadata> {
    writer.finish(TIMEOUT).unwrap().expect("a minute is enough")
}

/// Bytes that differ from page to page and from file to file.
fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|i| (i ^ ((i >> 8) * 7) ^ ((i >> 16) * 13) ^ (seed * 31)) as u8).collect()
}

fn assert_file(folder: &Path, metadata: &FileMetadata, expected: &[u8]) {
    let found = fs::read(folder.join(&metadata.name)).unwrap();
    assert!(found == expected, "{} holds other bytes", metadata.name);
    assert_eq!(metadata.size, expected.len() as u64);
    let sum = metadata.checksum.expect("a checksum was asked for").to_string();
    assert_eq!(sum, format!("crc64nvme:{:016x}", crc64(expected)));
}

#[test]
fn files_of_all_sizes_equal_their_image() {
    for folder in [tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap()] {
        let sizes = [0, 1, 4095, 4096, 4097, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1, 21 * MIB + 5];
        let names: Vec<_> = sizes.iter().map(|size| format!("of/{size}/bytes")).collect();
        let files: Vec<_> = names.iter().map(String::as_str).zip(sizes.map(|size| size as u64)).collect();
        let writer = writer(folder.path(), &files).unwrap();
        for (seed, (name, size)) in files.iter().enumerate() {
            let bytes = pattern(*size as usize, seed);
            writer.write(name, 0, &image(&bytes), 0, bytes.len()).unwrap();
        }
        let metadata = finish(&writer);
        assert_eq!(metadata.iter().map(|metadata| metadata.name.as_str()).collect::<Vec<_>>(), names);
        for (seed, (metadata, size)) in metadata.iter().zip(sizes).enumerate() {
            assert_file(folder.path(), metadata, &pattern(size, seed));
        }
        let total: u64 = files.iter().map(|(_, size)| size).sum();
        assert_eq!(writer.progress(), (total, total));
    }
}

#[test]
fn more_files_than_descriptors_can_be_written() {
    let folder = tempfile::tempdir().unwrap();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    rustix::process::setrlimit(
        rustix::process::Resource::Nofile,
        rustix::process::Rlimit { current: Some(256), maximum: limit.maximum },
    )
    .unwrap();
    let names: Vec<_> = (0..600).map(|number| number.to_string()).collect();
    let files: Vec<_> = names.iter().map(|name| (name.as_str(), 5000)).collect();
    let writer = writer(folder.path(), &files).unwrap();
    let bytes = pattern(5000 * files.len(), 3);
    let image = image(&bytes);
    for (number, name) in names.iter().enumerate() {
        writer.write(name, 0, &image, 5000 * number, 5000).unwrap();
    }
    for (metadata, bytes) in finish(&writer).iter().zip(bytes.chunks(5000)) {
        assert_file(folder.path(), metadata, bytes);
    }
}

#[test]
fn checksums_can_be_turned_off() {
    let folder = tempfile::tempdir().unwrap();
    let files = [("a", 5)];
    let writer = ShardWriter::create(folder.path(), &files, false, &mut || ControlFlow::Continue(())).unwrap();
    writer.write("a", 0, &image(b"bytes"), 0, 5).unwrap();
    assert_eq!(finish(&writer), [FileMetadata { name: "a".to_owned(), size: 5, checksum: None }]);
    assert_eq!(fs::read(folder.path().join("a")).unwrap(), b"bytes");
}

/// One range of one file, and where it lies in its image.
#[derive(Debug, Clone)]
struct Part {
    offset: usize,
    length: usize,
    start: usize,
}

/// Cuts `0..size` at the given places, and deals the parts out in an order, each at a place of its own in its image.
fn parts(size: usize, cuts: &[prop::sample::Index], order: &[prop::sample::Index], lead: &[usize]) -> Vec<Part> {
    let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(size + 1)).collect();
    cuts.extend([0, size]);
    cuts.sort_unstable();
    let mut parts: Vec<_> = cuts
        .windows(2)
        .zip(lead.iter().cycle())
        .map(|(cut, &lead)| Part { offset: cut[0], length: cut[1] - cut[0], start: lead })
        .collect();
    let count = parts.len();
    for (number, index) in order.iter().enumerate() {
        parts.swap(number % count, index.index(count));
    }
    parts
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_parts_in_any_order_give_the_bytes_and_the_checksum(
        size in prop_oneof![0usize..20_000, 100_000usize..9 * MIB, 8 * MIB - 3..8 * MIB + 4],
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..7),
        order in prop::collection::vec(any::<prop::sample::Index>(), 0..7),
        // Where a part lies in its image: as in the file, at a page, or anywhere.
        lead in prop::collection::vec(prop_oneof![Just(usize::MAX), Just(0), Just(4096), 0usize..9000], 1..4),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let bytes = pattern(size, cuts.len());
        let files = [("file", size as u64)];
        let writer = writer(folder.path(), &files).unwrap();
        for part in parts(size, &cuts, &order, &lead) {
            let start = if part.start == usize::MAX { part.offset } else { part.start };
            let mut staged = vec![0xee; start];
            staged.extend_from_slice(&bytes[part.offset..part.offset + part.length]);
            writer.write("file", part.offset as u64, &image(&staged), start, part.length).unwrap();
        }
        let metadata = finish(&writer);
        prop_assert_eq!(metadata.len(), 1);
        assert_file(folder.path(), &metadata[0], &bytes);
    }
}

#[test]
fn modes_are_those_that_the_umask_leaves() {
    let folder = tempfile::tempdir().unwrap();
    let plain = folder.path().join("plain");
    fs::create_dir(&plain).unwrap();
    fs::write(plain.join("file"), b"").unwrap();
    let writer = writer(folder.path(), &[("made/file", 1)]).unwrap();
    writer.write("made/file", 0, &image(b"x"), 0, 1).unwrap();
    finish(&writer);
    let mode = |name: &str| fs::metadata(folder.path().join(name)).unwrap().permissions().mode();
    assert_eq!(mode("made/file"), mode("plain/file"));
    assert_eq!(mode("made"), mode("plain"));
}

#[test]
fn room_is_reserved_before_the_first_byte() {
    let folder = tempfile::tempdir().unwrap();
    let writer = writer(folder.path(), &[("a", 3 << 20), ("b", 5000)]).unwrap();
    for (name, size) in [("a", 3 << 20), ("b", 5000)] {
        let status = fs::metadata(folder.path().join(name)).unwrap();
        assert_eq!(status.len(), size);
        assert!(status.blocks() * 512 >= size, "{name} has {} blocks", status.blocks());
    }
    assert_eq!(writer.progress(), (0, (3 << 20) + 5000));
}

#[test]
fn a_full_disk_is_found_before_the_first_byte() {
    let Some(mount) = Mount::new("tmpfs", "size=4m") else {
        return;
    };
    let error = writer(&mount.path, &[("small", 4096), ("large", 5 << 20)]).err().expect("5 MiB do not fit");
    assert_eq!(error.raw_os_error(), Some(ENOSPC));
    assert_eq!(error.path(), mount.path.join("large"));
    assert!(fs::read(mount.path.join("small")).unwrap().iter().all(|&byte| byte == 0));
}

#[test]
fn a_file_system_without_direct_io_and_preallocation_works() {
    let Some(mount) = Mount::new("ramfs", "rw") else {
        return;
    };
    let bytes = pattern(30 * MIB + 77, 9);
    let writer = writer(&mount.path, &[("file", bytes.len() as u64), ("none", 0)]).unwrap();
    writer.write("file", 0, &image(&bytes), 0, bytes.len()).unwrap();
    let metadata = finish(&writer);
    assert_file(&mount.path, &metadata[0], &bytes);
    assert_file(&mount.path, &metadata[1], &[]);
}

#[test]
fn invalid_writes_are_refused_and_harm_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = pattern(10_000, 1);
    let image = image(&bytes);
    let writer = writer(folder.path(), &[("file", 10_000)]).unwrap();
    let refused = |name: &str, offset, start, length| {
        let error = writer.write(name, offset, &image, start, length).unwrap_err();
        assert!(matches!(error, CommitError::InvalidWrite { .. }), "{error}");
        assert!(error.path().starts_with(folder.path()) && error.path().ends_with(name), "{error}");
    };
    refused("other", 0, 0, 1);
    refused("file", 0, 9_999, 2);
    refused("file", 0, usize::MAX, 2);
    refused("file", 9_999, 0, 2);
    refused("file", u64::MAX, 0, 2);
    writer.write("file", 2000, &image, 2000, 3000).unwrap();
    refused("file", 1000, 1000, 1001);
    refused("file", 4999, 4999, 1);
    refused("file", 2000, 2000, 3000);
    refused("file", 0, 0, 10_000);
    // Nothing is no overlap, wherever it lies.
    writer.write("file", 3000, &image, 0, 0).unwrap();
    let gap = writer.finish(TIMEOUT).unwrap_err();
    assert!(gap.to_string().contains("its bytes from 0 on were not submitted"), "{gap}");
    writer.write("file", 0, &image, 0, 2000).unwrap();
    let gap = writer.finish(TIMEOUT).unwrap_err();
    assert!(gap.to_string().contains("its bytes from 5000 on were not submitted"), "{gap}");
    writer.write("file", 5000, &image, 5000, 5000).unwrap();
    let metadata = finish(&writer);
    assert_file(folder.path(), &metadata[0], &bytes);
    refused("file", 0, 0, 1);
    // Asked again it says the same.
    assert_eq!(finish(&writer), metadata);
}

#[test]
fn invalid_files_are_refused_before_anything_is_created() {
    let folder = tempfile::tempdir().unwrap();
    for names in
        [&["../a"][..], &["/a"], &["a/../b"], &[""], &["a", "a"], &["a", "a/b"], &["tundish.json"], &["ok", "a\0"]]
    {
        let files: Vec<_> = names.iter().map(|name| (*name, 1)).collect();
        let error = writer(folder.path(), &files).err().expect("a name that cannot be");
        assert!(matches!(error, CommitError::InvalidWrite { .. }), "{names:?}: {error}");
    }
    for files in [&[("a", u64::MAX)][..], &[("a", 1 << 62), ("b", 1 << 62)], &[("a", u64::MAX), ("b", 1)]] {
        let error = writer(folder.path(), files).err().expect("a size that cannot be");
        assert!(matches!(error, CommitError::InvalidWrite { .. }), "{error}");
    }
    assert!(fs::read_dir(folder.path()).unwrap().next().is_none());
    let missing = writer(&folder.path().join("missing"), &[("a", 1)]).err().expect("no folder");
    assert!(matches!(missing, CommitError::ParentMissing { .. }), "{missing}");
}

#[test]
fn a_symbolic_link_in_place_of_the_folder_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir().unwrap();
    let swapped = folder.path().join(".hf-1.incomplete");
    std::os::unix::fs::symlink(outside.path(), &swapped).unwrap();
    let shards = writer(&swapped, &[("a", 1)]).err().expect("a link");
    let sidecar = write_small_file(&swapped, "config.json", b"{}").unwrap_err();
    for error in [shards, sidecar] {
        assert!(matches!(&error, CommitError::NotADirectory { path } if *path == swapped), "{error}");
    }
    assert!(fs::read_dir(outside.path()).unwrap().next().is_none());
}

#[test]
fn existing_files_are_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), b"old").unwrap();
    std::os::unix::fs::symlink(outside.path(), folder.path().join("link")).unwrap();
    std::os::unix::fs::symlink(outside.path().join("x"), folder.path().join("dangling")).unwrap();
    for name in ["file", "dangling"] {
        let error = writer(folder.path(), &[(name, 1)]).err().expect("it exists");
        assert!(matches!(error, CommitError::FileExists { .. }), "{error}");
        assert_eq!(error.path(), folder.path().join(name));
    }
    assert!(writer(folder.path(), &[("link/file", 1)]).is_err());
    assert_eq!(fs::read(folder.path().join("file")).unwrap(), b"old");
    assert!(fs::read_dir(outside.path()).unwrap().next().is_none());
}

#[test]
fn an_interrupted_preallocation_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let mut asked = 0;
    let mut check_cancelled = || {
        asked += 1;
        if asked == 2 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let files = [("a", 1), ("b", 1), ("c", 1)];
    let error = ShardWriter::create(folder.path(), &files, true, &mut check_cancelled).err().expect("interrupted");
    assert!(matches!(error, CommitError::Interrupted { .. }), "{error}");
    assert_eq!(error.path(), folder.path().join("b"));
    assert!(!folder.path().join("c").exists());
}

/// Threads of this process that belong to a writer.
fn writing_threads() -> usize {
    let names = fs::read_dir("/proc/self/task").unwrap().filter_map(|task| {
        // A thread may end while the list is read.
        fs::read_to_string(task.unwrap().path().join("comm")).ok()
    });
    names.filter(|name| name.starts_with("tundish-write")).count()
}

#[test]
fn nothing_is_held_after_an_abort_or_a_drop() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(&pattern(64 * MIB, 0));
    for (number, abort) in [true, false].into_iter().enumerate() {
        let name = number.to_string();
        let writer = writer(folder.path(), &[(&name, 64 << 20)]).unwrap();
        writer.write(&name, 0, &image, 0, 64 * MIB).unwrap();
        if abort {
            writer.abort();
            assert_eq!(Arc::strong_count(&image), 1);
            let error = writer.finish(TIMEOUT).unwrap_err();
            assert!(error.to_string().contains("aborted"), "{error}");
            assert!(writer.write(&name, 0, &image, 0, 1).is_err());
        } else {
            drop(writer);
        }
        assert_eq!(Arc::strong_count(&image), 1);
    }
    // Other tests of this process may be writing.
    if std::env::var_os("NEXTEST").is_some() {
        // A thread that was joined is listed until the kernel has put it away.
        let begin = Instant::now();
        while writing_threads() > 0 {
            assert!(begin.elapsed() < TIMEOUT, "a thread goes on");
            thread::yield_now();
        }
    }
}

#[test]
fn finish_respects_its_timeout() {
    let folder = tempfile::tempdir().unwrap();
    let image = image(&pattern(200 * MIB, 0));
    let writer = writer(folder.path(), &[("file", 200 << 20)]).unwrap();
    writer.write("file", 0, &image, 0, 200 * MIB).unwrap();
    assert!(writer.finish(Duration::ZERO).unwrap().is_none());
    assert!(writer.write("file", 0, &image, 0, 1).is_err());
    assert_file(folder.path(), &finish(&writer)[0], &pattern(200 * MIB, 0));
    assert_eq!(Arc::strong_count(&image), 1);
}

#[test]
fn a_writer_without_files_finishes_at_once() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(finish(&writer(folder.path(), &[]).unwrap()), []);
    let empty = FileImage::new(0).unwrap();
    assert_eq!(empty.size(), 0);
}

//! Bytes onto the disk, durably: the shard writer with and without checksums, beside plain writes and an fsync.
//!
//! 2.2 GB in one image, 2000 × 64 KB in one image, and 200 files of 64 KB. The files lie in cargo's target folder, so
//! what is measured is the disk that it lies on.

#![expect(clippy::disallowed_methods, reason = "what is compared with is written without this crate")]

use std::fs::File;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use tundish_commit::ShardWriter;
use tundish_commit::staging::FileImage;

const PARENT: &str = env!("CARGO_TARGET_TMPDIR");

/// Bytes that no disk can compress.
fn image(size: usize) -> Arc<FileImage> {
    let image = FileImage::new(size).expect("memory for an image");
    // SAFETY: the image is new and nobody else has it.
    let bytes = unsafe { std::slice::from_raw_parts_mut(image.as_ptr(), size) };
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for chunk in bytes.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
    Arc::new(image)
}

/// Files one after the other in the image, as a shard writer writes them.
fn save(folder: &Path, image: &Arc<FileImage>, names: &[String], checksum: bool) {
    let size = image.size() / names.len();
    let files: Vec<_> = names.iter().map(|name| (name.as_str(), size as u64)).collect();
    let writer = ShardWriter::create(folder, &files, checksum, &mut || ControlFlow::Continue(())).expect("a writer");
    for (number, name) in names.iter().enumerate() {
        writer.write(name, 0, image, number * size, size).expect("a file to write to");
    }
    assert!(writer.finish(Duration::from_secs(600)).expect("a disk that works").is_some());
}

/// The same with the calls that everybody knows.
fn save_plainly(folder: &Path, image: &Arc<FileImage>, names: &[String]) {
    let size = image.size() / names.len();
    for (number, name) in names.iter().enumerate() {
        // SAFETY: within the image, which nobody changes.
        let bytes = unsafe { std::slice::from_raw_parts(image.as_ptr().add(number * size), size) };
        let mut file = File::create(folder.join(name)).expect("a file");
        file.write_all(bytes).expect("room on the disk");
        file.sync_all().expect("a disk that works");
    }
    File::open(folder).and_then(|folder| folder.sync_all()).expect("a disk that works");
}

fn bench(criterion: &mut Criterion, title: &str, size: usize, files: usize) {
    let names: Vec<_> = (0..files).map(|number| number.to_string()).collect();
    let image = image(size);
    let mut group = criterion.benchmark_group(title);
    group.sample_size(10).sampling_mode(SamplingMode::Flat).throughput(Throughput::Bytes(size as u64));
    group.warm_up_time(Duration::from_millis(1)).measurement_time(Duration::from_millis(1));
    let mut add = |name: &str, save: &dyn Fn(&Path)| {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|rounds| {
                let mut spent = Duration::ZERO;
                for _ in 0..rounds {
                    let folder = tempfile::tempdir_in(PARENT).expect("a folder");
                    rustix::fs::sync();
                    let start = Instant::now();
                    save(folder.path());
                    spent += start.elapsed();
                }
                spent
            });
        });
    };
    add("with checksums", &|folder| save(folder, &image, &names, true));
    add("without checksums", &|folder| save(folder, &image, &names, false));
    add("write and fsync", &|folder| save_plainly(folder, &image, &names));
    group.finish();
}

fn shard_writer(criterion: &mut Criterion) {
    bench(criterion, "2.2 GB in one file", 2_200_000_000, 1);
    bench(criterion, "2000 tensors of 64 KB in one file", 2000 << 16, 1);
    bench(criterion, "200 files of 64 KB", 200 << 16, 200);
}

criterion_group!(benches, shard_writer);
criterion_main!(benches);

//! Segments: made, filled, and taken from the arena again, beside copies into plain pages, fresh and used before.

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use tundish_shm::Segment;
use tundish_shm::arena::{Arena, ArenaPurpose};

const SIZES: [(&str, usize); 3] = [("400 KiB", 400 << 10), ("16 MiB", 16 << 20), ("256 MiB", 256 << 20)];

/// Fresh shared pages.
struct Pages(*mut u8, usize);

impl Pages {
    fn new(len: usize) -> Self {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place that the kernel chooses.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::SHARED) };
        Pages(start.expect("memory").cast(), len)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and not used any more.
        unsafe { munmap(self.0.cast(), self.1) }.expect("a mapping");
    }
}

fn fill(target: *mut u8, source: &[u8]) {
    // SAFETY: every target here has room for as many bytes and no other user.
    unsafe { target.copy_from_nonoverlapping(source.as_ptr(), source.len()) };
}

fn take(arena: &Arena, len: usize) -> Segment {
    arena.take(len, &mut || Ok(())).expect("memory for a segment")
}

/// The time of `work`, without the drop of its result.
fn timed<T>(rounds: u64, mut work: impl FnMut() -> T, mut end: impl FnMut(T)) -> Duration {
    (0..rounds)
        .map(|_| {
            let begin = Instant::now();
            let made = work();
            let spent = begin.elapsed();
            end(made);
            spent
        })
        .sum()
}

fn segments(criterion: &mut Criterion) {
    for (purpose, said) in [(ArenaPurpose::Arrays, "arrays"), (ArenaPurpose::Messages, "messages")] {
        let mut group = criterion.benchmark_group(format!("segments of {said}"));
        group.sample_size(10).sampling_mode(SamplingMode::Flat);
        group.warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
        for (name, len) in SIZES {
            group.throughput(Throughput::Bytes(len as u64));
            let source = vec![7u8; len];
            let mut add = |what: &str, run: &mut dyn FnMut(u64) -> Duration| {
                group.bench_function(BenchmarkId::new(what, name), |bencher| bencher.iter_custom(&mut *run));
            };
            // It keeps nothing, so that each segment is a fresh one.
            let fresh = Arena::new(purpose, 0);
            add("make", &mut |rounds| timed(rounds, || take(&fresh, len), |segment| fresh.give_back(segment)));
            add("make and fill", &mut |rounds| {
                let work = || {
                    let segment = take(&fresh, len);
                    fill(segment.data(), &source);
                    segment
                };
                timed(rounds, work, |segment| fresh.give_back(segment))
            });
            let keeping = Arena::new(purpose, usize::MAX);
            let publish = || {
                let mut segment = take(&keeping, len);
                fill(segment.data(), &source);
                segment.publish(len, &[]).expect("a seal");
                keeping.give_back(segment);
            };
            add("take, fill, publish, give back", &mut |rounds| timed(rounds, publish, drop));
            assert_eq!(keeping.stats().in_use_bytes, 0);
        }
        group.finish();
    }
}

fn copies(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("copies into shared pages");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    group.warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    for (name, len) in SIZES {
        group.throughput(Throughput::Bytes(len as u64));
        let source = vec![7u8; len];
        group.bench_function(BenchmarkId::new("fresh", name), |bencher| {
            bencher.iter_custom(|rounds| {
                let work = || {
                    let pages = Pages::new(len);
                    fill(pages.0, &source);
                    pages
                };
                timed(rounds, work, drop)
            });
        });
        let used = Pages::new(len);
        fill(used.0, &source);
        group.bench_function(BenchmarkId::new("used before", name), |bencher| {
            bencher.iter(|| fill(used.0, &source));
        });
    }
    group.finish();
}

criterion_group!(benches, segments, copies);
criterion_main!(benches);

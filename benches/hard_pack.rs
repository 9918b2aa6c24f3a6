//! Hard packing in the core: nanoseconds a sample, order given and checked, in memory and published.

use criterion::{BatchSize, BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use tundish_packing::ordered_samples::SampleOrder;
use tundish_packing::{Integers, NoProgress, PackRequest, Packer};

mod distributions;
use distributions::{Lengths, permutation};

const MAX_LENGTH: u64 = 4096;

fn hard_pack(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("hard_pack");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    for samples in [100_000usize, 1_000_000, 10_000_000] {
        group.throughput(Throughput::Elements(samples as u64));
        let order = permutation(samples);
        for distribution in [Lengths::Text, Lengths::Chat] {
            let lengths = distribution.draw(samples);
            for threads in [1u64, 2] {
                let request = || PackRequest {
                    order: SampleOrder::Given(Integers::from(&order[..])),
                    threads: Some(threads),
                    ..PackRequest::new(vec![Integers::from(&lengths[..])], MAX_LENGTH)
                };
                let name = format!("{distribution:?}/{threads} threads");
                group.bench_function(BenchmarkId::new(name, samples), |bencher| {
                    bencher.iter(|| {
                        let packer = Packer::new(request(), &mut NoProgress).expect("good lengths");
                        packer.pack(&mut NoProgress).expect("a good order")
                    });
                });
            }
        }
    }
    group.finish();
}

fn published(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("hard_pack_published");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    let samples = 10_000_000usize;
    group.throughput(Throughput::Elements(samples as u64));
    let (lengths, order) = (Lengths::Text.draw(samples), permutation(samples));
    let request = || PackRequest {
        order: SampleOrder::Given(Integers::from(&order[..])),
        threads: Some(1),
        ..PackRequest::new(vec![Integers::from(&lengths[..])], MAX_LENGTH)
    };
    group.bench_function(BenchmarkId::new("Text/1 thread", samples), |bencher| {
        bencher.iter_batched(
            // Beside the build folder, which is on a real disk; the system's temporary folder may not be.
            || tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a folder for a plan"),
            |folder| {
                let target = folder.path().join("plan");
                let packer = Packer::new(request(), &mut NoProgress).expect("good lengths");
                packer.write(&target, &mut NoProgress).expect("a disk with room");
                tundish_packing::folder::open(&target, &mut NoProgress).expect("a whole plan");
                // The plan goes with it, once the clock stands.
                folder
            },
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

criterion_group!(benches, hard_pack, published);
criterion_main!(benches);

//! The shuffle, bit-equal to numpy's RandomState: nanoseconds a sample.

use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use tundish_packing::NoProgress;
use tundish_packing::shuffle::RandomState;

fn shuffle(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("shuffle");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    for samples in [100_000usize, 1_000_000, 10_000_000] {
        group.throughput(Throughput::Elements(samples as u64));
        group.bench_function(BenchmarkId::from_parameter(samples), |bencher| {
            bencher.iter(|| -> Vec<i32> {
                RandomState::new(0).shuffled(samples, &mut NoProgress).expect("memory for an order")
            });
        });
    }
    group.finish();
}

criterion_group!(benches, shuffle);
criterion_main!(benches);

//! Balanced parts and micro-batches of the samples of one step: nanoseconds a sample.

use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use tundish_packing::balance::{Cost, balanced_parts, micro_batches};
use tundish_packing::shuffle::RandomState;
use tundish_packing::{Integers, NoProgress};

const MAX_TOKENS: u64 = 32_768;

/// Lengths from 1 to a quarter of `MAX_TOKENS`, in a random order.
fn lengths(samples: usize) -> Vec<i32> {
    let mut lengths: Vec<i32> = RandomState::new(0).shuffled(samples, &mut NoProgress).expect("memory for the lengths");
    lengths.iter_mut().for_each(|length| *length = *length % (MAX_TOKENS as i32 / 4) + 1);
    lengths
}

fn balance(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("balance");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    for samples in [1_000usize, 10_000, 100_000] {
        let lengths = lengths(samples);
        let lengths = Integers::from(&lengths[..]);
        group.throughput(Throughput::Elements(samples as u64));
        for parts in [8usize, 64] {
            for equal_counts in [false, true] {
                // One count needs a multiple of the parts.
                if equal_counts && !samples.is_multiple_of(parts) {
                    continue;
                }
                let name = if equal_counts { "equal counts" } else { "tokens" };
                group.bench_function(BenchmarkId::new(format!("{name}, {parts} parts"), samples), |bencher| {
                    bencher.iter(|| {
                        balanced_parts(lengths, parts, Cost::Tokens, equal_counts, &mut NoProgress)
                            .expect("balanced parts")
                    });
                });
            }
        }
        group.bench_function(BenchmarkId::new("micro-batches", samples), |bencher| {
            bencher.iter(|| micro_batches(lengths, MAX_TOKENS, None, &mut NoProgress).expect("micro-batches"));
        });
    }
    group.finish();
}

criterion_group!(benches, balance);
criterion_main!(benches);

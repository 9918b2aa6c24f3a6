//! Packing whole samples in the core: nanoseconds a sample, all arrays in memory. Samples are no longer than a pack.

use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use tundish_packing::ordered_samples::SampleOrder;
use tundish_packing::{Integers, Mode, NoProgress, PackRequest, Packer, Plan};

mod distributions;
use distributions::{Lengths, permutation};

const MAX_LENGTH: u64 = 4096;

fn lengths(distribution: Lengths, samples: usize) -> Vec<i64> {
    distribution.draw(samples).into_iter().map(|length| length.min(MAX_LENGTH as i64)).collect()
}

fn pack(lengths: &[i64], order: SampleOrder<'_>, mode: Mode, threads: u64) -> Plan {
    let request = PackRequest {
        mode,
        order,
        threads: Some(threads),
        ..PackRequest::new(vec![Integers::from(lengths)], MAX_LENGTH)
    };
    Packer::new(request, &mut NoProgress).and_then(|packer| packer.pack(&mut NoProgress)).expect("a plan")
}

/// Best-fit decreasing; samples of one length are shuffled.
fn best_fit(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("best_fit");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    for samples in [100_000usize, 1_000_000, 10_000_000] {
        group.throughput(Throughput::Elements(samples as u64));
        for distribution in [Lengths::Text, Lengths::Chat] {
            let lengths = lengths(distribution, samples);
            for threads in [1u64, 2] {
                let name = format!("{distribution:?}/{threads} threads");
                group.bench_function(BenchmarkId::new(name, samples), |bencher| {
                    bencher.iter(|| pack(&lengths, SampleOrder::Seed(0), Mode::BestFit, threads));
                });
            }
        }
    }
    group.finish();
}

/// The modes that keep the order, which is given and checked, as in the bench of hard packing.
fn ordered(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("ordered");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    for samples in [1_000_000usize, 10_000_000] {
        group.throughput(Throughput::Elements(samples as u64));
        let order = permutation(samples);
        for distribution in [Lengths::Text, Lengths::Chat] {
            let lengths = lengths(distribution, samples);
            for mode in [Mode::Ordered, Mode::Sequential] {
                let order = SampleOrder::Given(Integers::from(&order[..]));
                let plan = pack(&lengths, order, mode, 1);
                let fill = plan.metadata.counts.tokens as f64 / (plan.metadata.counts.packs * MAX_LENGTH) as f64;
                println!("{distribution:?}, {mode:?}, {samples} samples: {:.2} % full", 100.0 * fill);
                let name = format!("{}/{distribution:?}", mode.name());
                group.bench_function(BenchmarkId::new(name, samples), |bencher| {
                    bencher.iter(|| pack(&lengths, order, mode, 1));
                });
            }
        }
    }
    group.finish();
}

criterion_group!(benches, best_fit, ordered);
criterion_main!(benches);

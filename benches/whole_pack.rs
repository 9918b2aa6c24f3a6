//! Packing whole samples in the core: nanoseconds a sample, all arrays in memory. Samples are no longer than a pack.

use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use tundish_packing::inputs::SampleOrder;
use tundish_packing::{Integers, Mode, NoProgress, Overlong, PackRequest, Packer, Placement, Plan, WholeOptions};

mod distributions;
use distributions::{Lengths, permutation};

const MAX_LENGTH: u64 = 4096;

fn lengths(distribution: Lengths, samples: usize) -> Vec<i64> {
    distribution.draw(samples).into_iter().map(|length| length.min(MAX_LENGTH as i64)).collect()
}

fn pack(lengths: &[i64], order: SampleOrder<'_>, placement: Placement, threads: usize) -> Plan {
    let options = WholeOptions { placement, overlong: Overlong::Error, max_samples: None, align: 1 };
    let request = PackRequest {
        lengths: vec![Integers::from(lengths)],
        order,
        max_length: MAX_LENGTH,
        mode: Mode::Whole(options).into(),
        costs: None,
        multiple: None,
        global_pack: false,
        threads,
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
            for threads in [1usize, 2] {
                let name = format!("{distribution:?}/{threads} threads");
                group.bench_function(BenchmarkId::new(name, samples), |bencher| {
                    bencher.iter(|| pack(&lengths, SampleOrder::Seed(0), Placement::BestFit, threads));
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
            for placement in [Placement::Ordered { window: 64 }, Placement::Sequential] {
                let order = SampleOrder::Given(Integers::from(&order[..]));
                let plan = pack(&lengths, order, placement, 1);
                let fill = plan.metadata.tokens as f64 / (plan.metadata.packs * MAX_LENGTH) as f64;
                println!("{distribution:?}, {placement:?}, {samples} samples: {:.2} % full", 100.0 * fill);
                let name = format!("{}/{distribution:?}", plan.metadata.mode);
                group.bench_function(BenchmarkId::new(name, samples), |bencher| {
                    bencher.iter(|| pack(&lengths, order, placement, 1));
                });
            }
        }
    }
    group.finish();
}

criterion_group!(benches, best_fit, ordered);
criterion_main!(benches);

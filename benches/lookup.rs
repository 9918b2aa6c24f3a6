//! Look-ups in batches of 1024 random packs: nanoseconds a pack.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use tundish_packing::ordered_samples::SampleOrder;
use tundish_packing::plan::lookup;
use tundish_packing::shuffle::RandomState;
use tundish_packing::{Integers, NoProgress, PackRequest, Packer};

#[allow(dead_code)]
mod distributions;
use distributions::Lengths;

fn look_up(criterion: &mut Criterion) {
    let lengths = Lengths::Text.draw(1_000_000);
    let request = PackRequest {
        order: SampleOrder::Seed(0),
        threads: Some(1),
        ..PackRequest::new(vec![Integers::from(&lengths[..])], 4096)
    };
    let plan = Packer::new(request, &mut NoProgress).and_then(|packer| packer.pack(&mut NoProgress)).expect("a plan");
    let packs = RandomState::new(3)
        .shuffled::<i64>(plan.metadata.counts.packs as usize, &mut NoProgress)
        .expect("memory for an order");
    let mut batches = packs.chunks_exact(1024).cycle();
    let mut group = criterion.benchmark_group("lookup");
    group.throughput(Throughput::Elements(1024));
    group.bench_function("1024 packs", |bencher| {
        bencher.iter(|| {
            let batch = batches.next().expect("endless");
            lookup::<Integers<'_>>(&plan.view(), &Integers::from(batch), None, &mut NoProgress)
                .expect("packs that exist")
        });
    });
    group.finish();
}

criterion_group!(benches, look_up);
criterion_main!(benches);

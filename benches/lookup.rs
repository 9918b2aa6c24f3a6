//! Look-ups in batches of 1024 random packs: nanoseconds a pack.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use tundish_packing::hard::{OrderSource, Prepared, Request};
use tundish_packing::lookup::lookup;
use tundish_packing::shuffle::RandomState;
use tundish_packing::{Integers, Silent};

#[allow(dead_code)]
mod distributions;
use distributions::Lengths;

fn look_up(criterion: &mut Criterion) {
    let lengths = Lengths::Text.draw(1_000_000);
    let request = Request {
        lengths: vec![Integers::from(&lengths[..])],
        order: OrderSource::Seed(0),
        max_length: 4096,
        drop_last: true,
        global_pack: false,
        threads: 1,
    };
    let plan = Prepared::new(request, &mut Silent).and_then(|prepared| prepared.pack(&mut Silent)).expect("a plan");
    let packs =
        RandomState::new(3).shuffled::<i64>(plan.facts.packs as usize, &mut Silent).expect("memory for an order");
    let mut batches = packs.chunks_exact(1024).cycle();
    let mut group = criterion.benchmark_group("lookup");
    group.throughput(Throughput::Elements(1024));
    group.bench_function("1024 packs", |bencher| {
        bencher.iter(|| {
            let batch = batches.next().expect("endless");
            lookup::<Integers<'_>>(&plan.views(), &Integers::from(batch), None, &mut Silent).expect("packs that exist")
        });
    });
    group.finish();
}

criterion_group!(benches, look_up);
criterion_main!(benches);

//! The store of one process: the time that drains cost callers and other threads, and the time of storing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use tundish_store::{
    Dtype, FetchReceiver, FetchedTensor, Limits, Selection, ShardId, ShardRows, StoreError, TensorMeta, TensorStore,
    TensorToStore, TimeLimit, Transport, Wanted,
};

const OWNER: &str = "owner";

/// So many entries are put or fetched in one call.
const CHUNK: usize = 50_000;

/// Fetches from a store in this process, as bytes or by reference.
struct LocalTransport {
    owner: Arc<TensorStore>,
    by_reference: bool,
}

impl Transport for LocalTransport {
    fn fetch(
        &self,
        _owner: &Arc<str>,
        wanted: &[ShardRows],
        receiver: &mut FetchReceiver<'_>,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(), StoreError> {
        for (index, outgoing) in self.owner.look_up(wanted)?.iter().enumerate() {
            match outgoing.reference() {
                Some(reference) if self.by_reference => {
                    receiver.attach(index, outgoing.meta(), &reference)?;
                }
                _ => {
                    receiver.space(index, outgoing.meta(), time_limit)?.copy_from_slice(outgoing.bytes());
                    receiver.complete(index)?;
                }
            }
        }
        Ok(())
    }
}

fn within_a_minute<T>(work: impl FnOnce(&mut TimeLimit<'_>) -> T) -> T {
    let mut check_cancelled = || Ok(());
    work(&mut TimeLimit::new(Instant::now() + Duration::from_secs(60), &mut check_cancelled))
}

fn store() -> Arc<TensorStore> {
    TensorStore::new(Limits { storage_bytes: 2 << 30, buffer_bytes: 2 << 30 })
}

fn meta(len: usize) -> TensorMeta {
    TensorMeta::new(Dtype::from_name("uint8").expect("a type"), [len as u64].as_slice()).expect("a shape")
}

fn put(owner: &TensorStore, tensors: &[&[u8]]) -> Vec<ShardId> {
    let sources: Vec<_> =
        tensors.iter().map(|bytes| TensorToStore::new(meta(bytes.len()), bytes).expect("bytes")).collect();
    within_a_minute(|time_limit| owner.put(&sources, time_limit)).expect("space")
}

fn fetch(consumer: &TensorStore, ids: &[ShardId], len: usize, transport: &LocalTransport) -> Vec<FetchedTensor> {
    try_fetch(consumer, ids, len, transport).expect("it is all there")
}

fn try_fetch(
    consumer: &TensorStore,
    ids: &[ShardId],
    len: usize,
    transport: &LocalTransport,
) -> Result<Vec<FetchedTensor>, StoreError> {
    let owner: Arc<str> = OWNER.into();
    let want =
        |id: &ShardId| Wanted { owner: Arc::clone(&owner), id: id.clone(), rows: Selection::All, meta: meta(len) };
    let wanted: Vec<_> = ids.iter().map(want).collect();
    within_a_minute(|time_limit| consumer.fetch(&wanted, transport, time_limit))
}

/// A consumer that has fetched so many small tensors, all of them in step `step`.
fn filled(consumer: &TensorStore, transport: &LocalTransport, step: u64, count: usize) -> Vec<ShardId> {
    consumer.begin_step(step, 0).expect("a new step");
    let mut all = Vec::with_capacity(count);
    for start in (0..count).step_by(CHUNK) {
        let ids = put(&transport.owner, &vec![&[7u8; 8][..]; CHUNK.min(count - start)]);
        for some in ids.chunks(CHUNK) {
            drop(fetch(consumer, some, 8, transport));
        }
        all.extend(ids);
    }
    transport.owner.claim(step, 0, &all).expect("a new step");
    all
}

/// The time of `drain` or, with `is_stall`, the longest that a fetcher waited meanwhile for what is in the buffer.
fn drained(consumer: &Arc<TensorStore>, transport: &LocalTransport, is_stall: bool, drain: impl FnOnce()) -> Duration {
    if !is_stall {
        let begin = Instant::now();
        drain();
        return begin.elapsed();
    }
    let kept = put(&transport.owner, &[&[1; 8]]);
    drop(fetch(consumer, &kept, 8, transport));
    consumer.keep(&kept);
    let (is_on, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let fetcher = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !is_over.load(Ordering::SeqCst) {
                let begin = Instant::now();
                // One that begins before the step ends and asks after it is told so.
                let fetched = try_fetch(consumer, &kept, 8, transport);
                assert!(matches!(fetched, Ok(_) | Err(StoreError::StepEnded { .. })));
                longest = longest.max(begin.elapsed());
                is_on.store(true, Ordering::SeqCst);
            }
            longest
        });
        while !is_on.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        drain();
        is_over.store(true, Ordering::SeqCst);
        fetcher.join().expect("a fetcher")
    })
}

fn drains(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("drain");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    group.warm_up_time(Duration::from_millis(1)).measurement_time(Duration::from_millis(1));
    let transport = LocalTransport { owner: store(), by_reference: false };
    let consumer = store();
    let mut step = 0;
    for (what, is_stall) in [("call", false), ("longest stall of a fetcher", true)] {
        for (by, count, is_by_step) in [("10^6 by their step", 1_000_000, true), ("10^5 by ids", 100_000, false)] {
            group.bench_function(BenchmarkId::new(what, by), |bencher| {
                bencher.iter_custom(|rounds| {
                    let one = |_| {
                        step += 1;
                        let ids = filled(&consumer, &transport, step, count);
                        let time = drained(&consumer, &transport, is_stall, || {
                            if is_by_step {
                                consumer.end_step(step);
                            } else {
                                consumer.clear_buffer(Some(&ids));
                            }
                        });
                        consumer.end_step(step);
                        transport.owner.end_step(step);
                        time
                    };
                    (0..rounds).map(one).sum()
                });
            });
        }
    }
}

const SIZES: [(&str, usize, usize); 2] = [("256 of 64 KiB", 256, 64 << 10), ("1 of 256 MiB", 1, 256 << 20)];

fn stores(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("store");
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    group.warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    for (name, count, len) in SIZES {
        group.throughput(Throughput::Bytes((count * len) as u64));
        let bytes = vec![7u8; len];
        let tensors = vec![&bytes[..]; count];
        let owner = store();
        group.bench_function(BenchmarkId::new("put into used memory", name), |bencher| {
            bencher.iter_custom(|rounds| {
                let one = |_| {
                    let begin = Instant::now();
                    let ids = put(&owner, &tensors);
                    let time = begin.elapsed();
                    owner.remove(&ids);
                    time
                };
                (0..rounds).map(one).sum()
            });
        });
        let mut copy = vec![0u8; count * len];
        group.bench_function(BenchmarkId::new("copy into used memory", name), |bencher| {
            bencher.iter(|| copy.chunks_exact_mut(len).for_each(|target| target.copy_from_slice(&bytes)));
        });
        drop(copy);
        for (way, by_reference) in [("copied", false), ("by reference", true)] {
            let transport = LocalTransport { owner: Arc::clone(&owner), by_reference };
            let consumer = store();
            let ids = put(&owner, &tensors);
            group.bench_function(BenchmarkId::new(format!("fetch and read all, {way}"), name), |bencher| {
                bencher.iter_custom(|rounds| {
                    let one = |_| {
                        let begin = Instant::now();
                        let views = fetch(&consumer, &ids, len, &transport);
                        let read = |view: &FetchedTensor| {
                            view.bytes().iter().step_by(64).map(|byte| u64::from(*byte)).sum::<u64>()
                        };
                        assert_eq!(views.iter().map(read).sum::<u64>(), (count * len / 64 * 7) as u64);
                        let time = begin.elapsed();
                        drop(views);
                        consumer.clear_buffer(None);
                        time
                    };
                    (0..rounds).map(one).sum()
                });
            });
            owner.remove(&ids);
        }
    }
}

criterion_group!(benches, drains, stores);
criterion_main!(benches);

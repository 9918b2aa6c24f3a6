//! Drains of many entries: how long other threads wait.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{LIMITS, LocalTransport, OWNER, SendAs, bytes_meta, fetch, whole, within};
use tundish_store::{ShardId, StoreError, TensorStore, TensorToStore};

const MANY: usize = 100_000;
const CHUNK: usize = 50_000;

fn fill(owner: &TensorStore, count: usize) -> Vec<ShardId> {
    let bytes = [7u8; 8];
    let mut ids = Vec::with_capacity(count);
    for start in (0..count).step_by(CHUNK) {
        let some = CHUNK.min(count - start);
        let sources: Vec<_> = (0..some).map(|_| TensorToStore::new(bytes_meta(8), &bytes).unwrap()).collect();
        ids.extend(within(10.0, |time_limit| owner.put(&sources, time_limit)).unwrap());
    }
    ids
}

fn fetch_all(consumer: &TensorStore, ids: &[ShardId], transport: &LocalTransport) {
    for some in ids.chunks(CHUNK) {
        let wanted: Vec<_> = some.iter().map(|id| whole(OWNER, id, 8)).collect();
        drop(fetch(consumer, &wanted, transport).unwrap());
    }
}

/// How long `work` took, and the longest that one who takes what is in the buffer waited meanwhile.
fn longest_wait(
    consumer: &TensorStore,
    transport: &LocalTransport,
    id: &ShardId,
    work: impl FnOnce(),
) -> (Duration, Duration) {
    let (is_on, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let fetcher = scope.spawn(|| {
            let wanted = [whole(OWNER, id, 8)];
            let mut longest = Duration::ZERO;
            while !is_over.load(Ordering::SeqCst) {
                let begin = Instant::now();
                // One that begins before the step ends and asks after it is told so.
                let fetched = fetch(consumer, &wanted, transport);
                assert!(matches!(fetched, Ok(_) | Err(StoreError::StepEnded { .. })));
                longest = longest.max(begin.elapsed());
                is_on.store(true, Ordering::SeqCst);
            }
            longest
        });
        while !is_on.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        let begin = Instant::now();
        work();
        let time = begin.elapsed();
        is_over.store(true, Ordering::SeqCst);
        (time, fetcher.join().unwrap())
    })
}

/// The bench of the same name has the times; here the machine may be busy, so one quiet round is enough.
#[test]
fn a_fetch_does_not_wait_for_a_drain() {
    let (owner, consumer, transport) =
        (TensorStore::new(LIMITS), TensorStore::new(LIMITS), LocalTransport::new(SendAs::Bytes));
    transport.add(OWNER, &owner);
    let kept = fill(&owner, 1);
    fetch_all(&consumer, &kept, &transport);
    consumer.keep(&kept);
    let ids = fill(&owner, MANY);
    for is_by_step in [true, false] {
        let mut rounds = (1..=8).map(|round| {
            consumer.begin_step(round + if is_by_step { 0 } else { 100 }, 0).unwrap();
            fetch_all(&consumer, &ids, &transport);
            longest_wait(&consumer, &transport, &kept[0], || {
                if is_by_step {
                    assert_eq!(consumer.end_step(round).num_entries, MANY as u64);
                } else {
                    assert_eq!(consumer.clear_buffer(Some(&ids)), MANY as u64);
                }
            })
        });
        assert!(rounds.any(|(time, longest)| longest <= time / 5), "by step {is_by_step}: it waited for most of it");
        assert_eq!(consumer.stats().buffer.num_entries, 1);
    }
}

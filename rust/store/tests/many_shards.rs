//! Drains of a million entries: how long the caller takes, and how long other threads wait.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{LIMITS, LocalTransport, OWNER, SendAs, bytes_meta, fetch, whole, within};
use tundish_store::{ProcessStore, ShardId, TensorToStore};

const MANY: usize = 1_000_000;
const CHUNK: usize = 50_000;

fn fill(owner: &ProcessStore, count: usize) -> Vec<ShardId> {
    let bytes = [7u8; 8];
    let mut ids = Vec::with_capacity(count);
    for start in (0..count).step_by(CHUNK) {
        let some = CHUNK.min(count - start);
        let sources: Vec<_> = (0..some).map(|_| TensorToStore::new(bytes_meta(8), &bytes).unwrap()).collect();
        ids.extend(within(10.0, |time_limit| owner.put(&sources, time_limit)).unwrap());
    }
    ids
}

fn fetch_all(consumer: &ProcessStore, ids: &[ShardId], transport: &LocalTransport) {
    for some in ids.chunks(CHUNK) {
        let wanted: Vec<_> = some.iter().map(|id| whole(OWNER, id, 8)).collect();
        drop(fetch(consumer, &wanted, transport).unwrap());
    }
}

/// The processor time of this thread: other work on the machine does not add to it.
fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn a_step_of_a_million_entries_is_dropped_in_a_millisecond() {
    let (owner, consumer, transport) =
        (ProcessStore::new(LIMITS), ProcessStore::new(LIMITS), LocalTransport::new(SendAs::Bytes));
    transport.add(OWNER, &owner);
    // The first drain starts the thread that frees memory.
    [&owner, &consumer].into_iter().for_each(|store| assert!(store.end_step(0).has_ended));
    // The call takes under a millisecond, and holds the lock for a part of it. The machine may be busy, so one quiet
    // round is enough, and no other follows it.
    let mut rounds = (1..=8).map(|step| {
        consumer.begin_step(step, 0).unwrap();
        let ids = fill(&owner, MANY);
        assert_eq!(owner.claim(step, 0, &ids).unwrap().claimed_count, MANY as u64);
        fetch_all(&consumer, &ids, &transport);
        let times = [&owner, &consumer].map(|store| {
            let begin = thread_time();
            let step_stats = store.end_step(step);
            let time = thread_time() - begin;
            assert_eq!(
                (step_stats.num_entries, step_stats.freed_bytes, step_stats.held_bytes),
                (MANY as u64, 64 * MANY as u64, 0)
            );
            assert!(time <= Duration::from_millis(1), "{time:?}");
            time
        });
        for store in [&owner, &consumer] {
            let stats = store.stats();
            assert_eq!((stats.storage.num_entries, stats.buffer.num_entries), (0, 0), "at once");
            assert!(store.wait_for_drops(Duration::from_secs(60)));
            let stats = store.stats();
            assert_eq!((stats.storage.memory.used_bytes, stats.buffer.memory.used_bytes), (0, 0), "and freed soon");
        }
        times
    });
    assert!(rounds.any(|times| times.iter().all(|time| *time <= Duration::from_micros(100))), "longer in each round");
}

/// How long `work` took, and the longest that one who takes what is in the buffer waited meanwhile.
fn longest_wait(
    consumer: &ProcessStore,
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
                drop(fetch(consumer, &wanted, transport).unwrap());
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
fn a_fetch_does_not_wait_for_the_removal_of_100_000_ids() {
    let (owner, consumer, transport) =
        (ProcessStore::new(LIMITS), ProcessStore::new(LIMITS), LocalTransport::new(SendAs::Bytes));
    transport.add(OWNER, &owner);
    let kept = fill(&owner, 1);
    fetch_all(&consumer, &kept, &transport);
    let ids = fill(&owner, 100_000);
    let mut rounds = (0..8).map(|_| {
        fetch_all(&consumer, &ids, &transport);
        longest_wait(&consumer, &transport, &kept[0], || assert_eq!(consumer.clear_buffer(Some(&ids)), 100_000))
    });
    assert!(rounds.any(|(time, longest)| longest <= time / 5), "who fetched waited for most of it");
}

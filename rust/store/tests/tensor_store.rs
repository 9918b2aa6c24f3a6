//! A store as an owner and as a consumer, called by one thread.

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{
    LIMITS, LocalTransport, OWNER, SendAs, bytes_meta, fetch, overwrite, pair, pattern, put, rows, whole, within,
};
use tundish_store::{
    Dtype, FetchReceiver, MissingShard, Selection, ShardId, ShardRows, StoreError, TensorMeta, TensorStore,
    TensorToStore, TimeLimit, Transport,
};

fn assert_nothing_is_held(store: &TensorStore) {
    let stats = store.stats();
    assert_eq!((stats.storage.num_entries, stats.storage.total_bytes), (0, 0));
    assert_eq!((stats.buffer.num_entries, stats.buffer.total_bytes), (0, 0));
    assert_eq!((stats.storage.memory.used_bytes, stats.buffer.memory.used_bytes), (0, 0), "{stats:?}");
}

/// Sizes on both sides of whatever is treated differently.
fn tensors() -> Vec<Vec<u8>> {
    let sizes = [0, 1, 63, 64, 65, 5000, 16 << 10, (256 << 10) - 4096, 256 << 10, 300_000, 3 << 20, 1];
    sizes.iter().enumerate().map(|(index, size)| pattern(index as u64, *size)).collect()
}

#[test]
fn stored_shards_are_fetched_and_then_found_in_the_buffer() {
    for send_as in [SendAs::Bytes, SendAs::SegmentRange] {
        let (owner, consumer, transport) = pair(send_as);
        let tensors = tensors();
        let ids = put(&owner, &tensors).unwrap();
        let wanted: Vec<_> = ids.iter().zip(&tensors).map(|(id, bytes)| whole(OWNER, id, bytes.len() as u64)).collect();
        for round in 0..3 {
            let views = fetch(&consumer, &wanted, &transport).unwrap();
            for (view, bytes) in views.iter().zip(&tensors) {
                assert_eq!(view.bytes(), bytes, "{send_as:?} {round}");
                assert_eq!(view.data().addr() % 64, 0);
                // The next consumer, and the owner, do not see it.
                overwrite(view, 0xaa);
            }
        }
        assert_eq!(transport.requests.load(Ordering::SeqCst), 1, "one request for all, and then none");
        let stats = consumer.stats().buffer;
        assert_eq!((stats.misses, stats.hits), (tensors.len() as u64, 2 * tensors.len() as u64));
        let taken: u64 = tensors.iter().map(|bytes| bytes.len().next_multiple_of(64) as u64).sum();
        assert_eq!((stats.num_entries, stats.total_bytes, stats.high_water_bytes), (12, taken, taken));
        assert_eq!(stats.memory.used_bytes > 0, send_as == SendAs::Bytes, "by reference no memory is taken");
        assert_eq!(owner.stats().storage.total_bytes, taken);

        assert_eq!(consumer.clear_buffer(Some(&ids)), 12);
        let removed = owner.remove(&ids);
        assert_eq!((removed.cleared_count, removed.num_tensors, removed.total_bytes), (12, 12, taken));
        assert_nothing_is_held(&consumer);
        assert_nothing_is_held(&owner);
        assert_eq!(owner.remove(&ids), Default::default());
    }
}

#[test]
fn the_owners_bytes_are_a_copy_of_their_own() {
    let (owner, consumer, transport) = pair(SendAs::SegmentRange);
    let mut bytes = vec![1u8; 100_000];
    let id = {
        let source = TensorToStore::new(bytes_meta(100_000), &bytes).unwrap();
        within(0.0, |time_limit| owner.put(&[source], time_limit)).unwrap().remove(0)
    };
    bytes.fill(2);
    let first = fetch(&consumer, &[whole(OWNER, &id, 100_000)], &transport).unwrap();
    assert!(first[0].bytes().iter().all(|byte| *byte == 1));
}

#[test]
fn views_outlive_the_drain_and_their_memory_is_not_used_again_before() {
    for send_as in [SendAs::Bytes, SendAs::SegmentRange] {
        let (owner, consumer, transport) = pair(send_as);
        let len = 1 << 20;
        consumer.begin_step(1, 0).unwrap();
        let ids = put(&owner, &[vec![7; len]]).unwrap();
        let view = fetch(&consumer, &[whole(OWNER, &ids[0], len as u64)], &transport).unwrap();
        let step_stats = consumer.end_step(1);
        assert_eq!(
            (step_stats.held_bytes, step_stats.viewed_bytes, step_stats.escaped_bytes),
            (0, len as u64, len as u64)
        );
        owner.remove(&ids);
        let holder =
            if send_as == SendAs::Bytes { consumer.stats().buffer.memory } else { owner.stats().storage.memory };
        assert!(holder.used_bytes == 0 && holder.escaped_bytes >= len as u64, "{holder:?}");
        // Were the slab used again, this would go there.
        let next = put(&owner, &[vec![8; len]]).unwrap();
        let other = fetch(&consumer, &[whole(OWNER, &next[0], len as u64)], &transport).unwrap();
        assert!(view[0].bytes().iter().all(|byte| *byte == 7));
        drop(view);
        assert_eq!(consumer.step_stats(1).unwrap().escaped_bytes, 0);
        let stats = (owner.stats().storage.memory, consumer.stats().buffer.memory);
        assert_eq!((stats.0.escaped_bytes, stats.1.escaped_bytes), (0, 0));
        assert!(stats.0.idle_bytes + stats.1.idle_bytes >= len as u64, "kept for the next use: {stats:?}");
        drop(other);
    }
}

#[test]
fn views_count_after_a_clear_and_idle_memory_is_freed() {
    let (owner, consumer, transport) = pair(SendAs::Bytes);
    let len = 1u64 << 20;
    let ids = put(&owner, &[vec![7; len as usize]]).unwrap();
    for store in [&owner, &consumer] {
        store.begin_step(1, 0).unwrap();
    }
    let view = fetch(&consumer, &[whole(OWNER, &ids[0], len)], &transport).unwrap();
    assert_eq!(consumer.clear_buffer(None), 1);
    let step_stats = consumer.step_stats(1).unwrap();
    assert_eq!((step_stats.viewed_bytes, step_stats.held_bytes, step_stats.num_entries), (len, 0, 0));
    drop(view);
    assert_eq!(consumer.end_step(1).viewed_bytes, 0);
    // Kept for the next use, until that is not to come.
    for store in [&owner, &consumer] {
        store.remove(&ids);
        let idle = || store.stats().storage.memory.idle_bytes + store.stats().buffer.memory.idle_bytes;
        assert!(idle() >= len);
        store.clear_all();
        assert_eq!(idle(), 0);
    }
}

#[test]
fn slabs_are_used_again() {
    let (owner, consumer, transport) = pair(SendAs::Bytes);
    let tensors = vec![vec![3u8; 100_000]; 40];
    let mut peak = None;
    for step in 0..5 {
        consumer.begin_step(step, 0).unwrap();
        let ids = put(&owner, &tensors).unwrap();
        owner.claim(step, 0, &ids).unwrap();
        let wanted: Vec<_> = ids.iter().map(|id| whole(OWNER, id, 100_000)).collect();
        drop(fetch(&consumer, &wanted, &transport).unwrap());
        owner.end_step(step);
        consumer.end_step(step);
        let memory = [owner.stats().storage.memory, consumer.stats().buffer.memory];
        assert_eq!(memory.map(|memory| memory.used_bytes), [0, 0]);
        let idle = memory.map(|memory| memory.idle_bytes);
        assert_eq!(*peak.get_or_insert(idle), idle, "nothing more was made in step {step}");
    }
}

#[test]
fn rows_are_fetched_alone_and_found_in_the_buffer() {
    for send_as in [SendAs::Bytes, SendAs::SegmentRange] {
        let (owner, consumer, transport) = pair(send_as);
        let dtype = Dtype::from_name("int32").unwrap();
        let meta = TensorMeta::new(dtype, [1000, 8].as_slice()).unwrap();
        let bytes = pattern(1, 32_000);
        let source = TensorToStore::new(meta.clone(), &bytes).unwrap();
        let id = within(0.0, |time_limit| owner.put(&[source], time_limit)).unwrap().remove(0);
        let want = |range: std::ops::Range<u64>| {
            let rows = Selection::range(range);
            let meta = rows.meta_of(&meta).unwrap();
            tundish_store::Wanted { owner: OWNER.into(), id: id.clone(), rows, meta }
        };
        let some = [want(10..20), want(900..1000), want(5..5)];
        let views = fetch(&consumer, &some, &transport).unwrap();
        assert_eq!(views[0].bytes(), &bytes[320..640]);
        assert_eq!(views[1].bytes(), &bytes[28_800..]);
        assert_eq!(views[2].meta().shape(), &[0, 8]);
        assert!(consumer.stats().buffer.total_bytes < 5000, "only those rows");
        // Rows of rows that are here.
        assert_eq!(fetch(&consumer, &[want(12..15)], &transport).unwrap()[0].bytes(), &bytes[384..480]);
        assert_eq!(transport.requests.load(Ordering::SeqCst), 1);
        let all =
            tundish_store::Wanted { owner: OWNER.into(), id: id.clone(), rows: Selection::All, meta: meta.clone() };
        assert_eq!(fetch(&consumer, std::slice::from_ref(&all), &transport).unwrap()[0].bytes(), bytes);
        assert_eq!(fetch(&consumer, &[want(0..1000)], &transport).unwrap()[0].bytes(), bytes);
        assert_eq!(transport.requests.load(Ordering::SeqCst), 2);
        assert_eq!(consumer.clear_buffer(Some(std::slice::from_ref(&id))), 4);
        let two = Selection::range(0..2).meta_of(&meta).unwrap();
        let beyond = tundish_store::Wanted { rows: Selection::range(999..1001), meta: two, ..all };
        assert!(matches!(fetch(&consumer, &[beyond], &transport), Err(StoreError::Invalid(_))));
    }
}

#[test]
fn duplicates_are_fetched_once() {
    let (owner, consumer, transport) = pair(SendAs::Bytes);
    let ids = put(&owner, &[vec![1; 100], vec![2; 100]]).unwrap();
    let wanted: Vec<_> = (0..100_000).map(|index| whole(OWNER, &ids[index % 2], 100)).collect();
    let views = fetch(&consumer, &wanted, &transport).unwrap();
    assert!(views.iter().enumerate().all(|(index, view)| view.bytes() == [1 + index as u8 % 2; 100]));
    assert_eq!((transport.requests.load(Ordering::SeqCst), transport.shards.load(Ordering::SeqCst)), (1, 2));
    let many: Vec<_> = (0..100_000).map(|index| ids[index % 2].clone()).collect();
    assert_eq!(consumer.clear_buffer(Some(&many)), 2);
    assert_eq!(owner.claim(1, 1, &many).unwrap().claimed_count, 2);
    assert_eq!(owner.remove(&many).cleared_count, 2);
    assert_nothing_is_held(&owner);
}

#[test]
fn a_nodes_own_shards_are_looked_up_and_buffered_nowhere() {
    let (owner, _, transport) = pair(SendAs::Bytes);
    owner.add_own_address(OWNER.into());
    let ids = put(&owner, &[vec![5; 50_000]]).unwrap();
    let wanted = [whole(OWNER, &ids[0], 50_000), rows(OWNER, &ids[0], 100..200)];
    let views = fetch(&owner, &wanted, &transport).unwrap();
    assert_eq!((views[0].bytes(), views[1].bytes()), (&[5; 50_000][..], &[5; 100][..]));
    overwrite(&views[0], 6);
    assert_eq!(fetch(&owner, &wanted, &transport).unwrap()[0].bytes(), [5; 50_000]);
    assert_eq!((transport.requests.load(Ordering::SeqCst), owner.stats().buffer.num_entries), (0, 0));
}

#[test]
fn shards_that_another_process_named_are_fetched_though_it_serves_where_this_one_did() {
    let (owner, consumer, transport) = pair(SendAs::Bytes);
    consumer.add_own_address(OWNER.into());
    let ids = put(&owner, &[vec![5; 100]]).unwrap();
    let wanted = [whole(OWNER, &ids[0], 100)];
    assert_eq!(fetch(&consumer, &wanted, &transport).unwrap()[0].bytes(), [5; 100]);
    assert_eq!(transport.requests.load(Ordering::SeqCst), 1);
    // Its own are nowhere else.
    let own = put(&consumer, &[vec![6; 100]]).unwrap();
    consumer.remove(&own);
    assert!(matches!(
        fetch(&consumer, &[whole(OWNER, &own[0], 100)], &transport),
        Err(StoreError::Missing { owner: None, .. })
    ));
    assert_eq!(transport.requests.load(Ordering::SeqCst), 1);
}

#[test]
fn shards_that_are_missing_are_all_named_and_those_that_were_drained_so() {
    let (owner, consumer, transport) = pair(SendAs::Bytes);
    let ids = put(&owner, &[vec![1; 10], vec![2; 10], vec![3; 10]]).unwrap();
    owner.remove(&ids[..1]);
    let unknown: ShardId = "somebody's".replace('\'', "_").parse().unwrap();
    let wanted: Vec<_> = [&ids[0], &unknown, &ids[1]].iter().map(|id| whole(OWNER, id, 10)).collect();
    let Err(StoreError::Missing { owner: Some(from), shards }) = fetch(&consumer, &wanted, &transport) else {
        panic!("two are missing")
    };
    let mut named = shards.clone();
    named.sort_by_key(|shard| shard.was_removed);
    let expected =
        [MissingShard { id: unknown, was_removed: false }, MissingShard { id: ids[0].clone(), was_removed: true }];
    assert_eq!((&*from, &named[..]), (OWNER, &expected[..]));
    let message = StoreError::Missing { owner: Some(from), shards }.to_string();
    assert!(message.contains("drained or removed") && message.contains(&ids[0].to_string()), "{message}");
    // The one that is there was not fetched, and can be.
    assert_eq!(consumer.stats().buffer.num_entries, 0);
    assert_eq!(fetch(&consumer, &wanted[2..], &transport).unwrap()[0].bytes(), [2; 10]);
}

#[test]
fn shards_that_differ_from_their_handle_are_refused() {
    for send_as in [SendAs::Bytes, SendAs::SegmentRange] {
        let (owner, consumer, transport) = pair(send_as);
        let ids = put(&owner, &[vec![1; 16], vec![2; 16]]).unwrap();
        let cast = TensorMeta::new(Dtype::from_name("int8").unwrap(), [16].as_slice()).unwrap();
        let reshaped = TensorMeta::new(Dtype::from_name("uint8").unwrap(), [4, 4].as_slice()).unwrap();
        for wrong in [cast, reshaped, bytes_meta(17)] {
            let wanted = [whole(OWNER, &ids[1], 16), whole(OWNER, &ids[0], 16)];
            let [good, mut bad] = wanted;
            bad.meta = wrong.clone();
            let error = fetch(&consumer, &[good.clone(), bad.clone()], &transport).unwrap_err();
            assert!(matches!(&error, StoreError::Mismatch { id, .. } if *id == ids[0]), "{error}");
            fetch(&consumer, &[whole(OWNER, &ids[0], 16)], &transport).unwrap();
            // From the buffer, too, and by two handles of one call.
            assert!(matches!(fetch(&consumer, &[bad.clone()], &transport), Err(StoreError::Mismatch { .. })));
            let both = [whole(OWNER, &ids[0], 16), bad];
            assert!(matches!(fetch(&consumer, &both, &transport), Err(StoreError::Mismatch { .. })));
            consumer.clear_buffer(None);
        }
    }
}

#[test]
fn a_shard_under_a_given_name_never_changes() {
    let owner = TensorStore::new(LIMITS);
    let id: ShardId = "outside.1".parse().unwrap();
    let select = [ShardRows { id: id.clone(), rows: Selection::All }];
    let put_as = |id: &ShardId, bytes: &[u8]| {
        let source = TensorToStore::new(bytes_meta(bytes.len() as u64), bytes).unwrap();
        within(0.0, |time_limit| owner.put_as(id, source, time_limit))
    };
    for size in [0usize, 10, 400_000] {
        put_as(&id, &pattern(size as u64, size)).unwrap();
        assert!(matches!(put_as(&id, &[1]), Err(StoreError::Exists { .. })));
        let found = owner.look_up(&select).unwrap();
        assert_eq!(found[0].bytes(), pattern(size as u64, size));
        assert_eq!(owner.remove(std::slice::from_ref(&id)).cleared_count, 1);
        assert_eq!(found[0].bytes(), pattern(size as u64, size), "kept alive by who sends it");
        drop(found);
        assert_nothing_is_held(&owner);
    }
    let own = ShardId::numbered(owner.nonce(), 5);
    assert!(matches!(put_as(&own, &[1]), Err(StoreError::Invalid(_))));
}

#[test]
fn the_age_of_unclaimed_shards_is_that_of_the_oldest() {
    let owner = TensorStore::new(LIMITS);
    let age = || owner.stats().storage.oldest_unclaimed_seconds;
    assert_eq!(age(), 0.0);
    let ids = put(&owner, &[vec![1; 10], vec![2; 10]]).unwrap();
    let pause = Duration::from_millis(30);
    std::thread::sleep(pause);
    assert!((pause.as_secs_f64()..60.0).contains(&age()), "{}", age());
    owner.remove(&ids[..1]);
    assert!(age() > 0.0);
    assert_eq!(owner.claim(1, 1, &ids).unwrap().claimed_count, 1);
    assert_eq!(age(), 0.0);
    owner.release_claimant(1);
    assert!(age() > 0.0, "it is as old as before");
    owner.clear_all();
    assert_eq!(age(), 0.0);
}

#[test]
fn the_oldest_step_that_holds_bytes_is_named() {
    let (owner, consumer, transport) = pair(SendAs::SegmentRange);
    let ids = put(&owner, &[vec![1; 10], vec![2; 10]]).unwrap();
    let oldest = || consumer.stats().buffer.oldest_step;
    // The numbers say nothing, and a step that holds nothing is not named.
    for step in [9, 5, 7] {
        consumer.begin_step(step, 1).unwrap();
        if step != 9 {
            let id = &ids[usize::from(step == 7)];
            drop(fetch(&consumer, &[whole(OWNER, id, 10)], &transport).unwrap());
            assert_eq!(oldest(), Some(5.into()));
        }
    }
    consumer.end_step(5);
    assert_eq!(oldest(), Some(7.into()));
    consumer.end_step(7);
    assert_eq!(oldest(), None);
}

#[test]
fn a_removal_also_drops_fetched_entries() {
    let (owner, consumer, transport) = pair(SendAs::Bytes);
    let ids = put(&owner, &[vec![1; 10], vec![2; 10]]).unwrap();
    let wanted: Vec<_> = ids.iter().map(|id| whole(OWNER, id, 10)).collect();
    drop(fetch(&consumer, &wanted, &transport).unwrap());
    assert_eq!(consumer.remove(&ids[..1]), Default::default(), "it stores none of them");
    assert_eq!(consumer.stats().buffer.num_entries, 1);
    assert_eq!(consumer.clear_all(), Default::default());
    assert_nothing_is_held(&consumer);
}

/// Answers every request, and with nothing.
struct Nothing;

impl Transport for Nothing {
    fn fetch(
        &self,
        _: &Arc<str>,
        _: &[ShardRows],
        _: &mut FetchReceiver<'_>,
        _: &mut TimeLimit<'_>,
    ) -> Result<(), StoreError> {
        Ok(())
    }
}

#[test]
fn a_response_without_all_shards_is_an_error() {
    let (owner, consumer, _) = pair(SendAs::Bytes);
    let ids = put(&owner, &[vec![1; 10]]).unwrap();
    let wanted = [whole(OWNER, &ids[0], 10)];
    let error = within(5.0, |time_limit| consumer.fetch(&wanted, &Nothing, time_limit)).unwrap_err();
    assert!(matches!(&error, StoreError::Corrupt { id, .. } if *id == ids[0]), "{error}");
    assert_eq!(consumer.stats().buffer.in_flight, 0);
}

#[test]
fn large_tensors_in_recycled_memory_are_whole() {
    let (store, transport) = (TensorStore::new(LIMITS), LocalTransport::new(SendAs::SegmentRange));
    transport.add(OWNER, &store);
    // Past the caches, by several threads; odd lengths, so that nothing ends where a thread or a page does.
    let sizes = [(33 << 20) + 7, (40 << 20) + 4095, 70_001];
    for round in 0..3 {
        let tensors: Vec<_> = sizes.iter().zip(3 * round..).map(|(size, seed)| pattern(seed, *size)).collect();
        let ids = put(&store, &tensors).unwrap();
        let wanted: Vec<_> = ids.iter().zip(sizes).map(|(id, size)| whole(OWNER, id, size as u64)).collect();
        let views = fetch(&store, &wanted, &transport).unwrap();
        assert!(views.iter().zip(&tensors).all(|(view, tensor)| view.bytes() == tensor), "round {round}");
        drop(views);
        store.remove(&ids);
    }
}

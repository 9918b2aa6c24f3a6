//! A store at its limits: allocations wait, fail with an error, and go on when memory was given back.

mod common;

use std::time::{Duration, Instant};

use common::{LIMITS, LocalTransport, OWNER, SendAs, bytes_meta, fetch, pair, put, whole, within};
use tundish_store::{Limits, StoreError, TensorStore, TensorToStore, TimeLimit};

#[test]
fn at_the_limit_a_store_waits_and_then_says_so() {
    let limits = Limits { storage_bytes: 4 << 20, buffer_bytes: 1 << 20 };
    let owner = TensorStore::new(limits);
    let first = put(&owner, &[vec![1; 3 << 20]]).unwrap();
    let bytes = vec![2; 2 << 20];
    let source = || TensorToStore::new(bytes_meta(2 << 20), &bytes).unwrap();
    let begin = Instant::now();
    let error = within(0.2, |time_limit| owner.put(&[source()], time_limit)).unwrap_err();
    assert!(matches!(error, StoreError::Full { side: "storage", limit: 4_194_304, .. }), "{error}");
    // time: ten times the deadline of 0.2 s
    assert!((0.2..2.0).contains(&begin.elapsed().as_secs_f64()));
    assert!(matches!(put(&owner, &[vec![0; 4 << 20]]), Err(StoreError::TooLarge { .. })));
    // Called off.
    let mut looks = 0;
    let mut check_cancelled = || {
        looks += 1;
        if looks > 2 { Err(StoreError::Interrupted) } else { Ok(()) }
    };
    let mut time_limit = TimeLimit::new(Instant::now() + Duration::from_secs(60), &mut check_cancelled);
    assert!(matches!(owner.put(&[source()], &mut time_limit), Err(StoreError::Interrupted)));
    // Freed by another thread meanwhile.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            owner.remove(&first);
        });
        within(20.0, |time_limit| owner.put(&[source()], time_limit)).unwrap();
    });
    let memory = owner.stats().storage.memory;
    assert!(memory.used_bytes + memory.idle_bytes <= 4 << 20, "what was kept went for what is needed: {memory:?}");
    assert!(memory.high_water_bytes <= 4 << 20);
}

#[test]
fn at_the_limit_a_fetch_waits_and_then_says_so_and_references_take_nothing() {
    let owner = TensorStore::new(LIMITS);
    let consumer = TensorStore::new(Limits { buffer_bytes: 1 << 20, ..LIMITS });
    let transport = LocalTransport::new(SendAs::Bytes);
    transport.add(OWNER, &owner);
    let ids = put(&owner, &vec![vec![1; 400_000]; 3]).unwrap();
    let wanted: Vec<_> = ids.iter().map(|id| whole(OWNER, id, 400_000)).collect();
    drop(fetch(&consumer, &wanted[..2], &transport).unwrap());
    let error = within(0.1, |time_limit| consumer.fetch(&wanted, &transport, time_limit)).unwrap_err();
    assert!(matches!(error, StoreError::Full { side: "fetch buffer", .. }), "{error}");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            consumer.clear_buffer(Some(&ids[..2]));
        });
        fetch(&consumer, &wanted[2..], &transport).unwrap();
    });
    let transport = LocalTransport { send_as: SendAs::SegmentRange, ..transport };
    consumer.clear_buffer(None);
    let views = fetch(&consumer, &wanted, &transport).unwrap();
    assert!(views.iter().all(|view| view.bytes() == [1; 400_000]));
}

#[test]
fn escaped_bytes_count_against_the_limit_until_their_views_end() {
    let (owner, _, transport) = pair(SendAs::Bytes);
    let consumer = TensorStore::new(Limits { buffer_bytes: 1 << 20, ..LIMITS });
    let ids = put(&owner, &[vec![1; 700_000], vec![2; 700_000]]).unwrap();
    let wanted: Vec<_> = ids.iter().map(|id| whole(OWNER, id, 700_000)).collect();
    let view = fetch(&consumer, &wanted[..1], &transport).unwrap();
    consumer.clear_buffer(None);
    let error = within(0.1, |time_limit| consumer.fetch(&wanted[1..], &transport, time_limit)).unwrap_err();
    assert!(matches!(error, StoreError::Full { used: 0, escaped, .. } if escaped > 700_000), "{error}");
    drop(view);
    fetch(&consumer, &wanted[1..], &transport).unwrap();
}

#[test]
fn however_many_tensors_escape_their_bytes_count_against_the_limit() {
    const LEN: usize = 300_000;
    let (owner, _, transport) = pair(SendAs::Bytes);
    let consumer = TensorStore::new(Limits { buffer_bytes: 50 << 20, ..LIMITS });
    let mut kept = Vec::new();
    let error = loop {
        let ids = put(&owner, &[vec![1; LEN]]).unwrap();
        let wanted = [whole(OWNER, &ids[0], LEN as u64)];
        match within(0.1, |time_limit| consumer.fetch(&wanted, &transport, time_limit)) {
            Ok(views) => kept.push(views),
            Err(error) => break error,
        }
        consumer.clear_buffer(None);
        owner.remove(&ids);
        assert!(kept.len() * LEN <= 50 << 20, "more than there may be");
    };
    assert!(matches!(error, StoreError::Full { used: 0, .. }), "{error}");
    assert!(kept.len() > 150, "{}", kept.len());
    kept.clear();
    assert_eq!(consumer.stats().buffer.memory.escaped_bytes, 0);
}

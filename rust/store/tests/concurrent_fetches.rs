//! Several threads that fetch from one store, and transports that fail, hang or panic.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use common::{LIMITS, LocalTransport, OWNER, SendAs, bytes_meta, fetch, pattern, put, whole, within};
use tundish_store::{Dtype, Limits, ShardId, StoreError, TensorMeta, TensorStore, TensorToStore, TimeLimit, Wanted};

fn pair(tensors: &[Vec<u8>]) -> (Arc<TensorStore>, Arc<TensorStore>, LocalTransport, Vec<ShardId>) {
    let (owner, consumer, transport) = common::pair(SendAs::Bytes);
    let ids = put(&owner, tensors).unwrap();
    (owner, consumer, transport, ids)
}

fn wait_until(what: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !what() {
        assert!(Instant::now() < deadline, "it does not come to it");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn each_shard_is_fetched_once_however_many_threads_ask() {
    let tensors: Vec<_> = (0..300).map(|seed| pattern(seed, 1000 + seed as usize)).collect();
    let (_, consumer, mut transport, ids) = pair(&tensors);
    transport.before = Box::new(|_| {
        std::thread::sleep(Duration::from_millis(5));
        Ok(())
    });
    let barrier = Barrier::new(8);
    std::thread::scope(|scope| {
        for thread in 0..8usize {
            let (consumer, transport, ids, tensors, barrier) = (&consumer, &transport, &ids, &tensors, &barrier);
            scope.spawn(move || {
                // Each begins elsewhere, so that all of them fetch some and wait for some.
                let order: Vec<usize> = (0..300).map(|index| (index + 37 * thread) % 300).collect();
                barrier.wait();
                for some in order.chunks(60) {
                    let wanted: Vec<_> =
                        some.iter().map(|index| whole(OWNER, &ids[*index], tensors[*index].len() as u64)).collect();
                    let views = fetch(consumer, &wanted, transport).unwrap();
                    assert!(views.iter().zip(some).all(|(view, index)| view.bytes() == tensors[*index]));
                }
            });
        }
    });
    assert_eq!(transport.shards.load(Ordering::SeqCst), 300);
    let stats = consumer.stats().buffer;
    assert_eq!((stats.num_entries, stats.misses, stats.hits, stats.in_flight), (300, 300, 7 * 300, 0));
}

#[test]
fn a_failure_reaches_all_waiting_threads_and_the_next_call_fetches_again() {
    let (_, consumer, mut transport, ids) = pair(&[vec![1; 100]]);
    let owner: Arc<str> = OWNER.into();
    let error = StoreError::Unreachable { id: ids[0].clone(), owner, reason: "connection refused".to_owned() };
    let goes_on = Arc::new(AtomicBool::new(false));
    transport.before = Box::new({
        let (error, goes_on) = (error.clone(), Arc::clone(&goes_on));
        move |number| {
            wait_until(|| goes_on.load(Ordering::SeqCst));
            if number == 0 { Err(error.clone()) } else { Ok(()) }
        }
    });
    let wanted = [whole(OWNER, &ids[0], 100)];
    std::thread::scope(|scope| {
        let fetchers: Vec<_> =
            (0..4).map(|_| scope.spawn(|| fetch(&consumer, &wanted, &transport).map(drop))).collect();
        // One fetches and three wait for it.
        wait_until(|| consumer.stats().buffer.hits == 3);
        goes_on.store(true, Ordering::SeqCst);
        for fetcher in fetchers {
            assert!(matches!(fetcher.join().unwrap(), Err(StoreError::Unreachable { .. })));
        }
    });
    assert_eq!(transport.requests.load(Ordering::SeqCst), 1);
    assert_eq!(fetch(&consumer, &wanted, &transport).unwrap()[0].bytes(), [1; 100]);
}

#[test]
fn a_waiting_thread_fetches_itself_if_the_fetcher_is_cancelled_or_panics() {
    for panics in [false, true] {
        let (_, consumer, mut transport, ids) = pair(&[vec![1; 100]]);
        let goes_on = Arc::new(AtomicBool::new(false));
        transport.before = Box::new({
            let goes_on = Arc::clone(&goes_on);
            move |number| {
                if number > 0 {
                    return Ok(());
                }
                wait_until(|| goes_on.load(Ordering::SeqCst));
                assert!(!panics, "as a transport never should");
                Err(StoreError::Interrupted)
            }
        });
        let wanted = [whole(OWNER, &ids[0], 100)];
        std::thread::scope(|scope| {
            let first = scope.spawn(|| fetch(&consumer, &wanted, &transport).map(drop));
            wait_until(|| transport.requests.load(Ordering::SeqCst) == 1);
            let second = scope.spawn(|| fetch(&consumer, &wanted, &transport).unwrap()[0].bytes().to_vec());
            wait_until(|| consumer.stats().buffer.hits == 1);
            goes_on.store(true, Ordering::SeqCst);
            match first.join() {
                Ok(outcome) => assert!(matches!(outcome, Err(StoreError::Interrupted)) && !panics),
                Err(_) => assert!(panics),
            }
            assert_eq!(second.join().unwrap(), [1; 100]);
        });
        assert_eq!(consumer.stats().buffer.in_flight, 0);
    }
}

#[test]
fn a_waiting_thread_does_not_fail_for_another_shard_of_the_batch() {
    let (_, consumer, mut transport, ids) = pair(&[vec![1; 100]]);
    let goes_on = Arc::new(AtomicBool::new(false));
    transport.before = Box::new({
        let goes_on = Arc::clone(&goes_on);
        move |_| {
            wait_until(|| goes_on.load(Ordering::SeqCst));
            Ok(())
        }
    });
    let never: ShardId = "never".parse().unwrap();
    let both = [whole(OWNER, &ids[0], 100), whole(OWNER, &never, 100)];
    std::thread::scope(|scope| {
        let first = scope.spawn(|| fetch(&consumer, &both, &transport).map(drop));
        wait_until(|| transport.requests.load(Ordering::SeqCst) == 1);
        let second = scope.spawn(|| fetch(&consumer, &both[..1], &transport).unwrap()[0].bytes().to_vec());
        wait_until(|| consumer.stats().buffer.hits == 1);
        goes_on.store(true, Ordering::SeqCst);
        assert!(matches!(first.join().unwrap(), Err(StoreError::Missing { .. })));
        assert_eq!(second.join().unwrap(), [1; 100]);
    });
}

/// Fetches `then` on other threads while one thread fetches `first`. Returns their outcomes and the number of requests.
fn join(
    first: &[Wanted],
    then: &[&[Wanted]],
    mut transport: LocalTransport,
) -> (Vec<Result<Vec<u8>, StoreError>>, usize) {
    let consumer = TensorStore::new(LIMITS);
    let goes_on = Arc::new(AtomicBool::new(false));
    transport.before = Box::new({
        let goes_on = Arc::clone(&goes_on);
        move |_| {
            wait_until(|| goes_on.load(Ordering::SeqCst));
            Ok(())
        }
    });
    let ask = |wanted: &[Wanted]| fetch(&consumer, wanted, &transport).map(|views| views[0].bytes().to_vec());
    let outcomes = std::thread::scope(|scope| {
        let first = scope.spawn(|| ask(first).map(drop));
        wait_until(|| transport.requests.load(Ordering::SeqCst) == 1);
        let others: Vec<_> = then.iter().map(|wanted| scope.spawn(|| ask(wanted))).collect();
        wait_until(|| consumer.stats().buffer.hits == then.len() as u64);
        goes_on.store(true, Ordering::SeqCst);
        first.join().unwrap().unwrap_err();
        others.into_iter().map(|other| other.join().unwrap()).collect()
    });
    assert_eq!(consumer.stats().buffer.in_flight, 0);
    (outcomes, transport.requests.load(Ordering::SeqCst))
}

#[test]
fn a_right_handle_does_not_fail_for_a_wrong_one() {
    for send_as in [SendAs::Bytes, SendAs::SegmentRange] {
        let (owner, _, transport) = common::pair(send_as);
        let id = put(&owner, &[pattern(1, 100)]).unwrap().remove(0);
        let right = [whole(OWNER, &id, 100)];
        let [cast, long] = ["int8", "uint8"].map(|name| {
            let meta = TensorMeta::new(Dtype::from_name(name).unwrap(), [100 + u64::from(name == "uint8")].as_slice());
            [Wanted { meta: meta.unwrap(), ..right[0].clone() }]
        });
        let (outcomes, requests) = join(&cast, &[&right, &right, &cast, &long, &cast, &right], transport);
        for at in [0, 1, 5] {
            assert_eq!(*outcomes[at].as_ref().unwrap(), pattern(1, 100));
        }
        for (at, meta) in [(2, "int8[100]"), (3, "uint8[101]"), (4, "int8[100]")] {
            let told = outcomes[at].as_ref().unwrap_err();
            assert!(matches!(told, StoreError::Mismatch { declared, .. } if declared == meta), "{told}");
        }
        // Those that are wrong ask for themselves.
        assert!((2..=7).contains(&requests), "{requests}");
    }
}

#[test]
fn a_waiting_thread_does_not_fail_for_rows_that_do_not_exist() {
    let (owner, _, transport) = common::pair(SendAs::Bytes);
    let ids = put(&owner, &[pattern(1, 100), pattern(2, 50)]).unwrap();
    let [some, none] = [0..10, 0..101].map(|rows| [common::rows(OWNER, &ids[0], rows)]);
    let (outcomes, requests) = join(&none, &[&some, &none, &some], transport);
    assert_eq!([&outcomes[0], &outcomes[2]].map(|told| told.as_ref().unwrap()), [&pattern(1, 100)[..10]; 2]);
    assert!(matches!(&outcomes[1], Err(StoreError::Invalid(why)) if why.contains("0 to 101")), "{outcomes:?}");
    assert!((2..=4).contains(&requests), "{requests}");
    // Of a batch all that it asked for fails; anyone who waits for other shards of it, or other rows, has them.
    let other = [whole(OWNER, &ids[1], 50)];
    let mut wrong = common::rows(OWNER, &ids[0], 90..100);
    wrong.meta = TensorMeta::new(Dtype::from_name("int8").unwrap(), [10].as_slice()).unwrap();
    for batch in [[some[0].clone(), other[0].clone(), none[0].clone()], [wrong, some[0].clone(), other[0].clone()]] {
        let transport = LocalTransport::new(SendAs::Bytes);
        transport.add(OWNER, &owner);
        let (outcomes, requests) = join(&batch, &[&some, &other], transport);
        assert_eq!(*outcomes[0].as_ref().unwrap(), pattern(1, 100)[..10]);
        assert_eq!(*outcomes[1].as_ref().unwrap(), pattern(2, 50));
        assert_eq!(requests, 3);
    }
}

#[test]
fn late_arrivals_are_refused_and_counted() {
    for by_id in [false, true] {
        let (owner, consumer, mut transport, ids) = pair(&[vec![1; 500_000], vec![2; 500_000]]);
        consumer.begin_step(5, 1).unwrap();
        transport.after = Box::new({
            let (consumer, ids) = (Arc::clone(&consumer), ids.clone());
            // The first request's bytes are in their space, and then the drain comes.
            move |number| {
                if number == 0 && by_id {
                    consumer.clear_buffer(Some(&ids));
                } else if number == 0 {
                    consumer.end_step(5);
                }
                Ok(())
            }
        });
        let wanted: Vec<_> = ids.iter().map(|id| whole(OWNER, id, 500_000)).collect();
        let error = fetch(&consumer, &wanted, &transport).unwrap_err();
        match by_id {
            true => assert!(matches!(error, StoreError::Drained { .. })),
            false => assert!(matches!(error, StoreError::StepEnded { step } if step == 5)),
        }
        let stats = consumer.stats().buffer;
        assert_eq!((stats.num_entries, stats.total_bytes, stats.late_inserts_refused), (0, 0, 1));
        assert_eq!((stats.memory.used_bytes, stats.in_flight), (0, 0), "nothing of it is left");
        fetch(&consumer, &wanted, &transport).unwrap();
        drop(owner);
    }
}

#[test]
fn a_thread_that_waits_for_a_fetch_of_an_ended_step_fails_or_fetches_itself() {
    for is_of_another_step in [false, true] {
        let (_, consumer, mut transport, ids) = pair(&[vec![1; 100]]);
        let goes_on = Arc::new(AtomicBool::new(false));
        transport.before = Box::new({
            let goes_on = Arc::clone(&goes_on);
            move |number| {
                if number == 0 {
                    wait_until(|| goes_on.load(Ordering::SeqCst));
                }
                Ok(())
            }
        });
        consumer.begin_step(5, 1).unwrap();
        let wanted = [whole(OWNER, &ids[0], 100)];
        std::thread::scope(|scope| {
            let first = scope.spawn(|| fetch(&consumer, &wanted, &transport).map(drop));
            wait_until(|| transport.requests.load(Ordering::SeqCst) == 1);
            if is_of_another_step {
                consumer.begin_step(6, 1).unwrap();
            }
            let second = scope.spawn(|| fetch(&consumer, &wanted, &transport).map(|views| views[0].bytes().to_vec()));
            wait_until(|| consumer.stats().buffer.hits == 1);
            consumer.end_step(5);
            goes_on.store(true, Ordering::SeqCst);
            assert!(matches!(first.join().unwrap(), Err(StoreError::StepEnded { step }) if step == 5));
            match second.join().unwrap() {
                Ok(bytes) => assert!(is_of_another_step && bytes == [1; 100]),
                Err(error) => {
                    assert!(!is_of_another_step && matches!(error, StoreError::StepEnded { step } if step == 5))
                }
            }
        });
        let stats = consumer.stats().buffer;
        let kept = u64::from(is_of_another_step);
        assert_eq!((stats.num_entries, stats.in_flight, stats.late_inserts_refused), (kept, 0, 1));
    }
}

#[test]
fn steps_that_have_ended_take_nothing_more() {
    let (owner, consumer, transport, ids) = pair(&[vec![1; 100]]);
    consumer.begin_step(1, 1).unwrap();
    consumer.end_step(1);
    assert!(matches!(consumer.begin_step(1, 1), Err(StoreError::StepEnded { step }) if step == 1));
    owner.end_step(2);
    assert!(matches!(owner.claim(2, 1, &ids), Err(StoreError::StepEnded { step }) if step == 2));
    assert_eq!(owner.stats().storage.num_entries, 1);
    fetch(&consumer, &[whole(OWNER, &ids[0], 100)], &transport).unwrap();
}

#[test]
fn all_owners_are_asked_at_once_and_one_that_fails_calls_the_others_off() {
    let consumer = TensorStore::new(LIMITS);
    let mut transport = LocalTransport::new(SendAs::Bytes);
    let owners: Vec<_> = (0..6).map(|_| TensorStore::new(LIMITS)).collect();
    let mut wanted: Vec<Wanted> = Vec::new();
    for (number, owner) in owners.iter().enumerate() {
        let address = format!("owner{number}");
        transport.add(&address, owner);
        let id = put(owner, &[vec![number as u8; 1000]]).unwrap().remove(0);
        wanted.push(whole(&address, &id, 1000));
    }
    let all = Arc::new(Barrier::new(6));
    transport.before = Box::new({
        let all = Arc::clone(&all);
        move |_| {
            all.wait();
            Ok(())
        }
    });
    let views = fetch(&consumer, &wanted, &transport).unwrap();
    assert!(views.iter().enumerate().all(|(number, view)| view.bytes() == [number as u8; 1000]));
    consumer.clear_buffer(None);
    transport.before = Box::new(move |number| match number % 6 {
        0 => Err(StoreError::Invalid("broken".to_owned())),
        _ => Ok(()),
    });
    assert!(matches!(fetch(&consumer, &wanted, &transport), Err(StoreError::Invalid(_))));
    transport.before = Box::new(|_| Ok(()));
    assert_eq!(fetch(&consumer, &wanted, &transport).unwrap().len(), 6);
}

#[test]
fn ctrl_c_ends_a_wait_for_another_threads_fetch_and_so_does_the_deadline() {
    let (_, consumer, mut transport, ids) = pair(&[vec![1; 100]]);
    let goes_on = Arc::new(AtomicBool::new(false));
    transport.before = Box::new({
        let goes_on = Arc::clone(&goes_on);
        move |_| {
            wait_until(|| goes_on.load(Ordering::SeqCst));
            Ok(())
        }
    });
    let wanted = [whole(OWNER, &ids[0], 100)];
    std::thread::scope(|scope| {
        scope.spawn(|| fetch(&consumer, &wanted, &transport).unwrap());
        wait_until(|| transport.requests.load(Ordering::SeqCst) == 1);
        let begin = Instant::now();
        let mut check_cancelled =
            || if begin.elapsed().as_millis() > 50 { Err(StoreError::Interrupted) } else { Ok(()) };
        let mut time_limit = TimeLimit::new(begin + Duration::from_secs(60), &mut check_cancelled);
        assert!(matches!(consumer.fetch(&wanted, &transport, &mut time_limit), Err(StoreError::Interrupted)));
        let late = within(0.1, |time_limit| consumer.fetch(&wanted, &transport, time_limit)).unwrap_err();
        // time: over ten times the deadlines of 50 and 100 ms; the other limit is 60 s
        assert!(matches!(late, StoreError::TimedOut { .. }) && begin.elapsed() < Duration::from_secs(10));
        goes_on.store(true, Ordering::SeqCst);
    });
}

#[test]
fn threads_that_ask_for_room_at_once_never_get_more_than_there_is() {
    let limit = 1 << 20;
    let owner = TensorStore::new(Limits { storage_bytes: limit, ..LIMITS });
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    let bytes = [7; 300_000];
                    let source = TensorToStore::new(bytes_meta(300_000), &bytes).unwrap();
                    let ids = within(60.0, |time_limit| owner.put(&[source], time_limit)).unwrap();
                    assert_eq!(owner.remove(&ids).cleared_count, 1);
                }
            });
        }
    });
    let memory = owner.stats().storage.memory;
    assert_eq!(memory.used_bytes, 0);
    assert!(memory.high_water_bytes >= 300_000 && memory.high_water_bytes <= limit, "{memory:?}");
}

#[test]
fn concurrent_calls_leave_nothing_and_mix_no_bytes() {
    let limits = Limits { storage_bytes: 64 << 20, buffer_bytes: 64 << 20 };
    let (owner, consumer) = (TensorStore::new(limits), TensorStore::new(limits));
    let transport = LocalTransport::new(SendAs::Bytes);
    transport.add(OWNER, &owner);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let (owner, consumer, transport, is_over) = (&owner, &consumer, &transport, &is_over);
            scope.spawn(move || {
                for round in 0.. {
                    if is_over.load(Ordering::SeqCst) {
                        break;
                    }
                    let sizes = [100, 70_000, 400_000];
                    let tensors: Vec<_> = sizes.iter().map(|size| pattern(round * 3 + thread, *size)).collect();
                    let ids = put(owner, &tensors).unwrap();
                    let wanted: Vec<_> =
                        ids.iter().zip(sizes).map(|(id, size)| whole(OWNER, id, size as u64)).collect();
                    match fetch(consumer, &wanted, transport) {
                        Ok(views) => assert!(views.iter().zip(&tensors).all(|(view, bytes)| view.bytes() == bytes)),
                        Err(StoreError::StepEnded { .. }) => {}
                        Err(other) => panic!("{other}"),
                    }
                    consumer.clear_buffer(Some(&ids));
                    owner.remove(&ids);
                }
            });
        }
        let end = Instant::now() + Duration::from_secs(2);
        for step in 0.. {
            consumer.begin_step(step, 0).unwrap();
            std::thread::sleep(Duration::from_millis(2));
            consumer.end_step(step);
            if Instant::now() > end {
                break;
            }
        }
        is_over.store(true, Ordering::SeqCst);
    });
    for store in [owner, consumer] {
        let stats = store.stats();
        assert_eq!((stats.storage.num_entries, stats.buffer.num_entries, stats.buffer.in_flight), (0, 0, 0));
        for memory in [stats.storage.memory, stats.buffer.memory] {
            assert_eq!((memory.used_bytes, memory.escaped_bytes), (0, 0));
            assert!(memory.high_water_bytes <= memory.limit_bytes && memory.idle_bytes <= memory.limit_bytes);
        }
    }
}

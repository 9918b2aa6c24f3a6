//! Fetches from correct owners.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use tundish_store::http::{Client, Timeouts};
use tundish_store::{
    FetchReceiver, Limits, MissingShard, Selection, ShardId, ShardRows, StoreError, TensorStore, TimeLimit, Transport,
    Wanted,
};

use crate::common::{LIMITS, overwrite, pattern, put, rows, whole, within};
use crate::raw_http::{Owner, STUCK, clients, meta, with_token};

fn tensors() -> Vec<Vec<u8>> {
    let sizes = [0, 1, 63, 4096, 64 << 10, 300_001, 3 << 20, 0, 9 << 20];
    sizes.iter().enumerate().map(|(seed, size)| pattern(seed as u64, *size)).collect()
}

fn views(store: &TensorStore, client: &Client, wanted: &[Wanted]) -> Result<Vec<Vec<u8>>, StoreError> {
    let views = within(STUCK.as_secs_f64(), |time_limit| store.fetch(wanted, client, time_limit))?;
    Ok(views.iter().map(|view| view.bytes().to_vec()).collect())
}

#[test]
fn fetched_shards_are_private_copies() {
    for (way, client) in clients() {
        let (owner, consumer) = (Owner::new(), TensorStore::new(LIMITS));
        let tensors = tensors();
        let ids = put(&owner.store, &tensors).unwrap();
        let wanted: Vec<_> =
            ids.iter().zip(&tensors).map(|(id, bytes)| whole(&owner.address(), id, bytes.len() as u64)).collect();
        for round in 0..3 {
            let got = within(20.0, |time_limit| consumer.fetch(&wanted, &client, time_limit)).unwrap();
            for (view, bytes) in got.iter().zip(&tensors) {
                assert_eq!(view.bytes(), bytes, "{way}, {round}");
                overwrite(view, 0xaa);
            }
            if round == 1 {
                consumer.clear_buffer(None);
            }
        }
        let used = consumer.stats().buffer.memory.used_bytes;
        assert_eq!(used == 0, way == "where it lies", "{used} bytes");
    }
}

#[test]
fn rows_alone_travel() {
    for (way, client) in clients() {
        let (owner, consumer) = (Owner::new(), TensorStore::new(LIMITS));
        let bytes = pattern(1, 1 << 20);
        owner.store("a", &bytes);
        let before = sent(&owner);
        let id = "a".parse().unwrap();
        let some = [rows(&owner.address(), &id, 1000..3000), rows(&owner.address(), &id, 7..7)];
        assert_eq!(views(&consumer, &client, &some).unwrap(), [&bytes[1000..3000], &[]], "{way}");
        // Among it the pages that tell of it.
        let spent = sent(&owner) - before;
        assert!(spent < 20_000, "{way}: {spent} bytes");
    }
}

fn sent(owner: &Owner) -> u64 {
    let page = owner.ask("GET", "/metrics", "", b"").text();
    let line = page.lines().find(|line| line.starts_with("tundish_rtensor_sent_bytes_total ")).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn many_shards_come_in_one_request() {
    let (owner, consumer) = (Owner::new(), TensorStore::new(LIMITS));
    let tensors: Vec<_> = (0..3000).map(|seed| pattern(seed, 100)).collect();
    let ids = put(&owner.store, &tensors).unwrap();
    let wanted: Vec<_> = ids.iter().map(|id| whole(&owner.address(), id, 100)).collect();
    for (way, client) in clients() {
        assert_eq!(views(&consumer, &client, &wanted).unwrap(), tensors, "{way}");
        consumer.clear_buffer(None);
    }
    let page = owner.ask("GET", "/metrics", "", b"").text();
    assert!(page.contains("tundish_rtensor_answers_total{status=\"200\"} 2\n"), "{page}");
}

#[test]
fn connections_are_kept_and_one_that_was_closed_meanwhile_is_replaced() {
    let idle = Duration::from_millis(100);
    let (owner, consumer) = (Owner::with(None, Timeouts { idle, ..Timeouts::default() }), TensorStore::new(LIMITS));
    owner.store("a", b"abc");
    let client = Client::of_sockets();
    for pause in [0, 0, 300, 0] {
        std::thread::sleep(Duration::from_millis(pause));
        let got = views(&consumer, &client, &[owner.wanted("a", 3)]).unwrap();
        assert_eq!(got, [b"abc"]);
        consumer.clear_buffer(None);
    }
    // As many wait as were used at once.
    let page = owner.ask("GET", "/metrics", "", b"").text();
    assert!(page.contains("tundish_rtensor_connections 2\n"), "{page}");
}

#[test]
fn missing_shards_are_named_with_their_owner() {
    for (_, client) in clients() {
        let (owner, consumer) = (Owner::new(), TensorStore::new(LIMITS));
        let [gone, here] = put(&owner.store, &[b"abc".to_vec(), b"abc".to_vec()]).unwrap().try_into().unwrap();
        owner.store.remove(std::slice::from_ref(&gone));
        let never: ShardId = "never".parse().unwrap();
        let wanted = [&gone, &here, &never].map(|id| whole(&owner.address(), id, 3));
        let error = views(&consumer, &client, &wanted).unwrap_err();
        let StoreError::Missing { owner: Some(named), shards } = &error else { panic!("{error}") };
        let missing = |id, was_removed| MissingShard { id, was_removed };
        assert_eq!((named, &shards[..]), (&owner.address(), &[missing(gone, true), missing(never, false)][..]));
        assert_eq!(views(&consumer, &client, &wanted[1..2]).unwrap(), [b"abc"]);
    }
}

#[test]
fn shards_over_http_that_differ_from_their_handle_are_refused() {
    for (_, client) in clients() {
        let (owner, consumer) = (Owner::new(), TensorStore::new(LIMITS));
        owner.store("a", b"abcd");
        for declared in [meta("int8", &[4]), meta("uint8", &[2, 2]), meta("float32", &[1]), meta("uint8", &[5])] {
            let wanted = Wanted { meta: declared, ..owner.wanted("a", 4) };
            let error = views(&consumer, &client, &[wanted]).unwrap_err();
            assert!(matches!(error, StoreError::Mismatch { .. }), "{error}");
        }
        assert_eq!(views(&consumer, &client, &[owner.wanted("a", 4)]).unwrap(), [b"abcd"]);
    }
}

/// Sends nothing before it may.
struct Held<'a> {
    client: &'a Client,
    goes_on: &'a AtomicBool,
}

impl Transport for Held<'_> {
    fn fetch(
        &self,
        owner: &Arc<str>,
        wanted: &[ShardRows],
        receiver: &mut FetchReceiver<'_>,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(), StoreError> {
        while !self.goes_on.load(Ordering::SeqCst) {
            std::thread::sleep(time_limit.next_wait().min(Duration::from_millis(1)));
            time_limit.check_cancelled()?;
        }
        self.client.fetch(owner, wanted, receiver, time_limit)
    }
}

#[test]
fn a_wrong_handle_of_one_thread_does_not_fail_another_over_http() {
    for (way, client) in clients() {
        let (owner, consumer) = (Owner::new(), TensorStore::new(LIMITS));
        let bytes = pattern(1, 1000);
        owner.store("a", &bytes);
        let (address, id) = (owner.address(), "a".parse().unwrap());
        let cast = Wanted { meta: meta("int8", &[1000]), ..owner.wanted("a", 1000) };
        let right = rows(&address, &id, 0..10);
        for wrong in [cast, rows(&address, &id, 0..2000)] {
            let goes_on = AtomicBool::new(false);
            let held = Held { client: &client, goes_on: &goes_on };
            let ask = |one: &Wanted| {
                let views = within(20.0, |time_limit| consumer.fetch(std::slice::from_ref(one), &held, time_limit))?;
                Ok::<_, StoreError>(views[0].bytes().to_vec())
            };
            let count = |what: fn(&tundish_store::Stats) -> u64, least: u64| {
                let deadline = Instant::now() + STUCK;
                while what(&consumer.stats()) < least && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(1));
                }
            };
            let joined = consumer.stats().buffer.hits + 1;
            std::thread::scope(|scope| {
                let first = scope.spawn(|| ask(&wrong));
                count(|stats| stats.buffer.in_flight, 1);
                let other = scope.spawn(|| ask(&right));
                count(|stats| stats.buffer.hits, joined);
                goes_on.store(true, Ordering::SeqCst);
                first.join().unwrap().unwrap_err();
                assert_eq!(other.join().unwrap().unwrap(), bytes[..10], "{way}");
            });
            consumer.clear_buffer(None);
        }
    }
}

#[test]
fn the_token_is_sent_to_trusted_owners() {
    let (owner, consumer) = (Owner::with(Some("s3cret"), Timeouts::default()), TensorStore::new(LIMITS));
    put(&owner.store, &[b"abc".to_vec()]).unwrap();
    let client = Client::new();
    let address = owner.address();
    let error = views(&consumer, &client, &[owner.wanted("a", 3)]).unwrap_err();
    let StoreError::Refused { status: 401, reason, .. } = &error else { panic!("{error}") };
    assert!(reason.contains("not told to trust"), "{reason}");
    client.trust(&address, with_token("wrong"));
    let error = views(&consumer, &client, &[owner.wanted("a", 3)]).unwrap_err();
    assert!(matches!(error, StoreError::Refused { status: 401, .. }), "{error}");
    client.trust(&address, with_token("s3cret"));
    owner.store("a", b"abc");
    assert_eq!(views(&consumer, &client, &[owner.wanted("a", 3)]).unwrap(), [b"abc"]);
}

#[test]
fn a_large_shard_is_stored_and_removed_over_a_connection() {
    let (owner, id): (_, ShardId) = (Owner::new(), "a:1".parse().unwrap());
    let bytes = pattern(6, 20 << 20);
    owner.store("a:1", &bytes);
    let found = owner.store.look_up(&[ShardRows { id, rows: Selection::All }]).unwrap();
    assert!(found[0].bytes() == bytes);
    let removed = owner.ask("DELETE", "/data/clear", "", br#"{"shard_ids": ["a:1", "a:1"]}"#).json();
    assert_eq!((&removed["cleared_count"], &removed["freed_bytes"]), (&json!(1), &json!(bytes.len())));
}

#[test]
fn a_fetch_buffer_is_cleared_over_a_connection() {
    let (owner, consumer, client) = (Owner::new(), Owner::new(), Client::new());
    for id in ["a", "b", "c"] {
        owner.store(id, b"abc");
    }
    let wanted = ["a", "b", "c"].map(|id| owner.wanted(id, 3));
    views(&consumer.store, &client, &wanted).unwrap();
    for (body, cleared, left) in
        [(r#"{"shard_ids": ["a", "a", "x"]}"#, 1, 2), (r#"{"shard_ids": []}"#, 0, 2), (r#"{"shard_ids": null}"#, 2, 0)]
    {
        let answer = consumer.ask("DELETE", "/buffer/clear", "", body.as_bytes()).json();
        assert_eq!((&answer["cleared_count"], consumer.store.stats().buffer.num_entries), (&json!(cleared), left));
    }
    assert_eq!(owner.store.stats().storage.num_entries, 3);
}

#[test]
fn small_shards_pass_a_large_one() {
    let owner = Owner::new();
    owner.store("large", &vec![7; 128 << 20]);
    owner.store("small", &pattern(8, 64 << 10));
    let (large, small) = (owner.wanted("large", 128 << 20), owner.wanted("small", 64 << 10));
    let limits = Limits { buffer_bytes: 256 << 20, ..LIMITS };
    let fetch = |store: &TensorStore, client: &Client, wanted: &Wanted| {
        let begin = Instant::now();
        within(20.0, |time_limit| store.fetch(std::slice::from_ref(wanted), client, time_limit)).unwrap();
        store.clear_buffer(None);
        begin.elapsed()
    };
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let (mut times, mut beside) = std::thread::scope(|scope| {
        let beside = scope.spawn(|| {
            let (store, client) = (TensorStore::new(limits), Client::of_sockets());
            let mut times = Vec::new();
            loop {
                times.push(fetch(&store, &client, &large));
                if is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    return times;
                }
            }
        });
        let (store, client) = (TensorStore::new(limits), Client::of_sockets());
        let times: Vec<_> = (0..200).map(|_| fetch(&store, &client, &small)).collect();
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        (times, beside.join().unwrap())
    });
    times.sort();
    beside.sort();
    // One that waited for the large ones would take as long as they do, whatever else the machine is at.
    assert!(times[100] < beside[beside.len() / 2], "{:?} beside {:?}", times[100], beside[beside.len() / 2]);
}

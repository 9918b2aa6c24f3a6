//! Answers of a server to valid and to invalid requests.

use std::time::Duration;

use base64::Engine;
use serde_json::json;
use tundish_store::http::{Client, Timeouts};
use tundish_store::{Dtype, TensorMeta};

use crate::common::{pattern, within};
use crate::raw_http::{Owner, TAKES_SHARDS, meta, shard, until};

#[test]
fn every_type_comes_back_as_it_was_stored_bit_for_bit() {
    let owner = Owner::new();
    let mut raw = owner.connect();
    for dtype in Dtype::all() {
        for shape in [&[][..], &[0, 3], &[5], &[3, 2, 7]] {
            let meta = TensorMeta::new(dtype, shape).unwrap();
            let path = format!("/data/{}-{}", dtype.name(), shape.len());
            let body = shard(&meta, &pattern(u64::from(dtype.code()), meta.nbytes() as usize));
            owner.put(path.trim_start_matches("/data/"), meta.clone(), &body[body.len() - meta.nbytes() as usize..]);
            raw.request("GET", &path, "", b"");
            let answer = raw.answer();
            assert_eq!(answer.field("Content-Type"), Some("application/x-tundish-shards"));
            assert_eq!((answer.status, answer.body), (200, body), "{meta:?}");
        }
    }
}

#[test]
fn a_batch_comes_in_the_order_that_was_asked_for_and_rows_alone_where_rows_were() {
    let owner = Owner::new();
    let (a, b) = (pattern(1, 24), pattern(2, 5000));
    let (of_a, of_b) = (meta("float32", &[3, 2]), meta("uint8", &[5000]));
    owner.put("a", of_a, &a);
    owner.put("b", of_b.clone(), &b);
    let request = br#"{"shard_ids": ["b", "a", "b", "a"], "rows": [null, [1, 3], [7, 7], [0, 1]]}"#;
    let answer = owner.ask("POST", "/data/batch", "", request);
    let expected = [
        shard(&of_b, &b),
        shard(&meta("float32", &[2, 2]), &a[8..]),
        shard(&meta("uint8", &[0]), b""),
        shard(&meta("float32", &[1, 2]), &a[..8]),
    ];
    assert_eq!((answer.status, answer.body), (200, expected.concat()));
    let empty = owner.ask("POST", "/data/batch", "", br#"{"shard_ids": []}"#);
    assert_eq!((empty.status, empty.body.len()), (200, 0));
    let beyond = owner.ask("POST", "/data/batch", "", br#"{"shard_ids": ["a"], "rows": [[2, 4]]}"#);
    assert_eq!(beyond.status, 400);
    assert!(beyond.json()["message"].as_str().unwrap().contains("shard a: rows 2 to 4"), "{}", beyond.text());
}

#[test]
fn json_is_what_areals_clients_read() {
    let owner = Owner::new();
    let tensor = json!({"type": "tensor", "dtype": "torch.bfloat16", "shape": [2], "data": "AACAPwAAAMA="});
    let fields = "Content-Type: application/json\r\nAccept: application/json\r\n";
    owner.put("x", meta("bfloat16", &[2]), &[0x80, 0x3f, 0, 0xc0]);
    assert_eq!(owner.ask("GET", "/data/x", fields, b"").json(), tensor);
    assert_eq!(owner.ask("GET", "/data/x", "", b"").body[32..], [0x80, 0x3f, 0, 0xc0]);
    // Longer than what is turned into base64 at once, with something left over.
    let bytes = pattern(3, 200_003);
    owner.store("long", &bytes);
    let batch = owner.ask("POST", "/data/batch", fields, br#"{"shard_ids": ["x", "long", "x"]}"#).json();
    assert_eq!((&batch[0], &batch[2], batch.as_array().unwrap().len()), (&tensor, &tensor, 3));
    assert_eq!(base64::engine::general_purpose::STANDARD.decode(batch[1]["data"].as_str().unwrap()).unwrap(), bytes);
    assert_eq!(owner.ask("POST", "/data/batch", fields, br#"{"shard_ids": []}"#).json(), json!([]));
    // Its clients say that they take anything.
    let any = "Content-Type: application/json\r\nAccept: */*\r\n";
    assert_eq!(owner.ask("GET", "/data/x", any, b"").json(), tensor);
    let batch = owner.ask("POST", "/data/batch", any, br#"{"shard_ids": ["x", "long", "x"]}"#);
    assert_eq!((batch.field("Content-Type"), &batch.json()[2]), (Some("application/json"), &tensor));
}

#[test]
fn missing_shards_are_named() {
    let owner = Owner::new();
    owner.store("a", b"a");
    owner.store("gone", b"gone");
    let cleared = owner.ask("DELETE", "/data/clear", "", br#"{"shard_ids": ["gone", "never", "gone"]}"#);
    let expected = json!({"status": "ok", "cleared_count": 1, "num_tensors": 1, "total_bytes": 64, "freed_bytes": 64});
    assert_eq!(cleared.json(), expected, "the storage holds one more, in the bytes that it takes");
    let missing = owner.ask("GET", "/data/never", "", b"");
    assert_eq!((missing.status, &missing.json()["status"]), (404, &json!("error")));
    assert!(missing.text().contains("never"));
    let batch = owner.ask("POST", "/data/batch", "", br#"{"shard_ids": ["never", "a", "gone"]}"#);
    assert_eq!(batch.status, 400);
    assert_eq!(batch.json()["missing_shard_ids"], json!(["never", "gone"]));
    assert_eq!(owner.ask("GET", "/data/a", "", b"").status, 200);
}

#[test]
fn requests_follow_each_other_on_one_connection_also_before_their_answers() {
    let owner = Owner::new();
    owner.store("a", b"abc");
    let mut raw = owner.connect();
    let fields = format!("Host: localhost\r\n{TAKES_SHARDS}");
    let both = format!("GET /data/a HTTP/1.1\r\n{fields}\r\n").repeat(2);
    raw.send(format!("{both}POST /data/batch HTTP/1.1\r\n{fields}Content-Length: 19\r\n\r\n").as_bytes());
    raw.send(br#"{"shard_ids":["a"]}HEAD /data/a HTTP/1.1"#);
    raw.send(format!("\r\n{fields}Connection: close\r\n\r\n").as_bytes());
    for _ in 0..3 {
        assert_eq!(raw.answer().body, shard(&meta("uint8", &[3]), b"abc"));
    }
    let head = raw.answer_to("HEAD");
    assert_eq!((head.field("Content-Length"), head.field("Connection")), (Some("35"), Some("close")));
    assert!(raw.is_closed());
    let mut old = owner.connect();
    old.send(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n");
    assert_eq!(old.answer().json(), json!({"status": "ok"}));
    assert!(old.is_closed());
}

#[test]
fn expect_100_continue_is_answered_before_the_body() {
    let owner = Owner::new();
    owner.store("a", b"abc");
    let body = br#"{"shard_ids": ["a"]}"#;
    let head = |fields: &str| {
        let length = body.len();
        format!("POST /data/batch HTTP/1.1\r\n{fields}Expect: 100-continue\r\nContent-Length: {length}\r\n\r\n")
    };
    let mut raw = owner.connect();
    raw.send(head("Host: localhost\r\n").as_bytes());
    assert_eq!(raw.answer().status, 100);
    raw.send(body);
    assert_eq!(raw.answer().status, 200);
    // Refused before the body: it does not come, and the connection ends.
    raw.send(head("Host: evil.example\r\n").as_bytes());
    assert_eq!(raw.answer().status, 403);
    assert!(raw.is_closed());
}

#[test]
fn stats_and_metrics_agree_with_the_store() {
    let owner = Owner::new();
    owner.store("a", &[7; 100]);
    let stats = owner.ask("GET", "/stats", "", b"").json();
    assert_eq!((&stats["storage"]["num_entries"], &stats["storage"]["total_bytes"]), (&json!(1), &json!(128)));
    assert_eq!(
        stats,
        serde_json::to_value(owner.store.stats())
            .map(|mut now| {
                now["storage"]["oldest_unclaimed_seconds"] = stats["storage"]["oldest_unclaimed_seconds"].clone();
                now
            })
            .unwrap()
    );
    let buffer = owner.ask("GET", "/buffer/stats", "", b"").json();
    assert_eq!((&buffer["num_entries"], &buffer["total_bytes"], &buffer["hits"]), (&json!(0), &json!(0), &json!(0)));
    let page = owner.ask("GET", "/metrics", "", b"");
    assert_eq!(page.field("Content-Type"), Some("application/openmetrics-text; version=1.0.0; charset=utf-8"));
    let page = page.text();
    let value = |name: &str| {
        let line = page.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
        line.unwrap_or_else(|| panic!("{name} in {page}")).rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    assert_eq!(value("tundish_rtensor_stored_tensors"), 1.0);
    assert_eq!(value("tundish_rtensor_stored_bytes"), 128.0);
    assert_eq!(value("tundish_rtensor_answers_total{status=\"200\"}"), 2.0);
    assert!(value("tundish_rtensor_received_bytes_total") > 132.0);
    // Each measure is told of once, with its type before its values.
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap();
        let name = name.strip_suffix("_total").unwrap_or(name);
        assert_eq!(page.matches(&format!("# TYPE {name} ")).count(), 1, "{line}");
    }
    assert_eq!(owner.ask("GET", "/health", "", b"").json(), json!({"status": "ok"}));
}

#[test]
fn a_removal_answers_removed_and_remaining_counts() {
    let owner = Owner::new();
    [("a", 100), ("b", 200), ("c", 1000)].iter().for_each(|(id, len)| owner.store(id, &vec![7; *len]));
    let answer = owner.ask("DELETE", "/data/clear", "", br#"{"shard_ids": ["b", "b", "never"]}"#).json();
    let told =
        ["status", "cleared_count", "freed_bytes", "num_tensors", "total_bytes"].map(|name| answer[name].clone());
    assert_eq!(told, [json!("ok"), json!(1), json!(256), json!(2), json!(128 + 1024)]);
}

#[test]
fn metrics_equal_the_stats() {
    let (owner, other, client) = (Owner::new(), Owner::new(), Client::of_sockets());
    ["a", "b", "c"].iter().for_each(|id| owner.store(id, &[7; 1000]));
    other.store("d", &[7; 5000]);
    within(20.0, |time_limit| {
        owner.store.begin_step(1, 1).unwrap();
        let wanted = [other.wanted("d", 5000)];
        let view = owner.store.fetch(&wanted, &client, time_limit).unwrap();
        owner.store.end_step(1);
        owner.store.begin_step(2, 1).unwrap();
        owner.store.claim(3, 1, &["a".parse().unwrap()]).unwrap();
        owner.store.fetch(&wanted, &client, time_limit).unwrap();
        owner.store.fetch(&wanted, &client, time_limit).unwrap();
        let page = owner.ask("GET", "/metrics", "", b"").text();
        let value = |name: &str| {
            let line = page
                .lines()
                .find_map(|line| line.strip_prefix("tundish_rtensor_")?.strip_prefix(name)?.strip_prefix(' '));
            line.unwrap_or_else(|| panic!("{name} in {page}")).parse::<f64>().unwrap()
        };
        let stats = owner.store.stats();
        let sides = [
            (
                ("stored", "storage"),
                stats.storage.num_entries,
                stats.storage.total_bytes,
                stats.storage.high_water_bytes,
                stats.storage.memory,
            ),
            (
                ("fetched", "buffer"),
                stats.buffer.num_entries,
                stats.buffer.total_bytes,
                stats.buffer.high_water_bytes,
                stats.buffer.memory,
            ),
        ];
        for ((tensors, side), entries, bytes, high_water, memory) in sides {
            for (name, expected) in [
                (format!("{tensors}_tensors"), entries),
                (format!("{tensors}_bytes"), bytes),
                (format!("{tensors}_high_water_bytes"), high_water),
                (format!("{side}_limit_bytes"), memory.limit_bytes),
                (format!("{side}_used_bytes"), memory.used_bytes),
                (format!("{side}_escaped_bytes"), memory.escaped_bytes),
                (format!("{side}_idle_bytes"), memory.idle_bytes),
                (format!("{side}_high_water_bytes"), memory.high_water_bytes),
            ] {
                assert_eq!(value(&name), expected as f64, "{name}");
            }
        }
        for (name, expected) in [
            ("unclaimed_tensors", 2),
            ("unclaimed_bytes", 2048),
            ("buffer_hits_total", 1),
            ("buffer_misses_total", 2),
            ("late_tensors_refused_total", 0),
            ("fetching_tensors", 0),
            ("open_steps", 2),
            // A shard that is claimed and one that was fetched.
            ("open_steps_held_bytes", 1024 + 5056),
            ("ended_steps_escaped_bytes", 5000),
        ] {
            assert_eq!(value(name), f64::from(expected), "{name}");
        }
        assert!(value("oldest_unclaimed_seconds") >= 0.0);
        drop(view);
    });
}

#[test]
fn memory_that_nobody_needs_for_a_while_goes_back_to_the_system() {
    let timeouts = Timeouts { memory: Duration::from_millis(20), ..Timeouts::default() };
    let (owner, other) = (Owner::with(None, timeouts), Owner::new());
    other.store("d", &[7; 1 << 20]);
    owner.store("a", &[7; 1 << 20]);
    within(20.0, |time_limit| {
        owner.store.fetch(&[other.wanted("d", 1 << 20)], &Client::of_sockets(), time_limit).map(drop).unwrap();
    });
    owner.store.remove(&["a".parse().unwrap(), "d".parse().unwrap()]);
    until("its idle memory is freed", || {
        let stats = owner.store.stats();
        stats.storage.memory.idle_bytes + stats.buffer.memory.idle_bytes == 0
    });
}

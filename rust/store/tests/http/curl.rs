//! The HTTP interface, used with curl.

use std::process::Command;

use serde_json::{Value, json};

use crate::common::pattern;
use crate::raw_http::{Owner, TAKES_SHARDS, meta, shard};

fn curl(arguments: &[&str]) -> Vec<u8> {
    let output = Command::new("curl").args(["--silent", "--show-error", "--max-time", "20"]).args(arguments).output();
    let output = output.expect("curl is installed");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn json_of(arguments: &[&str]) -> Value {
    let output = curl(arguments);
    serde_json::from_slice(&output).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output)))
}

#[test]
fn curl_speaks_it() {
    let owner = Owner::new();
    let base = format!("http://{}", owner.address());
    let url = |path: &str| format!("{base}{path}");
    let as_they_are = ["--header", TAKES_SHARDS.trim_end()];
    let shards = |arguments: &[&str]| curl(&[&as_they_are[..], arguments].concat());
    let bytes = pattern(1, 3 << 20);
    let body = shard(&meta("int16", &[3 << 19]), &bytes);
    owner.put("a:1", meta("int16", &[3 << 19]), &bytes);
    owner.put("b", meta("int8", &[2]), &[1, 2]);
    assert_eq!(shards(&[&url("/data/a:1")]), body);
    let tensor = json_of(&[&url("/data/a:1")]);
    assert_eq!((&tensor["dtype"], &tensor["shape"]), (&json!("torch.int16"), &json!([3 << 19])));
    let batch = ["--data", r#"{"shard_ids": ["b", "a:1", "b"]}"#, &url("/data/batch")];
    let b = shard(&meta("int8", &[2]), &[1, 2]);
    assert_eq!(shards(&batch), [&b[..], &body, &b].concat());
    assert_eq!(json_of(&batch)[2]["data"], "AQI=");
    let status = ["--output", "/dev/null", "--write-out", "%{http_code}"];
    assert_eq!(curl(&[&status[..], &[&url("/data/none")]].concat()), b"404");
    // Two requests on one connection.
    assert_eq!(shards(&[&url("/data/b"), &url("/data/b")]), [&b[..], &b].concat());
    let clear = ["--request", "DELETE", "--data", r#"{"shard_ids": ["a:1"]}"#, &url("/data/clear")];
    assert_eq!(json_of(&clear)["cleared_count"], 1);
    assert_eq!(json_of(&["--request", "DELETE", &url("/buffer/clear")])["cleared_count"], 0);
    assert_eq!(json_of(&["--request", "POST", &url("/step/5/end")])["step"], 5);
    assert_eq!(json_of(&[&url("/stats")])["storage"]["num_entries"], 1);
    let head = String::from_utf8(shards(&["--head", &url("/data/b")])).unwrap();
    assert!(
        head.starts_with("HTTP/1.1 200 OK\r\n") && head.to_lowercase().contains("content-length: 34\r\n"),
        "{head}"
    );
    assert!(String::from_utf8(curl(&[&url("/metrics")])).unwrap().contains("tundish_rtensor_stored_tensors"));
}

//! Reads arbitrary bytes as what comes over the network: paths, ranges and JSON of requests, and heads of responses.
#![no_main]
#![expect(clippy::disallowed_methods, reason = "the macro writes what it was given to a file, where it is told to")]

use libfuzzer_sys::fuzz_target;
use tundish_store::http::{Asked, Method, ResponseHead, Route, read_batch, read_ids, read_tensor};

fuzz_target!(|data: &[u8]| {
    if let Ok(text) = std::str::from_utf8(data) {
        for method in [Method::GET, Method::PUT, Method::POST, Method::DELETE] {
            let _ = Route::of(&method, text);
        }
        if let Some(range) = Asked::parse(text).and_then(|range| range.of(1000)) {
            assert!(range.start < range.end && range.end <= 1000);
        }
    }
    if let Ok(Some((_, length))) = ResponseHead::parse(data) {
        assert!(length <= data.len());
        for end in 0..length {
            assert!(!matches!(ResponseHead::parse(&data[..end]), Ok(Some(_))), "part of a head is no other head");
        }
    }
    if let Ok((meta, bytes)) = read_tensor(data) {
        assert_eq!(meta.nbytes(), bytes.len() as u64);
    }
    if let (Ok(batch), Ok(ids)) = (read_batch(data), read_ids(data)) {
        assert_eq!(batch.len(), ids.map_or(0, |ids| ids.len()));
    }
});

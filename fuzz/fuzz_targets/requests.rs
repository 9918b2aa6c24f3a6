//! Reads arbitrary bytes as what comes over the network: paths and JSON of requests.
#![no_main]
#![expect(clippy::disallowed_methods, reason = "the macro writes what it was given to a file, where it is told to")]

use libfuzzer_sys::fuzz_target;
use tundish_store::http::{Method, Route, read_batch, read_ids};

fuzz_target!(|data: &[u8]| {
    if let Ok(text) = std::str::from_utf8(data) {
        for method in [Method::GET, Method::PUT, Method::POST, Method::DELETE] {
            let _ = Route::of(&method, text);
        }
    }
    if let (Ok(batch), Ok(ids)) = (read_batch(data), read_ids(data)) {
        assert_eq!(batch.len(), ids.map_or(0, |ids| ids.len()));
    }
});

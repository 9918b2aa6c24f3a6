//! Reads arbitrary bytes as what comes over the wire: heads of requests and answers, and bodies of JSON.
//!
//! What is read has to be what a strict reader would read: it is written down again and read once more.
#![no_main]
#![expect(clippy::disallowed_methods, reason = "the macro writes what it was given to a file, where it is told to")]

use libfuzzer_sys::fuzz_target;
use tundish_store::http::{AnswerHead, RequestHead, Route, read_batch, read_ids, read_tensor};

fuzz_target!(|data: &[u8]| {
    if let Ok(Some((head, length))) = RequestHead::parse(data) {
        assert!(length <= data.len());
        for end in 0..length {
            assert!(matches!(RequestHead::parse(&data[..end]), Ok(None)), "part of a head is no other head");
        }
        let _ = Route::of(head.method, &head.path);
        if let Some(range) = head.range.and_then(|range| range.of(1000)) {
            assert!(range.start < range.end && range.end <= 1000);
        }
    }
    if let Ok(Some((_, length))) = AnswerHead::parse(data) {
        assert!(length <= data.len());
    }
    if let Ok((meta, bytes)) = read_tensor(data) {
        assert_eq!(meta.nbytes(), bytes.len() as u64);
    }
    if let (Ok(batch), Ok(ids)) = (read_batch(data), read_ids(data)) {
        assert_eq!(batch.len(), ids.map_or(0, |ids| ids.len()));
    }
});

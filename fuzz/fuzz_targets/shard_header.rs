//! Reads arbitrary bytes as the header of a shard. What is read is written again as it was.
#![no_main]
#![expect(clippy::disallowed_methods, reason = "the macro writes what it was given to a file, where it is told to")]

use libfuzzer_sys::fuzz_target;
use tundish_store::http::{Payload, ShardHeader};

fuzz_target!(|data: &[u8]| {
    let Ok(Some((header, length))) = ShardHeader::read(data) else { return };
    let mut written = Vec::new();
    header.write(&mut written);
    assert_eq!(written.len(), length);
    // A reference has no checksum, whatever stands there.
    let (from, to) = match header.payload {
        Payload::Bytes(_) => (0, 0),
        Payload::SegmentRange(_) => (16, 24),
    };
    assert_eq!((&written[..from], &written[to..]), (&data[..from], &data[to..length]));
    for end in 0..length {
        assert_eq!(ShardHeader::read(&data[..end]).expect("begun well"), None);
    }
});

//! Written handles are read back; bytes from elsewhere are read or refused.

use proptest::prelude::*;

use super::*;
use crate::error::StoreError;
use crate::tensor_meta::Dtype;

fn handle(nonce: u64, counter: u64, name: Option<&str>, dtype: &str, shape: &[u64], rows: Option<Rows>) -> ShardHandle {
    let meta = TensorMeta::new(Dtype::from_name(dtype).unwrap(), shape).unwrap();
    let id = name.map_or_else(|| ShardId::numbered(nonce, counter), |name| name.parse().unwrap());
    let owner = format!("10.0.0.{}:80", nonce % 3).into();
    ShardHandle { id, shared: Arc::new(SharedFields { owner, meta: Arc::new(meta) }), rows: rows.map(Box::new) }
}

fn written(values: &[Value<'_>]) -> Vec<u8> {
    let mut writer = HandleWriter::new();
    for value in values {
        writer.write(value).unwrap();
    }
    writer.finish()
}

fn read_all(bytes: &[u8]) -> Result<usize, StoreError> {
    let mut reader = HandleReader::new(bytes)?;
    let mut count = 0;
    while reader.at < reader.bytes.len() {
        reader.read()?;
        count += 1;
    }
    reader.finish().map(|()| count)
}

fn handles() -> impl Strategy<Value = ShardHandle> {
    let ids = (0u64..4, prop_oneof![0u64..5, any::<u64>()], proptest::option::of("[a-z.:]{1,20}"));
    let metas =
        (prop_oneof![Just("float32"), Just("bfloat16"), Just("bool")], proptest::collection::vec(0u64..9, 0..4));
    (ids, metas, any::<bool>()).prop_map(|((nonce, counter, name), (dtype, shape), cut)| {
        let rows = shape.first().filter(|_| cut).map(|&rows| rows / 3..rows);
        handle(nonce, counter, name.as_deref(), dtype, &shape, rows)
    })
}

proptest! {
    #[test]
    fn written_values_are_read(
        handles in proptest::collection::vec(handles(), 0..40),
        numbers in proptest::collection::vec(any::<i64>(), 0..9),
        floats in proptest::collection::vec(-1e300f64..1e300, 0..9),
        texts in proptest::collection::vec(".{0,80}", 0..9),
    ) {
        let mut values = vec![Value::None, Value::Bool(true), Value::Bool(false), Value::Bytes(b"\x00\xff")];
        values.extend(handles.iter().cloned().map(Value::Handle));
        values.extend(numbers.iter().map(|&number| Value::Integer(number)));
        values.extend(floats.iter().map(|&number| Value::Float(number)));
        values.extend(texts.iter().chain(&texts).map(|text| Value::Text(text)));
        values.push(Value::LargeInteger(&[1, 2, 3]));
        let bytes = written(&values);
        let mut reader = HandleReader::new(&bytes).unwrap();
        for value in &values {
            prop_assert_eq!(&reader.read().unwrap(), value);
        }
        reader.finish().unwrap();
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = read_all(&[MAGIC, &bytes[..]].concat());
        prop_assert!(bytes.starts_with(MAGIC) || read_all(&bytes).is_err());
    }

    #[test]
    fn damaged_bytes_are_read_or_refused(
        handles in proptest::collection::vec(handles(), 1..20), place: prop::sample::Index, byte: u8,
    ) {
        let mut bytes = written(&handles.into_iter().map(Value::Handle).collect::<Vec<_>>());
        let place = place.index(bytes.len());
        bytes[place] = byte;
        let _ = read_all(&bytes);
    }

    #[test]
    fn truncated_handles_are_refused(handle in handles(), cut: prop::sample::Index) {
        let bytes = written(&[Value::Handle(handle)]);
        let length = MAGIC.len() + cut.index(bytes.len() - MAGIC.len());
        let mut reader = HandleReader::new(&bytes[..length]).unwrap();
        prop_assert!(reader.read().is_err());
    }
}

#[test]
fn a_handle_takes_40_bytes() {
    assert_eq!(size_of::<ShardHandle>(), 40);
}

#[test]
fn every_type_is_read_as_it_was_written() {
    for dtype in Dtype::all() {
        let bytes = written(&[Value::Handle(handle(7, 1, None, dtype.name(), &[4], None))]);
        let Value::Handle(read) = HandleReader::new(&bytes).unwrap().read().unwrap() else { panic!("{dtype:?}") };
        assert_eq!(read.shared.meta.dtype(), dtype);
    }
}

#[test]
fn a_row_of_shards_takes_a_byte_each() {
    let handles = (0..100_000).map(|counter| Value::Handle(handle(7, counter, None, "float32", &[4, 8], None)));
    assert!(written(&handles.collect::<Vec<_>>()).len() < 100_100);
}

#[test]
fn lengths_beyond_the_bytes_are_refused_before_room_is_made() {
    for tag in [LIST, TUPLE, DICT, BYTES, TEXT, LARGE_INTEGER] {
        let bytes = [MAGIC, &[tag, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f][..]].concat();
        let refused = HandleReader::new(&bytes).unwrap().read();
        assert!(matches!(&refused, Err(StoreError::Invalid(why)) if why.contains("cut short")), "{refused:?}");
    }
}

#[test]
fn valid_addresses_are_written_and_read_and_invalid_ones_refused() {
    let of = |owner: &str| {
        let mut one = handle(1, 1, Some("a"), "int8", &[4], None);
        one.shared = Arc::new(SharedFields { owner: owner.into(), meta: Arc::clone(&one.shared.meta) });
        one
    };
    // As if they had been written.
    let told = |owner: &str| {
        let bytes = written(&[Value::Handle(of("?"))]);
        let place = bytes.windows(2).position(|two| two == [1, b'?']).unwrap();
        assert!(owner.len() < 128 * 128);
        let length = [owner.len() as u8 | 0x80, (owner.len() >> 7) as u8];
        [&bytes[..place], &length, owner.as_bytes(), &bytes[place + 2..]].concat()
    };
    for right in ["local", "[::1]:80", "fe80::1%eth0:1", "", &"h".repeat(300)] {
        check_owner(right).unwrap();
        assert_eq!(HandleReader::new(&told(right)).unwrap().read().unwrap(), Value::Handle(of(right)));
        let bytes = written(&[Value::Handle(of(right))]);
        assert_eq!(HandleReader::new(&bytes).unwrap().read().unwrap(), Value::Handle(of(right)));
    }
    for wrong in ["h x:1", "h:1\n", "ä:1", "\u{fffd}", "h\0:1", &"h".repeat(301)] {
        let refused = [
            check_owner(wrong).unwrap_err(),
            HandleWriter::new().handle(&of(wrong)).unwrap_err(),
            HandleReader::new(&told(wrong)).unwrap().read().unwrap_err(),
        ];
        assert!(refused.iter().all(|why| why.to_string().contains("host:port, up to 300 ASCII")), "{refused:?}");
    }
    let mut writer = HandleWriter::new();
    writer.handle(&of("local")).unwrap();
    writer.handle(&of("h x:1")).unwrap_err();
}

#[test]
fn rows_that_a_shard_has_not_got_are_refused() {
    let mut wrong = handle(1, 1, None, "int8", &[4], None);
    wrong.rows = Some(Box::new(2..5));
    let bytes = written(&[Value::Handle(wrong)]);
    assert!(HandleReader::new(&bytes).unwrap().read().is_err());
}

//! The header before the bytes of each shard: element type, shape, length and checksum.
//!
//! Little-endian, as the bytes of tensors are on every machine that torch runs on:
//!
//! | bytes | meaning |
//! |---|---|
//! | 4 | `TSHD` |
//! | 1 | version, 1 |
//! | 1 | element type: the code of torch's `c10::ScalarType` |
//! | 1 | dimensions, up to 64 |
//! | 1 | 0: the bytes follow; 1: a reference to them does |
//! | 8 | bytes of the shard |
//! | 8 | their CRC-64/NVME; 0 before a reference |
//! | 8 each | the dimensions |
//!
//! A reference: process (4), descriptor there (4), identity, generation and offset in the segment (8 each).

use tundish_shm::SegmentAddress;

use crate::error::StoreError;
use crate::memory::attached_segments::SegmentRange;
use crate::tensor_meta::{Dtype, Shape, TensorMeta};

const MAGIC: [u8; 4] = *b"TSHD";
const VERSION: u8 = 1;

const BYTES_FOLLOW: u8 = 0;
const REFERENCE_FOLLOWS: u8 = 1;

/// The header before the bytes of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardHeader {
    /// Element type and shape.
    pub meta: TensorMeta,
    /// The bytes or a reference.
    pub payload: Payload,
}

/// The form in which a shard is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// The bytes of the shard follow, and have this checksum.
    Bytes(u64),
    /// The bytes of the shard are in memory of this node.
    SegmentRange(SegmentRange),
}

impl ShardHeader {
    /// Appends the header to `target`.
    pub fn write(&self, target: &mut Vec<u8>) {
        let (form, checksum) = match self.payload {
            Payload::Bytes(checksum) => (BYTES_FOLLOW, checksum),
            Payload::SegmentRange(_) => (REFERENCE_FOLLOWS, 0),
        };
        let shape = self.meta.shape();
        let dimensions = u8::try_from(shape.len()).expect("a tensor has at most 64 dimensions");
        target.extend(MAGIC);
        target.extend([VERSION, self.meta.dtype().code(), dimensions, form]);
        target.extend(self.meta.nbytes().to_le_bytes());
        target.extend(checksum.to_le_bytes());
        shape.iter().for_each(|size| target.extend(size.to_le_bytes()));
        if let Payload::SegmentRange(SegmentRange { address, offset, .. }) = self.payload {
            target.extend(address.process.to_le_bytes());
            target.extend(address.descriptor.to_le_bytes());
            [address.identity, address.generation, offset].iter().for_each(|word| target.extend(word.to_le_bytes()));
        }
    }

    /// The header as it is sent.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.write(&mut bytes);
        bytes
    }

    /// The header that `bytes` begin with, and its length; `None` where they end before it does.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] where they begin with something else.
    pub fn read(bytes: &[u8]) -> Result<Option<(Self, usize)>, StoreError> {
        let begun = bytes.len().min(MAGIC.len());
        if bytes[..begun] != MAGIC[..begun] {
            return Err(StoreError::Invalid("it does not begin like a shard".to_owned()));
        }
        let mut rest = ByteReader(&bytes[begun..]);
        let Some([version, dtype, dimensions, form]) = rest.take() else { return Ok(None) };
        if version != VERSION {
            let reason = format!("it is of version {version}, and this library knows version {VERSION}");
            return Err(StoreError::Invalid(reason));
        }
        let (Some(length), Some(checksum)) = (rest.word(), rest.word()) else { return Ok(None) };
        let shape: Option<Shape> = (0..dimensions).map(|_| rest.word()).collect();
        let Some(shape) = shape else { return Ok(None) };
        let meta = TensorMeta::new(Dtype::from_code(dtype)?, shape)?;
        if length != meta.nbytes() {
            let nbytes = meta.nbytes();
            return Err(StoreError::Invalid(format!("a {meta:?} has {nbytes} bytes, and it announces {length}")));
        }
        let payload = match form {
            BYTES_FOLLOW => Payload::Bytes(checksum),
            REFERENCE_FOLLOWS => match rest.reference(length) {
                Some(reference) => Payload::SegmentRange(reference),
                None => return Ok(None),
            },
            other => return Err(StoreError::Invalid(format!("this library knows no form {other} of a shard"))),
        };
        Ok(Some((ShardHeader { meta, payload }, bytes.len() - rest.0.len())))
    }
}

/// Takes words off some bytes.
struct ByteReader<'a>(&'a [u8]);

impl ByteReader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*taken)
    }

    fn word(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn reference(&mut self, len: u64) -> Option<SegmentRange> {
        let (process, descriptor) = (u32::from_le_bytes(self.take()?), i32::from_le_bytes(self.take()?));
        let address = SegmentAddress { process, descriptor, identity: self.word()?, generation: self.word()? };
        Some(SegmentRange { address, offset: self.word()?, len })
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn header(dtype: usize, shape: &[u64], checksum: u64, reference: Option<[u64; 4]>) -> ShardHeader {
        let dtypes: Vec<_> = Dtype::all().collect();
        let meta = TensorMeta::new(dtypes[dtype % dtypes.len()], shape).unwrap();
        let payload = match reference {
            None => Payload::Bytes(checksum),
            Some([place, identity, generation, offset]) => {
                let (process, descriptor) = ((place >> 32) as u32, (place as u32).cast_signed());
                let address = SegmentAddress { process, descriptor, identity, generation };
                Payload::SegmentRange(SegmentRange { address, offset, len: meta.nbytes() })
            }
        };
        ShardHeader { meta, payload }
    }

    fn written(header: &ShardHeader) -> Vec<u8> {
        let mut bytes = Vec::new();
        header.write(&mut bytes);
        bytes
    }

    #[test]
    fn its_bytes_are_those_of_the_table() {
        let meta = TensorMeta::new(Dtype::from_name("bfloat16").unwrap(), &[3u64, 258][..]).unwrap();
        let bytes = written(&ShardHeader { meta, payload: Payload::Bytes(0x0102_0304_0506_0708) });
        let expected: [&[u8]; 6] = [
            b"TSHD\x01\x0f\x02\x00",
            &[0x0c, 0x06, 0, 0, 0, 0, 0, 0],
            &[8, 7, 6, 5, 4, 3, 2, 1],
            &[3, 0, 0, 0, 0, 0, 0, 0],
            &[2, 1, 0, 0, 0, 0, 0, 0],
            &[],
        ];
        assert_eq!(bytes, expected.concat());
    }

    #[test]
    fn inconsistent_headers_are_refused() {
        let good = written(&header(6, &[2, 3], 7, None));
        for (place, value, says) in
            [(0, b'X', "begin"), (4, 2, "version"), (5, 12, "code"), (7, 2, "form"), (8, 1, "announces")]
        {
            let mut bad = good.clone();
            bad[place] = value;
            let error = ShardHeader::read(&bad).unwrap_err().to_string();
            assert!(error.contains(says), "{place}: {error}");
        }
        let mut large = good;
        large[30..32].fill(0xff);
        assert!(ShardHeader::read(&large).unwrap_err().to_string().contains("larger"));
    }

    proptest! {
        #[test]
        fn a_written_header_is_read(
            dtype: usize,
            shape in vec(0u64..9, 0..18),
            checksum: u64,
            reference: Option<[u64; 4]>,
            behind in vec(any::<u8>(), 0..40),
        ) {
            let header = header(dtype, &shape, checksum, reference);
            let mut bytes = written(&header);
            let length = bytes.len();
            for end in 0..length {
                prop_assert_eq!(ShardHeader::read(&bytes[..end]).unwrap(), None);
            }
            bytes.extend(behind);
            prop_assert_eq!(ShardHeader::read(&bytes).unwrap(), Some((header, length)));
        }

        #[test]
        fn any_bytes_are_read_or_refused(mut bytes in vec(any::<u8>(), 0..200), is_begun: bool) {
            if is_begun {
                bytes.splice(0..0, *b"TSHD\x01\x06");
            }
            if let Ok(Some((header, length))) = ShardHeader::read(&bytes) {
                prop_assert_eq!(&written(&header)[24..], &bytes[24..length]);
            }
        }
    }
}

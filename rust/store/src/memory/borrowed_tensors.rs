//! Tensors to be stored, and shards that a server sends.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::OnceLock;

use crate::error::StoreError;
use crate::memory::segment_range::SegmentRange;
use crate::memory::tensor::{Location, Tensor};
use crate::tensor_meta::TensorMeta;

/// A tensor to be stored: its bytes lie one after the other.
#[derive(Debug)]
pub struct TensorToStore<'a> {
    pub(crate) meta: TensorMeta,
    pub(crate) start: *const u8,
    bytes: PhantomData<&'a [u8]>,
}

// SAFETY: a source is an address that can be read as long as it lives, from any thread.
unsafe impl Send for TensorToStore<'_> {}
// SAFETY: as above.
unsafe impl Sync for TensorToStore<'_> {}

impl<'a> TensorToStore<'a> {
    /// These bytes.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] where they are not as many as `meta` says.
    pub fn new(meta: TensorMeta, bytes: &'a [u8]) -> Result<Self, StoreError> {
        if bytes.len() as u64 != meta.nbytes() {
            let (expected, found) = (meta.nbytes(), bytes.len());
            return Err(StoreError::Invalid(format!("a {meta:?} has {expected} bytes, not {found}")));
        }
        Ok(TensorToStore { meta, start: bytes.as_ptr(), bytes: PhantomData })
    }

    /// The `meta.nbytes()` bytes at `start`.
    ///
    /// # Safety
    /// They can be read as long as `'a`. If they change while they are stored, the shard mixes old and new bytes.
    pub unsafe fn from_raw(meta: TensorMeta, start: *const u8) -> Self {
        TensorToStore { meta, start, bytes: PhantomData }
    }
}

/// Stored bytes on their way out. They live as long as this, also when their shard is removed meanwhile.
#[derive(Clone, Debug)]
pub struct OutgoingShard(pub(crate) Tensor);

impl OutgoingShard {
    /// Element type and shape.
    pub fn meta(&self) -> &TensorMeta {
        &self.0.meta
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    /// Where the [`RunningChecksum`](crate::RunningChecksum) of a whole shard is kept from its first transfer on;
    /// `None` of rows of one.
    pub fn checksum(&self) -> Option<&OnceLock<u64>> {
        self.0.checksum.as_deref()
    }

    /// Where processes of this node find them; `None` where there are none.
    pub fn reference(&self) -> Option<SegmentRange> {
        match &self.0.location {
            Location::Here(slab_range) => Some(SegmentRange {
                address: slab_range.slab.address(),
                offset: slab_range.offset,
                len: slab_range.len,
            }),
            Location::Nowhere | Location::Attached(_) => None,
        }
    }
}

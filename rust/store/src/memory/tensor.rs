//! Tensors: to be stored, as they are stored or fetched, and as a server sends them.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use crate::error::StoreError;
use crate::memory::attached_segments::{AttachedRange, SegmentRange};
use crate::memory::slab::{SlabRange, padded};
use crate::selection::Selection;
use crate::tensor_meta::TensorMeta;

/// The location of bytes.
#[derive(Clone, Debug)]
pub(crate) enum Location {
    /// There are none.
    Nowhere,
    /// In a slab of this process.
    Here(SlabRange),
    /// In memory of another process of this node.
    Attached(AttachedRange),
}

/// A stored or fetched tensor.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) meta: TensorMeta,
    pub(crate) location: Location,
    /// The checksum of a stored tensor, once somebody computed it. Rows of a tensor have none.
    pub(crate) checksum: Option<Arc<OnceLock<u64>>>,
}

impl Tensor {
    /// A fetched tensor.
    pub(crate) fn fetched(meta: TensorMeta, location: Location) -> Self {
        Tensor { meta, location, checksum: None }
    }

    /// A stored tensor.
    pub(crate) fn stored(meta: TensorMeta, location: Location) -> Self {
        Tensor { meta, location, checksum: Some(Arc::default()) }
    }

    /// Bytes that it is accounted with.
    pub(crate) fn charge(&self) -> u64 {
        padded(self.meta.nbytes())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.location {
            Location::Nowhere => &[],
            Location::Here(slab_range) => slab_range.bytes(),
            Location::Attached(attached) => attached.bytes(),
        }
    }

    /// These rows of it.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] where it has no such rows.
    pub(crate) fn select(self, rows: &Selection) -> Result<Self, StoreError> {
        if *rows == Selection::All {
            return Ok(self);
        }
        let meta = rows.meta_of(&self.meta)?;
        let start = rows.first() * self.meta.row_bytes().unwrap_or_default();
        let location = if meta.nbytes() == 0 { Location::Nowhere } else { self.location.slice(start, meta.nbytes()) };
        Ok(Tensor::fetched(meta, location))
    }
}

impl Location {
    /// The `len` bytes from `start` on.
    fn slice(self, start: u64, len: u64) -> Self {
        match self {
            Location::Nowhere => Location::Nowhere,
            Location::Here(slab_range) => {
                Location::Here(SlabRange { offset: slab_range.offset + start, len, ..slab_range })
            }
            Location::Attached(attached) => {
                Location::Attached(AttachedRange { offset: attached.offset + start, len, ..attached })
            }
        }
    }
}

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

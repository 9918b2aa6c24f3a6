//! A stored or fetched tensor: type, shape and location.

use std::sync::{Arc, OnceLock};

use crate::error::StoreError;
use crate::memory::attached_segments::AttachedRange;
use crate::memory::slab::{SlabRange, taken};
use crate::tensor_meta::TensorMeta;
use crate::shard_id::Rows;

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
    /// Of a stored one, as soon as somebody summed it; rows of it have none.
    pub(crate) checksum: Option<Arc<OnceLock<u64>>>,
}

impl Tensor {
    /// One that was fetched.
    pub(crate) fn fetched(meta: TensorMeta, location: Location) -> Self {
        Tensor { meta, location, checksum: None }
    }

    /// One that is stored.
    pub(crate) fn stored(meta: TensorMeta, location: Location) -> Self {
        Tensor { meta, location, checksum: Some(Arc::default()) }
    }

    /// Bytes that it is accounted with.
    pub(crate) fn charge(&self) -> u64 {
        taken(self.meta.nbytes())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.location {
            Location::Nowhere => &[],
            Location::Here(place) => place.bytes(),
            Location::Attached(lent) => lent.bytes(),
        }
    }

    /// Rows of it, where it has those from `first` on.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] where it has not.
    pub(crate) fn cut(self, first: u64, rows: Option<&Rows>) -> Result<Self, StoreError> {
        let Some(rows) = rows else { return Ok(self) };
        let here = rows.start.saturating_sub(first)..rows.end.saturating_sub(first);
        let meta = self.meta.cut(Some(&here))?;
        let start = here.start * self.meta.row_bytes().unwrap_or_default();
        let location = if meta.nbytes() == 0 { Location::Nowhere } else { self.location.cut(start, meta.nbytes()) };
        Ok(Tensor::fetched(meta, location))
    }
}

impl Location {
    fn cut(self, start: u64, len: u64) -> Self {
        match self {
            Location::Nowhere => Location::Nowhere,
            Location::Here(place) => Location::Here(SlabRange { offset: place.offset + start, len, ..place }),
            Location::Attached(lent) => Location::Attached(AttachedRange { offset: lent.offset + start, len, ..lent }),
        }
    }
}

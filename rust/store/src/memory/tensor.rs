//! A stored or fetched tensor: type, shape and location.

use std::sync::{Arc, OnceLock};

use crate::error::StoreError;
use crate::memory::attached_segments::AttachedRange;
use crate::memory::slab::{SlabRange, padded};
use crate::shard_id::Rows;
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

    /// Rows of it, where it has those from `first` on.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] where it has not.
    pub(crate) fn select_rows(self, first: u64, rows: Option<&Rows>) -> Result<Self, StoreError> {
        let Some(rows) = rows else { return Ok(self) };
        let here = rows.start.saturating_sub(first)..rows.end.saturating_sub(first);
        let meta = self.meta.select_rows(Some(&here))?;
        let start = here.start * self.meta.row_bytes().unwrap_or_default();
        let location =
            if meta.nbytes() == 0 { Location::Nowhere } else { self.location.select_rows(start, meta.nbytes()) };
        Ok(Tensor::fetched(meta, location))
    }
}

impl Location {
    fn select_rows(self, start: u64, len: u64) -> Self {
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

//! Attached segments of other processes of this node, with fetched shards in them.
//!
//! It owns nothing: an [`Attachment`] lives as long as an entry or a view needs it, and is its lease.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tundish_shm::attachment::{Attachment, attach_unregistered};
use tundish_shm::{SegmentAddress, ShmError};

use crate::error::StoreError;

/// From so many entries on, dead ones are removed before one is added.
const CROWDED: usize = 64;

/// A part of a segment, for processes of the same node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentRange {
    /// The segment.
    pub address: SegmentAddress,
    /// The offset of the part in its data.
    pub offset: u64,
    /// Bytes of the part.
    pub len: u64,
}

/// The position of a tensor in another process's segment.
#[derive(Clone, Debug)]
pub(crate) struct AttachedRange {
    pub(crate) segment: Arc<Attachment>,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl AttachedRange {
    /// The bytes. The owner wrote them before it sent the reference, and promises not to write to them again.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: within the data, as was checked when this was made; mapped as long as the segment is attached.
        unsafe { std::slice::from_raw_parts(self.segment.data().add(self.offset as usize), self.len as usize) }
    }
}

/// The attached segments, by identity and generation.
#[derive(Debug, Default)]
pub(crate) struct AttachedSegments(Mutex<HashMap<(u64, u64), Weak<Attachment>>>);

impl AttachedSegments {
    /// The part of a segment that `reference` names.
    ///
    /// # Errors
    /// [`StoreError::Memory`] where the segment cannot be reached, or is smaller than the reference says.
    pub(crate) fn reach(&self, reference: &SegmentRange) -> Result<AttachedRange, StoreError> {
        let SegmentRange { address, offset, len } = *reference;
        let segment = match self.find(&address) {
            Some(segment) => segment,
            None => self.add(&address, attach_unregistered(&address)?),
        };
        if offset.checked_add(len).is_none_or(|end| end > segment.header().data_len as u64) {
            let reason = format!("bytes {offset} to {offset} + {len} do not lie in its {}", segment.header().data_len);
            let segment = format!("the segment with descriptor {} of process {}", address.descriptor, address.process);
            return Err(ShmError::NotASegment { segment, reason }.into());
        }
        Ok(AttachedRange { segment, offset, len })
    }

    fn find(&self, address: &SegmentAddress) -> Option<Arc<Attachment>> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(&(address.identity, address.generation))?.upgrade()
    }

    fn add(&self, address: &SegmentAddress, attached: Attachment) -> Arc<Attachment> {
        let attached = Arc::new(attached);
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= CROWDED && known.len() == known.capacity() {
            known.retain(|_, attached| attached.strong_count() > 0);
        }
        known.insert((address.identity, address.generation), Arc::downgrade(&attached));
        attached
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::memory::tensor::TensorToStore;
    use crate::selection::{Selection, ShardRows};
    use crate::stats::Limits;
    use crate::tensor_meta::{Dtype, TensorMeta};
    use crate::tensor_store::TensorStore;
    use crate::time_limit::TimeLimit;

    #[test]
    fn detached_segments_are_forgotten() {
        let owner = TensorStore::new(Limits { storage_bytes: 16 << 20, buffer_bytes: 1 << 20 });
        let attached_segments = AttachedSegments::default();
        let (mut check_cancelled, bytes) = (|| Ok(()), [7; 300_000]);
        let time_limit = &mut TimeLimit::new(Instant::now() + Duration::from_secs(60), &mut check_cancelled);
        let meta = TensorMeta::new(Dtype::from_name("uint8").unwrap(), [bytes.len() as u64].as_slice()).unwrap();
        // Each time it is the same memory, given out anew.
        for _ in 0..10 * CROWDED {
            let ids = owner.put(&[TensorToStore::new(meta.clone(), &bytes).unwrap()], time_limit).unwrap();
            let found = owner.look_up(&[ShardRows { id: ids[0].clone(), rows: Selection::All }]).unwrap();
            let lent = attached_segments.reach(&found[0].reference().unwrap()).unwrap();
            assert_eq!(lent.bytes(), bytes);
            drop((lent, found));
            owner.remove(&ids);
        }
        assert!(attached_segments.0.lock().unwrap().len() <= 4 * CROWDED);
    }
}

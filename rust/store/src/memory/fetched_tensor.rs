//! A fetched tensor as a consumer gets it: memory that it may write to and nobody else sees.
//!
//! A [`FetchedTensor`] owns a share of a private mapping, or a copy.
//!
//! Invariants: as long as a view lives, the memory behind it is not used for anything else. Its bytes count as viewed
//! in the step that it was handed out in. It stays valid in a child made by `fork`.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tundish_shm::PrivateMapping;

use crate::entries::by_step::Viewed;
use crate::memory::slab::ALIGNMENT;
use crate::memory::tensor::{Location, Tensor};
use crate::tensor_meta::TensorMeta;

/// A copy of up to so many bytes is faster than a mapping of the slab, and keeps none of it.
const MAX_COPIED: u64 = 64 << 10;

/// The kernel lets a process have 65530 mappings, and ends it in the oddest places when it has more.
const MAX_MAPPINGS: usize = 16 << 10;

static MAPPINGS: AtomicUsize = AtomicUsize::new(0);

/// The bytes of a tensor that was asked for: to be read and to be written, by its holder alone. Its pages are shared
/// with others until they are written to.
#[derive(Debug)]
pub struct FetchedTensor {
    meta: TensorMeta,
    start: NonNull<u8>,
    _memory: Memory,
    viewed: Viewed,
}

// SAFETY: the memory is the view's own; its holder alone writes to it.
unsafe impl Send for FetchedTensor {}
// SAFETY: as above.
unsafe impl Sync for FetchedTensor {}

#[derive(Clone, Debug)]
enum Memory {
    Empty,
    Mapped { _mapping: Arc<SlabMapping> },
    Copied { _blocks: Arc<[MaybeUninit<AlignedUnit>]> },
}

/// A unit as large as the alignment of tensors.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct AlignedUnit {
    _bytes: [u8; ALIGNMENT as usize],
}

/// A private mapping, which is counted. Of a fresh one the pages are found when they are read, sixteen by a fault: to
/// have all of them mapped beforehand takes longer.
#[derive(Debug)]
struct SlabMapping(PrivateMapping);

impl SlabMapping {
    /// `None` where there are too many, or the system has no space for it: a copy will do.
    fn new(location: &Location, range: Range<u64>) -> Option<Self> {
        if MAPPINGS.fetch_add(1, Ordering::Relaxed) < MAX_MAPPINGS {
            let bytes = range.start as usize..range.end as usize;
            let mapping = match location {
                Location::Here(slab_range) => slab_range.slab.private_mapping(bytes).ok(),
                Location::Attached(attached) => attached.segment.private(bytes).ok(),
                Location::Nowhere => None,
            };
            if let Some(mapping) = mapping {
                return Some(SlabMapping(mapping));
            }
        }
        MAPPINGS.fetch_sub(1, Ordering::Relaxed);
        None
    }
}

impl Drop for SlabMapping {
    fn drop(&mut self) {
        MAPPINGS.fetch_sub(1, Ordering::Relaxed);
    }
}

impl FetchedTensor {
    /// Element type and shape.
    pub fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    /// The first byte; valid for reads and writes of `meta().nbytes()` bytes as long as this lives. Aligned to 64
    /// bytes, unless rows were chosen.
    pub fn data(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: mapped as long as this lives; writers use `data`, and answer for it.
        unsafe { std::slice::from_raw_parts(self.data(), self.meta.nbytes() as usize) }
    }

    fn new(meta: TensorMeta, start: *mut u8, memory: Memory, viewed: &Viewed) -> Self {
        let start = NonNull::new(start).expect("nothing lies at address 0");
        viewed.fetch_add(meta.nbytes(), Ordering::Relaxed);
        FetchedTensor { meta, start, _memory: memory, viewed: Arc::clone(viewed) }
    }

    fn copy_of(tensor: Tensor, viewed: &Viewed) -> Self {
        let bytes = tensor.bytes();
        if bytes.is_empty() {
            let dangling = std::ptr::without_provenance_mut(ALIGNMENT as usize);
            return FetchedTensor::new(tensor.meta, dangling, Memory::Empty, viewed);
        }
        let mut blocks: Arc<[MaybeUninit<AlignedUnit>]> =
            Arc::new_uninit_slice(bytes.len().div_ceil(size_of::<AlignedUnit>()));
        let start = Arc::get_mut(&mut blocks).expect("nobody else has it").as_mut_ptr().cast::<u8>();
        // SAFETY: as many blocks as the bytes need, in memory that was just made.
        unsafe { start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        FetchedTensor::new(tensor.meta, start, Memory::Copied { _blocks: blocks }, viewed)
    }
}

impl Drop for FetchedTensor {
    fn drop(&mut self) {
        self.viewed.fetch_sub(self.meta.nbytes(), Ordering::Relaxed);
    }
}

/// A wanted tensor in a slab: its bytes, and its index.
struct Member {
    range: Range<u64>,
    index: usize,
}

/// Views of these, in order. Those that lie in one slab share a mapping, but for those that overlap: each has bytes of
/// its own.
pub(crate) fn views_of(tensors: Vec<Tensor>, viewed: &Viewed) -> Vec<FetchedTensor> {
    let mut slabs: HashMap<*const (), Vec<Member>> = HashMap::new();
    for (index, tensor) in tensors.iter().enumerate() {
        let (slab, offset, len) = match &tensor.location {
            Location::Nowhere => continue,
            Location::Here(slab_range) => (Arc::as_ptr(&slab_range.slab).cast(), slab_range.offset, slab_range.len),
            Location::Attached(attached) => (Arc::as_ptr(&attached.segment).cast(), attached.offset, attached.len),
        };
        slabs.entry(slab).or_default().push(Member { range: offset..offset + len, index });
    }
    let mut mappings: Vec<Option<Arc<SlabMapping>>> = tensors.iter().map(|_| None).collect();
    for mut members in slabs.into_values() {
        members.sort_unstable_by_key(|member| member.range.start);
        let mut end = 0;
        let (together, apart): (Vec<_>, Vec<_>) = members.into_iter().partition(|member| {
            let is_free = member.range.start >= end;
            if is_free {
                end = member.range.end;
            }
            is_free
        });
        for group in std::iter::once(together.as_slice()).chain(apart.chunks(1)) {
            let bytes: u64 = group.iter().map(|member| member.range.end - member.range.start).sum();
            if bytes <= MAX_COPIED {
                continue;
            }
            let range = group[0].range.start..group[group.len() - 1].range.end;
            let Some(mapping) = SlabMapping::new(&tensors[group[0].index].location, range) else { continue };
            let mapping = Arc::new(mapping);
            group.iter().for_each(|member| mappings[member.index] = Some(Arc::clone(&mapping)));
        }
    }
    let seen = tensors.into_iter().zip(mappings).map(|(tensor, mapping)| {
        let offset = match (&tensor.location, &mapping) {
            (Location::Here(slab_range), Some(_)) => slab_range.offset,
            (Location::Attached(attached), Some(_)) => attached.offset,
            _ => return FetchedTensor::copy_of(tensor, viewed),
        };
        let mapping = mapping.expect("just looked at");
        let start = mapping.0.data().wrapping_add(offset as usize);
        FetchedTensor::new(tensor.meta, start, Memory::Mapped { _mapping: mapping }, viewed)
    });
    seen.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::slab::{Allocation, allocate};
    use crate::memory::slab_pool::SlabPool;
    use crate::tensor_meta::Dtype;

    #[test]
    fn mappings_that_have_ended_count_no_longer() {
        let pool = SlabPool::new("storage", 1 << 20);
        let space: Allocation = allocate(&pool, &[MAX_COPIED + 1], None, &mut |_, _, _, _| Ok(())).unwrap().remove(0);
        let meta = TensorMeta::new(Dtype::from_name("uint8").unwrap(), [MAX_COPIED + 1].as_slice()).unwrap();
        let tensor = Tensor::fetched(meta, Location::Here(space.into_range()));
        let viewed = Viewed::default();
        for _ in 0..=MAX_MAPPINGS {
            let view = views_of(vec![tensor.clone()], &viewed).remove(0);
            assert!(matches!(view._memory, Memory::Mapped { .. }));
        }
        assert_eq!(viewed.load(Ordering::Relaxed), 0);
    }
}

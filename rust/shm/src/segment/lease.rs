//! A lease: as long as it lives in any process, the owner does not use the segment for other data.
//!
//! It is a shared lock on an open file description of its own, to which only a mapping of the segment's first page
//! refers. The kernel drops the lock when the last process that inherited the mapping unmaps it or ends. No descriptor
//! is kept open for it.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::OFlags;

use crate::error::ShmError;
use crate::memory::mapping::{Access, Mapping};
use crate::memory::memory_file;

/// Keeps a segment as it is.
#[derive(Debug)]
pub struct Lease {
    _page: Mapping,
}

impl Lease {
    /// A lease on the segment that `file` is open on; `None` if its owner is about to use it again.
    ///
    /// # Errors
    /// [`ShmError::Io`] where the process may open or map no more.
    pub(crate) fn take(file: BorrowedFd<'_>) -> Result<Option<Self>, ShmError> {
        let own = memory_file::reopen(file, OFlags::RDONLY)?;
        if !memory_file::lock_shared(own.as_fd())? {
            return Ok(None);
        }
        let page = Mapping::new(&own, rustix::param::page_size(), Access::Read)?;
        Ok(Some(Lease { _page: page }))
    }
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use std::os::fd::AsRawFd;

    use crate::memory::memory_file::Writers;
    use crate::segment::Segment;

    fn segment() -> Segment {
        let mut segment = Segment::create(1000, Writers::Present, &mut || Ok(())).unwrap();
        segment.publish(1000, b"").unwrap();
        segment
    }

    #[test]
    fn a_segment_is_reclaimed_when_its_last_lease_ends() {
        let mut segment = segment();
        let (one, other) = (segment.lease().unwrap(), segment.lease().unwrap());
        assert!(!segment.reclaim());
        drop(one);
        assert!(!segment.reclaim());
        drop(other);
        assert!(segment.reclaim());
        assert_eq!(segment.address().generation, 2);
        let _again = segment.lease().unwrap();
        assert!(!segment.reclaim());
    }

    #[test]
    fn a_lease_keeps_no_descriptor() {
        let segment = segment();
        let before = segment.file().as_raw_fd();
        let leases: Vec<_> = (0..50).map(|_| segment.lease().unwrap()).collect();
        let next = Segment::create(1000, Writers::Present, &mut || Ok(())).unwrap();
        // Other tests may open some at the same time, but not so many.
        assert!(next.file().as_raw_fd() - before < 50, "{before} {}", next.file().as_raw_fd());
        assert_eq!(leases.len(), 50);
    }
}

//! A lease: as long as it lives in any process, nobody uses the segment for something else.
//!
//! It is a shared lock on an open file description of its own, which nothing but a mapping of the segment's first page
//! refers to. What always holds: the kernel drops the lock when the last process that inherited the mapping unmaps it or
//! ends, and no descriptor is kept open for it.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::OFlags;

use crate::error::ShmError;
use crate::file;
use crate::mapping::{Access, Mapping};

/// Keeps a segment as it is.
#[derive(Debug)]
pub struct Lease {
    _page: Mapping,
}

impl Lease {
    /// A lease on the segment that `file` is open on, of pages of `page` bytes; `None` where its owner is about to use it
    /// again.
    ///
    /// # Errors
    /// [`ShmError::Io`] where the process may open or map no more.
    pub(crate) fn take(file: BorrowedFd<'_>, page: usize) -> Result<Option<Self>, ShmError> {
        let own = file::reopen(file, OFlags::RDONLY)?;
        if !file::lock_shared(own.as_fd())? {
            return Ok(None);
        }
        let page = Mapping::new(&own, page, Access::Read)?;
        Ok(Some(Lease { _page: page }))
    }
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use std::os::fd::AsRawFd;

    use crate::file::Writers;
    use crate::segment::Segment;

    fn segment() -> Segment {
        let mut segment = Segment::create(1000, Writers::Present, false, &mut || Ok(())).unwrap();
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
    fn a_lease_that_a_child_inherited_lives_until_the_child_ends_or_lets_go() {
        for lets_go in [false, true] {
            let mut segment = segment();
            let mut lease = Some(segment.lease().unwrap());
            let (mut told, mut tell) = ([0; 2], [0; 2]);
            // SAFETY: both are arrays of two.
            assert_eq!(unsafe { libc::pipe(told.as_mut_ptr()) + libc::pipe(tell.as_mut_ptr()) }, 0);
            // SAFETY: the child of a process with threads does nothing but system calls.
            let child = unsafe { libc::fork() };
            let mut byte = [0u8; 1];
            if child == 0 {
                if lets_go {
                    drop(lease.take());
                }
                // SAFETY: one byte each way, and then the end; also where the parent ends without a word.
                unsafe {
                    libc::close(told[1]);
                    libc::write(tell[1], byte.as_ptr().cast(), 1);
                    libc::read(told[0], byte.as_mut_ptr().cast(), 1);
                    libc::_exit(0);
                }
            }
            drop(lease);
            // SAFETY: one byte.
            assert_eq!(unsafe { libc::read(tell[0], byte.as_mut_ptr().cast(), 1) }, 1);
            assert_eq!(segment.reclaim(), lets_go);
            let mut status = 0;
            // SAFETY: the child is this process's; the descriptors are its own.
            unsafe {
                libc::write(told[1], byte.as_ptr().cast(), 1);
                assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
                told.into_iter().chain(tell).for_each(|descriptor| assert_eq!(libc::close(descriptor), 0));
            }
            assert!(segment.reclaim());
        }
    }

    #[test]
    fn a_lease_keeps_no_descriptor() {
        let segment = segment();
        let before = segment.file().as_raw_fd();
        let leases: Vec<_> = (0..50).map(|_| segment.lease().unwrap()).collect();
        let next = Segment::create(1000, Writers::Present, false, &mut || Ok(())).unwrap();
        // Other tests may open some at the same time, but not so many.
        assert!(next.file().as_raw_fd() - before < 50, "{before} {}", next.file().as_raw_fd());
        assert_eq!(leases.len(), 50);
    }
}

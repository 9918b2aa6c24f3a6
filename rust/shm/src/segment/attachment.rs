//! Attaches this process to segments of other processes: one mapping a segment, however often it is attached.
//!
//! An [`Attachment`] lives as long as an object of this process uses it, and its mapping is its lease. A
//! [`PrivateMapping`] shares a page until it is written to, and no other process sees the change. As long as a
//! [`Lease`] lives in any process, the owner does not use the segment for other data: it is a shared lock on an open
//! file description of its own, to which only a mapping of the segment's first page refers. The kernel drops the lock
//! when the last process that inherited the mapping unmaps it or ends. No descriptor is kept open for it.
//!
//! Invariants:
//!
//! 1. A child made by `fork` finds the attachments that it inherited, and the leases with them.
//! 2. The registry's lock is held for moments. The Python bindings take it with the GIL held, so no fork by Python
//!    finds it locked.
//! 3. An attachment lies within its file, which cannot become shorter: it is sealed, or its name is this user's alone.
#![allow(unsafe_code)]

use std::any::Any;
use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use rustix::fs::OFlags;

use crate::error::ShmError;
use crate::memory::{self, DATA_START, HUGE_PAGE};
use crate::memory::{Access, Mapping};
use crate::segment::header::SegmentHeader;
use crate::segment::{Segment, SegmentAddress};

static REGISTRY: LazyLock<Mutex<HashMap<u64, Weak<Attachment>>>> = LazyLock::new(Mutex::default);

/// Bytes of the registered attachments to segments of other processes. A child made by `fork` has them as well.
static ATTACHED_BYTES: AtomicUsize = AtomicUsize::new(0);

/// From so many entries on, dead ones are removed when one is added.
const CROWDED: usize = 64;

pub(crate) const GIVEN_BACK: &str = "its owner has given it back; keep the owner open as long as handles are in use";

/// A segment that this process reads.
#[derive(Debug)]
pub struct Attachment {
    map: Mapping,
    /// The description that the mapping was made from, with the shared lock.
    file: OwnedFd,
    header: SegmentHeader,
    is_own: bool,
    /// Whether `ATTACHED_BYTES` has it.
    is_counted: bool,
    /// Dropped last.
    keeper: Option<Keeper>,
}

impl Drop for Attachment {
    fn drop(&mut self) {
        if self.is_counted {
            ATTACHED_BYTES.fetch_sub(self.map.len(), Ordering::Relaxed);
        }
    }
}

/// A value that is dropped with this process's last lease on a segment.
pub type Keeper = Arc<dyn Any + Send + Sync>;

/// Why a file is not the expected segment.
#[derive(Debug)]
pub enum AttachError {
    /// It is another one; the segment may be found elsewhere.
    Other(ShmError),
    /// It is the one, and was given back.
    ReleasedOrRevoked(ShmError),
}

impl AttachError {
    pub(crate) fn into_error(self) -> ShmError {
        match self {
            AttachError::Other(error) | AttachError::ReleasedOrRevoked(error) => error,
        }
    }
}

impl Attachment {
    /// Attaches to the segment in `file`, which is open for reading by a description of its own.
    ///
    /// `expected` is the address of the expected segment, if that is known. Without seals, which only memory without a
    /// name has, the caller answers for invariant 3. `keeper` is dropped when the attachment's lease has ended.
    ///
    /// # Errors
    /// A [`AttachError`], and with it the kernel's where it maps no more.
    pub fn new(
        file: OwnedFd,
        expected: Option<&SegmentAddress>,
        is_sealed: bool,
        keeper: Option<Keeper>,
    ) -> Result<Self, AttachError> {
        let name = expected.map_or_else(|| "the segment".to_owned(), describe);
        if is_sealed && !memory::keeps_its_length(file.as_fd()) {
            let reason = "it is not sealed".to_owned();
            return Err(AttachError::Other(ShmError::NotASegment { segment: name, reason }));
        }
        let (header, size) = lease(file.as_fd(), expected, &name)?;
        let size = size.next_multiple_of(rustix::param::page_size());
        let map = Mapping::new(&file, size, Access::Read).map_err(AttachError::Other)?;
        let is_own = expected.is_some_and(|expected| expected.process == process::id());
        Ok(Attachment { map, file, header, is_own, is_counted: false, keeper })
    }

    /// The first byte of data; valid for reads of [`header`](Attachment::header)`.data_len` bytes as long as it lives.
    pub fn data(&self) -> *const u8 {
        self.map.start().wrapping_add(DATA_START)
    }

    /// The contents of the header.
    pub fn header(&self) -> &SegmentHeader {
        &self.header
    }

    /// Its file, open for reading, with the lease.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// The address of the segment through this process.
    pub fn address(&self) -> SegmentAddress {
        SegmentAddress {
            process: process::id(),
            descriptor: self.file.as_raw_fd(),
            identity: self.header.identity,
            generation: self.header.generation,
        }
    }

    /// Bytes of data that this process alone may write to, in whole pages. The mapping is a lease, too.
    ///
    /// # Errors
    /// [`ShmError::Io`] where the address space has no room.
    pub fn private(&self, bytes: Range<usize>) -> Result<PrivateMapping, ShmError> {
        PrivateMapping::new(self.file.as_fd(), self.map.len(), bytes, self.keeper.clone())
    }
}

/// Attaches to the segment at `address`: this process is attached already, or a process of this user has a descriptor
/// of the segment.
///
/// # Errors
/// - [`ShmError::Gone`]: the segment was given back.
/// - [`ShmError::Io`]: the process may open or map no more.
/// - [`ShmError::Unreached`], with all that was tried.
pub fn attach(address: &SegmentAddress) -> Result<Arc<Attachment>, ShmError> {
    if let Some(attachment) = find(address)? {
        return Ok(attachment);
    }
    attach_unregistered(address).map(add)
}

/// As [`attach`], with a mapping of its own that no other call finds. Takes no lock.
///
/// # Errors
/// As of [`attach`].
pub fn attach_unregistered(address: &SegmentAddress) -> Result<Attachment, ShmError> {
    let mut tried = Vec::new();
    // A relative inherited the owner's descriptor under its own number.
    for process in [process::id(), address.process] {
        let opened = memory::open_of(process, address.descriptor, OFlags::RDONLY).map_err(AttachError::Other);
        match opened.and_then(|file| Attachment::new(file, Some(address), true, None)) {
            Ok(attached) => return Ok(attached),
            Err(AttachError::ReleasedOrRevoked(error)) => return Err(error),
            // The segment may be there, but no other attempt can succeed now.
            Err(AttachError::Other(error)) if error.is_shortage() => return Err(error),
            Err(AttachError::Other(error)) => tried.push(error.to_string()),
        }
    }
    tried.dedup();
    Err(ShmError::Unreached { segment: describe(address), tried })
}

/// Attaches to a segment of this process that has, or is to have, a name, which `keeper` keeps.
///
/// # Errors
/// [`ShmError::Io`] where the process may open or map no more.
pub fn attach_own(segment: &Segment, keeper: Option<Keeper>) -> Result<Arc<Attachment>, ShmError> {
    let address = segment.address();
    if let Some(attachment) = find(&address)? {
        return Ok(attachment);
    }
    let file = memory::reopen(segment.file(), OFlags::RDONLY)?;
    Attachment::new(file, Some(&address), false, keeper).map(add).map_err(AttachError::into_error)
}

/// Takes the lock that is a lease; returns the header, read under the lock, and the bytes of the file.
fn lease(
    file: BorrowedFd<'_>,
    expected: Option<&SegmentAddress>,
    name: &str,
) -> Result<(SegmentHeader, usize), AttachError> {
    let gone = |reason: &str| {
        AttachError::ReleasedOrRevoked(ShmError::Gone { segment: name.to_owned(), reason: reason.to_owned() })
    };
    let size = usize::try_from(memory::status(file).map_err(AttachError::Other)?.st_size).unwrap_or(0);
    let read = || SegmentHeader::read(file, size, name).map_err(AttachError::Other);
    // Read before the lock is taken, since the lock of another segment tells nothing about this one.
    let identity = read()?.identity;
    if expected.is_some_and(|expected| expected.identity != identity) {
        let reason = "another segment has taken its place".to_owned();
        return Err(AttachError::Other(ShmError::NotASegment { segment: name.to_owned(), reason }));
    }
    if !memory::lock_shared(file).map_err(AttachError::Other)? {
        return Err(gone("its owner is about to use it again"));
    }
    let header = read()?;
    if expected.is_some_and(|expected| expected.generation != header.generation) {
        return Err(gone(GIVEN_BACK));
    }
    Ok((header, size))
}

/// Registers an attachment; returns the registered one if the segment is attached already.
pub fn add(mut attachment: Attachment) -> Arc<Attachment> {
    let mut registry = lock();
    if registry.len() >= CROWDED && registry.len() == registry.capacity() {
        registry.retain(|_, attached| attached.strong_count() > 0);
    }
    let place = registry.entry(attachment.header.identity).or_default();
    let known = place.upgrade().filter(|known| known.header.generation == attachment.header.generation);
    if let Some(known) = known {
        // Dropping the second attachment may wait for other processes, so it happens without the lock.
        drop(registry);
        return known;
    }
    if !attachment.is_own {
        ATTACHED_BYTES.fetch_add(attachment.map.len(), Ordering::Relaxed);
        attachment.is_counted = true;
    }
    let attachment = Arc::new(attachment);
    *place = Arc::downgrade(&attachment);
    attachment
}

/// Bytes of other processes' segments that this one has mapped and registered.
pub fn attached_bytes() -> usize {
    ATTACHED_BYTES.load(Ordering::Relaxed)
}

fn find(address: &SegmentAddress) -> Result<Option<Arc<Attachment>>, ShmError> {
    let Some(attachment) = lock().get(&address.identity).and_then(Weak::upgrade) else { return Ok(None) };
    // The segment is not used again while the attachment lives, so a handle of another generation is invalid.
    if attachment.header.generation == address.generation {
        return Ok(Some(attachment));
    }
    Err(ShmError::Gone { segment: describe(address), reason: GIVEN_BACK.to_owned() })
}

pub(crate) fn describe(address: &SegmentAddress) -> String {
    format!("the segment with descriptor {} of process {}", address.descriptor, address.process)
}

fn lock() -> MutexGuard<'static, HashMap<u64, Weak<Attachment>>> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Some of a segment's data, for this process alone to write to.
#[derive(Debug)]
pub struct PrivateMapping {
    map: Mapping,
    /// Where the mapping begins in the segment.
    start: usize,
    /// Dropped last.
    _keeper: Option<Keeper>,
}

impl PrivateMapping {
    /// Maps `bytes` of the data of a segment of `size` bytes. `file` has the shared lock, which the mapping keeps.
    ///
    /// # Errors
    /// [`ShmError::Io`] if the address space has no room.
    pub(crate) fn new(
        file: BorrowedFd<'_>,
        size: usize,
        bytes: Range<usize>,
        keeper: Option<Keeper>,
    ) -> Result<Self, ShmError> {
        let page = rustix::param::page_size();
        // A huge page is mapped as one where addresses and offsets agree.
        let unit = if bytes.len() >= HUGE_PAGE { HUGE_PAGE } else { page };
        let start = (DATA_START + bytes.start) / unit * unit;
        let end = (DATA_START + bytes.end).next_multiple_of(page).min(size.next_multiple_of(page));
        let len = end.saturating_sub(start).max(page);
        let map = Mapping::of_part(file, start as u64, len, Access::Private)?;
        Ok(PrivateMapping { map, start, _keeper: keeper })
    }

    /// The first byte of the segment's data. Only the bytes that the mapping was made for may be used.
    pub fn data(&self) -> *mut u8 {
        self.map.start().wrapping_add(DATA_START).wrapping_sub(self.start)
    }
}

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
        let own = memory::reopen(file, OFlags::RDONLY)?;
        if !memory::lock_shared(own.as_fd())? {
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

    use crate::memory::Writers;
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

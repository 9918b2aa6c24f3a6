//! Buffers: memory that one process writes in an arena's segment, and one other process receives without a copy.
//!
//! A receiver keeps its mappings for the next buffers in the same segments. They have no lock; each open buffer has a
//! lease.
//!
//! Invariants: until the reference is taken, the sender alone writes to a buffer; from then on its receiver may. The
//! memory is used again when the receiver has opened and dropped it, or when the sender revoked it and no view of it
//! lives. A receiver acknowledges a buffer only after it has the lease. A mapping lies within its file, which is sealed.

use std::os::fd::{AsFd, OwnedFd};
use std::process;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::OFlags;

use crate::arena::{Arena, default_limit};
use crate::error::ShmError;
use crate::memory::{self, CheckCancelled, DATA_START};
use crate::memory::{Access, Mapping};
use crate::segment::attachment::Lease;
use crate::segment::header::{self, SegmentHeader};
use crate::segment::{Segment, SegmentAddress};

/// The address and size of a buffer, for its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferReference {
    /// Its segment.
    pub address: SegmentAddress,
    /// The number of its bytes.
    pub len: usize,
}

/// A buffer to be sent.
#[derive(Debug)]
pub struct SendBuffer {
    /// Until it is given back.
    segment: Option<Segment>,
    arena: Arc<Arena>,
    len: usize,
    is_sent: bool,
}

impl SendBuffer {
    /// A buffer of `len` bytes, whose contents are not defined.
    ///
    /// # Errors
    /// As of [`Arena::take`].
    pub fn take(arena: &Arc<Arena>, len: usize, check_cancelled: CheckCancelled<'_>) -> Result<Self, ShmError> {
        let segment = arena.take(len, check_cancelled)?;
        Ok(SendBuffer { segment: Some(segment), arena: Arc::clone(arena), len, is_sent: false })
    }

    /// The number of its bytes.
    #[expect(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The first byte; valid for reads and writes of [`len`](SendBuffer::len) bytes as long as the buffer lives.
    pub fn data(&self) -> *mut u8 {
        self.segment.as_ref().map_or(std::ptr::dangling_mut(), Segment::data)
    }

    /// The descriptor of its memory in this process. A receiver that has it can open the buffer even when this process
    /// is dead.
    pub fn descriptor(&self) -> i32 {
        self.segment.as_ref().map_or(-1, |segment| segment.address().descriptor)
    }

    /// Returns the reference for its one receiver. From here on the buffer counts as sent.
    ///
    /// # Errors
    /// [`ShmError::Invalid`] in a child of the process that took it, which may not send it.
    pub fn reference(&mut self) -> Result<BufferReference, ShmError> {
        let refuse = || ShmError::Invalid("a buffer is sent by the process that took it alone".to_owned());
        let segment = self.segment.as_mut().filter(|segment| segment.is_own()).ok_or_else(refuse)?;
        if !self.is_sent {
            segment.publish(self.len, &[])?;
            self.is_sent = true;
        }
        Ok(BufferReference { address: segment.address(), len: self.len })
    }

    /// Revokes the buffer: once it is dropped, a receiver that opens it is refused.
    pub fn revoke(&mut self) {
        self.is_sent = false;
    }
}

impl Drop for SendBuffer {
    fn drop(&mut self) {
        if let Some(segment) = self.segment.take() {
            if self.is_sent { self.arena.give_sent(segment) } else { self.arena.give_back(segment) }
        }
    }
}

/// Mappings that are kept at most: each takes a descriptor.
const MAX_KEPT: usize = 128;

/// A segment of another process in which buffers come.
#[derive(Debug)]
struct MappedSegment {
    map: Mapping,
    /// A description without a lock.
    file: OwnedFd,
    identity: u64,
    sender: u32,
    /// The last generation that was opened here; 0 before the first. Until then it is kept, however large: its sender
    /// may have ended, and no other process has it.
    opened: AtomicU64,
}

impl MappedSegment {
    fn is_opened(&self) -> bool {
        self.opened.load(Ordering::Relaxed) != 0
    }

    /// Whether its sender has dropped it, and no buffer in it is still to be opened here. What other receivers of the
    /// same buffer have opened does not count.
    fn is_over(&self) -> bool {
        header::last_generation(&self.map).is_some_and(|last| self.opened.load(Ordering::Relaxed) >= last)
    }
}

/// The segments in which a process receives buffers, the one that was used last at the end.
#[derive(Debug)]
pub struct BufferReceiver {
    process: u32,
    limit: usize,
    kept: Mutex<Vec<Arc<MappedSegment>>>,
    views: Arc<AtomicUsize>,
}

/// A buffer that was received: its bytes are this process's to read and to write.
#[derive(Debug)]
pub struct ReceivedBuffer {
    _lease: Lease,
    known: Arc<MappedSegment>,
    len: usize,
    _counted: CountedView,
}

/// Counts one view as long as it lives.
#[derive(Debug)]
struct CountedView(Arc<AtomicUsize>);

impl CountedView {
    fn among(views: &Arc<AtomicUsize>) -> Self {
        views.fetch_add(1, Ordering::Relaxed);
        CountedView(Arc::clone(views))
    }
}

impl Drop for CountedView {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Default for BufferReceiver {
    fn default() -> Self {
        BufferReceiver { process: process::id(), limit: default_limit(), kept: Mutex::default(), views: Arc::default() }
    }
}

impl BufferReceiver {
    /// Receives a buffer, once.
    ///
    /// # Errors
    /// - [`ShmError::Gone`]: its sender revoked it.
    /// - [`ShmError::NotASegment`]: the reference leads to something else.
    /// - [`ShmError::Io`]: its sender is dead and did not send the descriptor before.
    pub fn open(&self, reference: &BufferReference) -> Result<ReceivedBuffer, ShmError> {
        if self.process != process::id() {
            let reason = "a BufferReceiver belongs to the process that made it; make one after the fork";
            return Err(ShmError::Invalid(reason.to_owned()));
        }
        let known = match self.find(reference.address.identity) {
            Some(known) => known,
            None => {
                let sender = reference.address.process;
                let file = memory::open_of(sender, reference.address.descriptor, OFlags::RDWR)?;
                self.keep(MappedSegment::new(file, sender)?)
            }
        };
        let refuse = |reason: &str| ShmError::Gone { segment: describe(reference), reason: reason.to_owned() };
        if known.identity != reference.address.identity {
            return Err(refuse("another segment has taken its place"));
        }
        if reference.len > known.map.len() - DATA_START {
            return Err(ShmError::NotASegment {
                segment: describe(reference),
                reason: format!("it has no room for {} bytes", reference.len),
            });
        }
        let lease = Lease::take(known.file.as_fd())?.ok_or_else(|| refuse("its sender has taken it back"))?;
        if header::generation(&known.map) != reference.address.generation {
            return Err(refuse("its sender has taken it back"));
        }
        header::acknowledge(&known.map, reference.address.generation);
        if known.opened.fetch_max(reference.address.generation, Ordering::Relaxed) == 0 {
            let released = self.surplus_of(&mut self.lock());
            drop(released);
        }
        Ok(ReceivedBuffer { _lease: lease, known, len: reference.len, _counted: CountedView::among(&self.views) })
    }

    /// How many buffers were opened and are still in use. Those of different segments take a descriptor each, and two
    /// mappings.
    pub fn views(&self) -> usize {
        self.views.load(Ordering::Relaxed)
    }

    /// Takes the descriptor of a segment of `sender`, so that its buffers can be opened even when that process is dead.
    ///
    /// # Errors
    /// [`ShmError::NotASegment`] where it is none, [`ShmError::Io`] where it cannot be mapped.
    pub fn adopt(&self, file: OwnedFd, sender: u32) -> Result<(), ShmError> {
        // The sender's description would have the sender's locks.
        let own = memory::reopen(file.as_fd(), OFlags::RDWR)?;
        self.keep(MappedSegment::new(own, sender)?);
        Ok(())
    }

    /// Drops the segments of `sender`, which is dead. Open buffers stay.
    pub fn forget(&self, sender: u32) {
        let mut kept = self.lock();
        let (forgotten, still): (Vec<_>, Vec<_>) =
            std::mem::take(&mut *kept).into_iter().partition(|known| known.sender == sender);
        *kept = still;
        drop(kept);
        drop(forgotten);
    }

    fn find(&self, identity: u64) -> Option<Arc<MappedSegment>> {
        let mut kept = self.lock();
        let place = kept.iter().rposition(|known| known.identity == identity)?;
        let known = kept.remove(place);
        kept.push(Arc::clone(&known));
        Some(known)
    }

    fn keep(&self, known: MappedSegment) -> Arc<MappedSegment> {
        let known = Arc::new(known);
        let mut kept = self.lock();
        let before = std::mem::take(&mut *kept);
        let (released, mut still): (Vec<_>, Vec<_>) =
            before.into_iter().partition(|other| other.is_over() || other.identity == known.identity);
        still.push(Arc::clone(&known));
        let surplus = self.surplus_of(&mut still);
        *kept = still;
        drop(kept);
        drop((released, surplus));
        known
    }

    /// Takes out segments beyond the limits, the oldest first.
    fn surplus_of(&self, kept: &mut Vec<Arc<MappedSegment>>) -> Vec<Arc<MappedSegment>> {
        let mut bytes: usize = kept.iter().map(|known| known.map.len()).sum();
        let mut number = kept.len();
        let (surplus, still) = std::mem::take(kept).into_iter().partition(|oldest| {
            let is_surplus = number > MAX_KEPT || (bytes > self.limit && oldest.is_opened());
            if is_surplus {
                bytes -= oldest.map.len();
                number -= 1;
            }
            is_surplus
        });
        *kept = still;
        surplus
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<MappedSegment>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MappedSegment {
    fn new(file: OwnedFd, sender: u32) -> Result<Self, ShmError> {
        let name = format!("a buffer of process {sender}");
        if !memory::keeps_its_length(file.as_fd()) {
            return Err(ShmError::NotASegment { segment: name, reason: "it is not sealed".to_owned() });
        }
        let size = usize::try_from(memory::status(file.as_fd())?.st_size).unwrap_or(0);
        let header = SegmentHeader::read(file.as_fd(), size, &name)?;
        let map = Mapping::new(&file, size.next_multiple_of(rustix::param::page_size()), Access::Write)?;
        map.populate(0, map.len());
        Ok(MappedSegment { map, file, identity: header.identity, sender, opened: AtomicU64::new(0) })
    }
}

impl ReceivedBuffer {
    /// The first byte; valid for reads and writes of [`len`](ReceivedBuffer::len) bytes as long as the view lives.
    pub fn data(&self) -> *mut u8 {
        self.known.map.start().wrapping_add(DATA_START)
    }

    /// The number of its bytes.
    #[expect(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> usize {
        self.len
    }
}

fn describe(reference: &BufferReference) -> String {
    format!("the buffer of {} bytes of process {}", reference.len, reference.address.process)
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::arena::{Arena, ArenaPurpose};
    use crate::buffers::SendBuffer;

    #[derive(Clone, Debug)]
    enum Action {
        Send(usize),
        Open(usize),
        Close(usize),
        Revoke(usize),
    }

    fn actions() -> impl Strategy<Value = Vec<Action>> {
        let action = prop_oneof![
            3 => (0usize..200_000).prop_map(Action::Send),
            3 => any::<usize>().prop_map(Action::Open),
            2 => any::<usize>().prop_map(Action::Close),
            1 => any::<usize>().prop_map(Action::Revoke),
        ];
        prop::collection::vec(action, 1..80)
    }

    fn bytes_of(mark: u64, len: usize) -> Vec<u8> {
        (0..len).map(|at| (mark.wrapping_mul(31) as usize + at) as u8).collect()
    }

    fn read(view: &ReceivedBuffer) -> Vec<u8> {
        // SAFETY: no thread writes to it.
        unsafe { std::slice::from_raw_parts(view.data(), view.len()) }.to_vec()
    }

    fn sent(arena: &Arc<Arena>, contents: &[u8]) -> (SendBuffer, BufferReference) {
        let mut buffer = SendBuffer::take(arena, contents.len(), &mut || Ok(())).unwrap();
        // SAFETY: within the buffer, which no other thread has.
        unsafe { buffer.data().copy_from_nonoverlapping(contents.as_ptr(), contents.len()) };
        let reference = buffer.reference().unwrap();
        (buffer, reference)
    }

    #[test]
    fn buffers_in_adopted_segments_can_be_opened_though_large_and_their_sender_gone() {
        let arena = Arc::new(Arena::new(ArenaPurpose::Messages, 1 << 20));
        let buffers = BufferReceiver { limit: 1000, ..BufferReceiver::default() };
        let mut references = Vec::new();
        for mark in 0..3 {
            let (buffer, reference) = sent(&arena, &bytes_of(mark, 5000));
            let file = memory::open_of(process::id(), buffer.descriptor(), OFlags::RDWR).unwrap();
            // Adopted like a buffer of another process, whose descriptors end with it.
            buffers.adopt(file, process::id()).unwrap();
            references.push(reference);
            drop(buffer);
        }
        drop(arena);
        for (mark, reference) in (0..).zip(&references) {
            assert_eq!(read(&buffers.open(reference).unwrap()), bytes_of(mark, 5000));
        }
        assert_eq!(buffers.lock().len(), 0);
    }

    #[test]
    fn a_buffer_that_only_another_receiver_has_opened_is_kept_though_its_sender_is_gone() {
        let adopt = |receiver: &BufferReceiver, descriptor: i32| {
            let file = memory::open_of(process::id(), descriptor, OFlags::RDWR).unwrap();
            receiver.adopt(file, process::id()).unwrap();
        };
        let arena = Arc::new(Arena::new(ArenaPurpose::Messages, 1 << 20));
        let (early, late) = (BufferReceiver::default(), BufferReceiver::default());
        let (first, reference) = sent(&arena, &bytes_of(1, 5000));
        for receiver in [&early, &late] {
            adopt(receiver, first.descriptor());
            receiver.open(&reference).unwrap();
        }
        drop(first);
        let (second, reference) = sent(&arena, &bytes_of(2, 5000));
        early.open(&reference).unwrap();
        drop((second, arena));
        let others = Arc::new(Arena::new(ArenaPurpose::Messages, 1 << 20));
        let (other, _) = sent(&others, &bytes_of(3, 5000));
        adopt(&late, other.descriptor());
        assert_eq!(read(&late.open(&reference).unwrap()), bytes_of(2, 5000));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// In any order of sends, receipts, drops and revocations, a received buffer holds the bytes that were sent
        /// until it is dropped, and a revoked one is refused.
        #[test]
        fn received_buffers_stay_as_they_were_sent(actions in actions()) {
            let arena = Arc::new(Arena::new(ArenaPurpose::Messages, 1 << 20));
            let buffers = BufferReceiver::default();
            let (mut on_their_way, mut revoked, mut open) = (Vec::new(), Vec::new(), Vec::new());
            let mut kept = Vec::new();
            for (mark, action) in (0u64..).zip(actions) {
                match action {
                    Action::Send(len) => {
                        let (buffer, reference) = sent(&arena, &bytes_of(mark, len));
                        // Every other one is held by its sender until it is revoked.
                        if mark % 2 == 0 { drop(buffer) } else { kept.push((buffer, reference)) }
                        on_their_way.push((mark, reference));
                    }
                    Action::Open(which) if !on_their_way.is_empty() => {
                        let (mark, reference) = on_their_way.swap_remove(which % on_their_way.len());
                        open.push((mark, buffers.open(&reference).unwrap()));
                    }
                    Action::Close(which) if !open.is_empty() => drop(open.swap_remove(which % open.len())),
                    Action::Revoke(which) if !kept.is_empty() => {
                        let (mut buffer, reference): (SendBuffer, BufferReference) = kept.swap_remove(which % kept.len());
                        let before = on_their_way.len();
                        on_their_way.retain(|(_, other)| *other != reference);
                        if on_their_way.len() < before {
                            revoked.push(reference);
                        }
                        buffer.revoke();
                    }
                    _ => {}
                }
                prop_assert_eq!(buffers.views(), open.len());
                for (mark, view) in &open {
                    prop_assert!(read(view) == bytes_of(*mark, view.len()));
                }
                for reference in &revoked {
                    prop_assert!(buffers.open(reference).is_err());
                }
            }
            for (_, reference) in on_their_way {
                drop(buffers.open(&reference).unwrap());
            }
            drop((open, kept));
            prop_assert_eq!(arena.stats().in_use_bytes, 0);
            prop_assert_eq!(arena.stats().escaped_bytes, 0);
        }

        /// Any file is refused, or the buffer lies within its bytes.
        #[test]
        fn any_bytes_are_no_buffer_or_one_within_its_file(
            words in prop::collection::vec(any::<u64>(), 0..20), magic: bool, pages in 0usize..4,
        ) {
            let file = memory::create().unwrap();
            memory::reserve(file.as_fd(), pages * 4096 + 1, memory::Writers::All, &mut || Ok(())).unwrap();
            let mut header: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            if magic && header.len() >= 8 {
                header[..8].copy_from_slice(b"tundish\x01");
            }
            rustix::io::pwrite(&file, &header, 0).unwrap();
            memory::seal(file.as_fd(), memory::Writers::All).unwrap();
            if let Ok(known) = MappedSegment::new(file, 1) {
                prop_assert!(known.map.len() >= DATA_START);
            }
        }
    }
}

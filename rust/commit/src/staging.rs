//! Staging memory: holds the bytes of files until they are on the disk.
//!
//! A [`FileImage`] is the memory of one file, laid out as the file. An arena keeps freed memory for the next save,
//! because fresh pages cost fifteen to twenty times a copy into warm ones.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{process, ptr, thread};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

// [`FileImage`], the memory of one file.

/// Bytes that a thread populates at a time: some ten milliseconds.
const POPULATED_AT_ONCE: usize = 64 << 20;

/// More threads do not help: the kernel's lock of the address space, and memory itself, are the limit.
const MAX_THREADS: usize = 16;

/// `size` bytes of page-aligned memory, laid out as a file on the disk.
///
/// The initial bytes are undefined: zeros, or those of an earlier image. Dropping the image returns its memory to the
/// arena; writers keep a reference until the bytes are on the disk. In a child made by `fork` it reads as zeros.
#[derive(Debug)]
pub struct FileImage {
    start: NonNull<u8>,
    size: usize,
    capacity: usize,
    arena: &'static Arena,
}

// SAFETY: nothing else owns the memory of an image. Its bytes are reached only through the pointer, whose users
// coordinate their accesses.
unsafe impl Send for FileImage {}
// SAFETY: as above.
unsafe impl Sync for FileImage {}

/// Memory that files are written from: images, or where tensors lie.
pub trait Memory: Send + Sync {
    /// All bytes.
    ///
    /// A caller that changes bytes while they are written gets a file of old and new bytes and a checksum that may fit
    /// neither. Verifying the file finds that; memory safety is not affected.
    fn bytes(&self) -> &[u8];
}

impl Memory for FileImage {
    fn bytes(&self) -> &[u8] {
        // SAFETY: the memory of an image is mapped, and the kernel initialized every byte with zero.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.size) }
    }
}

/// The system has no memory for an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot allocate {size} bytes of staging memory; save less at once, lower the staging limit, or give the process \
     more memory"
)]
pub struct OutOfMemory {
    /// The requested bytes.
    pub size: usize,
}

impl FileImage {
    /// An image of `size` bytes, which may be 0.
    ///
    /// # Errors
    /// [`OutOfMemory`] where the address space or the limits of the process have no room.
    pub fn new(size: usize) -> Result<Self, OutOfMemory> {
        Self::in_arena(Arena::of_process(), size)
    }

    pub(super) fn in_arena(arena: &'static Arena, size: usize) -> Result<Self, OutOfMemory> {
        // This is the maximal length of a slice.
        let capacity = capacity_of(size).filter(|&capacity| isize::try_from(capacity).is_ok());
        let taken = capacity.and_then(|capacity| Some((arena.take(capacity)?, capacity)));
        let (start, capacity) = taken.ok_or(OutOfMemory { size })?;
        Ok(FileImage { start, size, capacity, arena })
    }

    /// The size in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The first byte, page-aligned unless the size is 0. Valid for reads and writes of [`size`](FileImage::size) bytes
    /// as long as the image lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Allocates all pages on as many threads as there are processors, up to 16; changes no byte. Call it before a
    /// device driver pins the memory, which would fault the pages one by one on a single thread.
    pub fn populate(&self) {
        let next = AtomicUsize::new(0);
        let work = || {
            loop {
                let start = next.fetch_add(POPULATED_AT_ONCE, Ordering::Relaxed);
                if start >= self.capacity {
                    return;
                }
                // SAFETY: within the image.
                let begin = unsafe { self.start.add(start) };
                populate(begin, POPULATED_AT_ONCE.min(self.capacity - start));
            }
        };
        let available = thread::available_parallelism().map_or(1, usize::from);
        let threads = self.capacity.div_ceil(POPULATED_AT_ONCE).min(available).min(MAX_THREADS);
        thread::scope(|scope| {
            for _ in 1..threads {
                // If a thread cannot be started, the others do its part.
                let _ = thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
    }
}

impl Drop for FileImage {
    fn drop(&mut self) {
        // SAFETY: taken from this arena, and dropped once.
        unsafe { self.arena.give_back(self.start, self.capacity) };
    }
}

// The memory of file images, kept for the next ones.
//
// Invariants:
//
// 1. Memory in use and cached memory together never exceed the most that was ever in use at once. So a save takes no
//    more memory than its images, rounded up (see [`capacity_of`]).
// 2. Free ranges are disjoint and not empty; adjacent ones are merged. An image is cut from the smallest range that
//    holds it, so that images of other sizes reuse the memory.
// 3. Only the process that made an arena uses it. A child made by `fork` makes its own, because a thread that it does
//    not have may hold the inherited lock. Arenas are never freed.

/// From this size on images are whole huge pages, which adds at most one part in 32.
const WHOLE_HUGE_PAGES: usize = 32 * HUGE_PAGE;

/// Bytes of staging memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StagingStats {
    /// Bytes in images.
    pub in_use: usize,
    /// Bytes kept for the next images.
    pub cached: usize,
    /// The largest sum of both so far.
    pub peak: usize,
}

/// The staging memory of this process.
pub fn staging_stats() -> StagingStats {
    Arena::of_process().lock().stats
}

/// Returns all cached memory to the operating system, and its size in bytes.
pub fn trim_staging() -> usize {
    Arena::of_process().trim()
}

/// The bytes that an image of `size` takes: whole pages, and whole huge pages where that adds little. `None` on
/// overflow.
pub(super) fn capacity_of(size: usize) -> Option<usize> {
    let unit = if size >= WHOLE_HUGE_PAGES { HUGE_PAGE } else { rustix::param::page_size() };
    size.checked_next_multiple_of(unit)
}

#[derive(Debug)]
pub(super) struct Arena {
    process: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By address: start and length of each.
    free: BTreeMap<usize, (RangeStart, usize)>,
    stats: StagingStats,
}

/// The start of a free range.
#[derive(Clone, Copy, Debug)]
struct RangeStart(NonNull<u8>);

// SAFETY: only the holder of a range uses it, on any thread.
unsafe impl Send for RangeStart {}

static ARENA: AtomicPtr<Arena> = AtomicPtr::new(ptr::null_mut());

impl Arena {
    pub(super) fn of_process() -> &'static Arena {
        loop {
            let current = ARENA.load(Ordering::Acquire);
            // SAFETY: null, or made by `Box::into_raw`, published with release ordering and never freed.
            if let Some(arena) = unsafe { current.as_ref() }
                && arena.process == process::id()
            {
                return arena;
            }
            let fresh = Box::into_raw(Box::new(Arena::new()));
            if ARENA.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: made by `Box::into_raw` above, and never published.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
    }

    fn new() -> Self {
        Arena { process: process::id(), state: Mutex::default() }
    }

    /// A cached or fresh range of `capacity` bytes, a multiple of the page size; `None` without memory.
    pub(super) fn take(&self, capacity: usize) -> Option<NonNull<u8>> {
        if capacity == 0 {
            return Some(NonNull::dangling());
        }
        let mut state = self.lock();
        if let Some(start) = state.cut(capacity) {
            return Some(start);
        }
        let released = state.make_room(capacity)?;
        drop(state);
        unmap(&released);
        // A limit on the address space counts cached memory too.
        let start = map(capacity).or_else(|| (self.trim() > 0).then(|| map(capacity)).flatten());
        self.lock().took(capacity, start.is_some());
        start
    }

    /// Returns all free ranges to the operating system, and their size in bytes.
    fn trim(&self) -> usize {
        let released = self.lock().release_down_to(0);
        unmap(&released);
        released.iter().map(|(_, length)| length).sum()
    }

    /// Takes back what [`take`](Arena::take) gave.
    ///
    /// # Safety
    /// The range came from this arena, and nothing uses it.
    pub(super) unsafe fn give_back(&self, start: NonNull<u8>, capacity: usize) {
        if capacity == 0 {
            return;
        }
        if self.process == process::id() {
            self.lock().give_back(start, capacity);
        } else {
            // SAFETY: the caller's promise. In a child made by `fork` the range is the child's own, and its arena
            // another.
            unsafe { unmap_range(start, capacity) };
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns ranges to the operating system, without the lock, since it takes milliseconds a gigabyte.
fn unmap(ranges: &[(RangeStart, usize)]) {
    for &(range, length) in ranges {
        // SAFETY: the range was free and is no longer listed.
        unsafe { unmap_range(range.0, length) };
    }
}

impl State {
    /// Cuts an image from the start of the smallest free range that is large enough.
    fn cut(&mut self, capacity: usize) -> Option<NonNull<u8>> {
        let fitting = self.free.iter().filter(|(_, (_, length))| *length >= capacity);
        let (&address, _) = fitting.min_by_key(|(_, (_, length))| *length)?;
        let (range, length) = self.free.remove(&address)?;
        if length > capacity {
            // SAFETY: within the range.
            let rest = unsafe { range.0.add(capacity) };
            self.free.insert(address + capacity, (RangeStart(rest), length - capacity));
        }
        self.stats.cached -= capacity;
        self.stats.in_use += capacity;
        Some(range.0)
    }

    /// Counts a fresh image, and takes ranges off the list to keep invariant 1. [`took`](State::took) follows.
    fn make_room(&mut self, capacity: usize) -> Option<Vec<(RangeStart, usize)>> {
        self.stats.in_use = self.stats.in_use.checked_add(capacity)?;
        let most = self.stats.peak.max(self.stats.in_use);
        Some(self.release_down_to(most - self.stats.in_use))
    }

    fn took(&mut self, capacity: usize, is_mapped: bool) {
        if is_mapped {
            self.stats.peak = self.stats.peak.max(self.stats.in_use + self.stats.cached);
        } else {
            self.stats.in_use -= capacity;
        }
    }

    fn give_back(&mut self, start: NonNull<u8>, capacity: usize) {
        self.stats.in_use -= capacity;
        self.stats.cached += capacity;
        let mut kept = (RangeStart(start), capacity);
        let address = start.addr().get();
        if let Some((_, (_, length))) = self.free.remove_entry(&(address + capacity)) {
            kept.1 += length;
        }
        let before = self.free.range(..address).next_back().map(|(&at, &(range, length))| (at, range, length));
        if let Some((at, range, length)) = before
            && at + length == address
        {
            self.free.insert(at, (range, length + kept.1));
        } else {
            self.free.insert(address, kept);
        }
    }

    /// Takes free ranges off the list, the smallest first, until at most `bytes` are cached.
    fn release_down_to(&mut self, bytes: usize) -> Vec<(RangeStart, usize)> {
        let mut released = Vec::new();
        while self.stats.cached > bytes {
            let smallest = self.free.iter().min_by_key(|(_, (_, length))| *length);
            let Some((&address, &(range, length))) = smallest else { break };
            self.free.remove(&address);
            self.stats.cached -= length;
            released.push((range, length));
        }
        released
    }
}

// Anonymous memory of the operating system.
//
// Invariant: in a child made by `fork` a range is zeroed or unmapped, never shared. Otherwise a child that lives while
// its parent stages again, such as a data worker, would keep a second copy of every page.

/// The size of a huge page, to which large ranges are aligned.
pub(super) const HUGE_PAGE: usize = 2 << 20;

/// Maps `length` fresh bytes, a multiple of the page size; `None` where the system has no room for them.
pub(super) fn map(length: usize) -> Option<NonNull<u8>> {
    // Room to move the start up to a huge page.
    let slack = if length >= HUGE_PAGE { HUGE_PAGE } else { 0 };
    let mapped = length.checked_add(slack)?;
    // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing.
    let start =
        unsafe { mmap_anonymous(ptr::null_mut(), mapped, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE).ok()? };
    let lead = if slack == 0 { 0 } else { start.addr().wrapping_neg() % HUGE_PAGE };
    let start = NonNull::new(start.cast::<u8>())?;
    // SAFETY: lead < slack, so that lead + length lies within what was mapped.
    let (begin, end) = unsafe { (start.add(lead), start.add(lead + length)) };
    // SAFETY: both ends belong to the new mapping, and nothing uses them.
    unsafe {
        unmap_range(start, lead);
        unmap_range(end, slack - lead);
    }
    advise(begin, length);
    Some(begin)
}

/// Where the kernel does not know an advice, pages are small, or shared with children until either writes to them.
fn advise(start: NonNull<u8>, length: usize) {
    for advice in [Advice::LinuxHugepage, Advice::LinuxWipeOnFork] {
        // SAFETY: the range was just mapped and nothing of it is in use.
        let _ = unsafe { madvise(start.as_ptr().cast(), length, advice) };
    }
}

/// Allocates the pages of a range without a fault each; changes no byte. Does nothing before Linux 5.14.
pub(super) fn populate(start: NonNull<u8>, length: usize) {
    // SAFETY: it changes no byte, wherever it is.
    let _ = unsafe { madvise(start.as_ptr().cast(), length, Advice::LinuxPopulateWrite) };
}

/// Returns a range to the operating system.
///
/// # Safety
/// The range consists of whole pages mapped by [`map`], and nothing uses it.
unsafe fn unmap_range(start: NonNull<u8>, length: usize) {
    if length > 0 {
        // SAFETY: the caller's promise. It fails only where splitting a range exceeds the kernel's limit; the memory
        // then stays mapped and unused.
        let _ = unsafe { munmap(start.as_ptr().cast(), length) };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: usize = 4096;

    fn new_arena() -> &'static Arena {
        Box::leak(Box::new(Arena::new()))
    }

    fn image(arena: &'static Arena, size: usize) -> FileImage {
        FileImage::in_arena(arena, size).unwrap()
    }

    fn stats(arena: &Arena) -> StagingStats {
        arena.lock().stats
    }

    fn fill(image: &FileImage, mark: u8) {
        // SAFETY: only this test uses the bytes of the image.
        unsafe { image.as_ptr().write_bytes(mark, image.size()) };
    }

    impl State {
        /// Checks invariant 2 and the statistics.
        fn check(&self) {
            let mut end = 0;
            for (&address, &(range, length)) in &self.free {
                assert_eq!(address, range.0.addr().get());
                assert!(length > 0 && address % PAGE == 0 && address > end, "{:?}", self.free);
                end = address + length;
            }
            let free: usize = self.free.values().map(|(_, length)| length).sum();
            assert_eq!(free, self.stats.cached);
        }
    }

    #[test]
    fn an_image_takes_little_more_than_its_size() {
        for (size, capacity) in [(0, 0), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE), (3 << 20, 3 << 20)] {
            assert_eq!(capacity_of(size), Some(capacity));
        }
        for size in [(64 << 20) - 1, 64 << 20, (64 << 20) + 1, 2_200_000_001] {
            let capacity = capacity_of(size).unwrap();
            assert!(capacity >= size && capacity as f64 <= 1.05 * size as f64, "{size}: {capacity}");
        }
        assert_eq!(capacity_of(usize::MAX), None);
    }

    #[test]
    fn memory_is_cached_for_the_next_image_until_it_is_trimmed() {
        let arena = new_arena();
        let first = image(arena, 5 << 20);
        let address = first.as_ptr();
        assert_eq!(address.addr() % HUGE_PAGE, 0);
        fill(&first, 7);
        assert_eq!(stats(arena), StagingStats { in_use: 5 << 20, cached: 0, peak: 5 << 20 });
        drop(first);
        assert_eq!(stats(arena), StagingStats { in_use: 0, cached: 5 << 20, peak: 5 << 20 });
        let again = image(arena, (5 << 20) - 100);
        assert_eq!((again.as_ptr(), &again.bytes()[..1]), (address, &[7][..]));
        drop(again);
        assert_eq!(arena.trim(), 5 << 20);
        assert_eq!(stats(arena), StagingStats { in_use: 0, cached: 0, peak: 5 << 20 });
    }

    #[test]
    fn images_of_other_sizes_use_cached_memory() {
        let arena = new_arena();
        drop(image(arena, 12 << 20));
        let parts: Vec<_> = [5 << 20, 4 << 20, 3 << 20].map(|size| image(arena, size)).into();
        assert_eq!(stats(arena), StagingStats { in_use: 12 << 20, cached: 0, peak: 12 << 20 });
        drop(parts);
        // The parts are one range again.
        drop(image(arena, 12 << 20));
        assert_eq!(stats(arena), StagingStats { in_use: 0, cached: 12 << 20, peak: 12 << 20 });
    }

    #[test]
    fn memory_that_does_not_fit_is_released_before_fresh_memory_is_taken() {
        let arena = new_arena();
        drop(image(arena, 4 << 20));
        let larger = image(arena, 5 << 20);
        assert_eq!(stats(arena), StagingStats { in_use: 5 << 20, cached: 0, peak: 5 << 20 });
        drop(larger);
    }

    #[test]
    fn an_impossible_image_is_refused_with_its_size() {
        for size in [usize::MAX, isize::MAX as usize, 1 << 60] {
            let error = FileImage::in_arena(new_arena(), size).unwrap_err();
            assert_eq!(error.size, size);
            assert!(error.to_string().contains(&size.to_string()));
        }
    }

    #[test]
    fn every_page_is_fresh_or_was_an_image_s() {
        let arena = new_arena();
        assert!(image(arena, 0).bytes().is_empty());
        assert_eq!(stats(arena), StagingStats::default());
        assert!(image(arena, 3 << 20).bytes().iter().all(|&byte| byte == 0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Images taken and given back in any order keep their bytes, and the arena its invariants.
        #[test]
        fn images_are_disjoint_and_memory_is_bounded(
            steps in prop::collection::vec((any::<bool>(), 0usize..9 << 20, any::<prop::sample::Index>()), 1..60),
        ) {
            let arena = new_arena();
            let mut live: Vec<(FileImage, u8)> = Vec::new();
            let mut most_in_use = 0;
            for (mark, (take, size, index)) in (0u8..).zip(steps) {
                if take || live.is_empty() {
                    let image = image(arena, size);
                    fill(&image, mark);
                    live.push((image, mark));
                } else {
                    let (image, mark) = live.swap_remove(index.index(live.len()));
                    prop_assert!(image.bytes().iter().all(|&byte| byte == mark));
                }
                arena.lock().check();
                let stats = stats(arena);
                let staged: usize = live.iter().map(|(image, _)| capacity_of(image.size()).unwrap()).sum();
                most_in_use = most_in_use.max(staged);
                prop_assert_eq!(stats.in_use, staged);
                prop_assert_eq!(stats.peak, most_in_use);
                prop_assert!(stats.in_use + stats.cached <= stats.peak);
            }
            for (image, mark) in live {
                prop_assert!(image.bytes().iter().all(|&byte| byte == mark));
            }
            let cached = stats(arena).cached;
            prop_assert_eq!(arena.trim(), cached);
        }
    }
}

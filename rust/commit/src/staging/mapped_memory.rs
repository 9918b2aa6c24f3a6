//! Anonymous memory of the operating system.
//!
//! Invariant: in a child made by `fork` a range is zeroed or unmapped, never shared. Otherwise a child that lives while
//! its parent stages again, such as a data worker, would keep a second copy of every page.
#![allow(unsafe_code)]

use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

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
        unmap(start, lead);
        unmap(end, slack - lead);
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
pub(super) unsafe fn unmap(start: NonNull<u8>, length: usize) {
    if length > 0 {
        // SAFETY: the caller's promise. It fails only where splitting a range exceeds the kernel's limit; the memory
        // then stays mapped and unused.
        let _ = unsafe { munmap(start.as_ptr().cast(), length) };
    }
}

//! Anonymous memory of the operating system.
//!
//! It owns nothing: whoever maps a range unmaps it. What always holds: a range is zeroed or unmapped in a child
//! made by `fork`, never shared with it. A child that lives while its parent stages again (a loader's worker, for
//! one) would otherwise keep a second copy of every page, and the parent would pay for making it.
#![allow(unsafe_code)]

use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// The size of a huge page where the processor has any, and what large ranges are aligned to.
pub(super) const HUGE_PAGE: usize = 2 << 20;

/// Maps `length` fresh bytes, a multiple of the page size; `None` where the system has no room for them.
pub(super) fn map(length: usize) -> Option<NonNull<u8>> {
    // Room to move the start up to where a huge page begins.
    let slack = if length >= HUGE_PAGE { HUGE_PAGE } else { 0 };
    let mapped = length.checked_add(slack)?;
    // SAFETY: a new mapping at a place that the kernel chooses; it takes nothing from anybody.
    let start =
        unsafe { mmap_anonymous(ptr::null_mut(), mapped, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE).ok()? };
    let lead = if slack == 0 { 0 } else { start.addr().wrapping_neg() % HUGE_PAGE };
    let start = NonNull::new(start.cast::<u8>())?;
    // SAFETY: lead < slack, so that lead + length lies within what was mapped.
    let (begin, end) = unsafe { (start.add(lead), start.add(lead + length)) };
    // SAFETY: both cut ends belong to the new mapping and nobody knows of them.
    unsafe {
        unmap(start, lead);
        unmap(end, slack - lead);
    }
    advise(begin, length);
    Some(begin)
}

/// Both kinds of advice are left out where the kernel does not know them: then pages are small, or shared with
/// children until either writes to them.
#[cfg(target_os = "linux")]
fn advise(start: NonNull<u8>, length: usize) {
    for advice in [Advice::LinuxHugepage, Advice::LinuxWipeOnFork] {
        // SAFETY: the range was just mapped and nothing of it is in use.
        let _ = unsafe { madvise(start.as_ptr().cast(), length, advice) };
    }
}

#[cfg(not(target_os = "linux"))]
fn advise(_start: NonNull<u8>, _length: usize) {}

/// Has the pages of a range there without a fault each; none of its bytes changes. Left out where the kernel does not
/// know how (before Linux 5.14).
pub(super) fn populate(start: NonNull<u8>, length: usize) {
    #[cfg(target_os = "linux")]
    // SAFETY: it changes no byte, wherever it is.
    let _ = unsafe { madvise(start.as_ptr().cast(), length, Advice::LinuxPopulateWrite) };
    #[cfg(not(target_os = "linux"))]
    let _ = (start, length);
}

/// Gives a range back to the operating system.
///
/// # Safety
/// The range was mapped by [`map`], whole pages of it, and nobody uses it any more.
pub(super) unsafe fn unmap(start: NonNull<u8>, length: usize) {
    if length > 0 {
        // SAFETY: the caller's promise. It can fail only where splitting a range exceeds the kernel's number of
        // them; the memory then stays mapped and unused.
        let _ = unsafe { munmap(start.as_ptr().cast(), length) };
    }
}

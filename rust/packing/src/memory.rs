//! Large arrays, and hints to the processor and the kernel about memory.
//!
//! Nothing here changes what is computed.
#![allow(unsafe_code)]

use std::alloc::Layout;
#[cfg(target_os = "linux")]
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU16, AtomicU64};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::error::PackError;

/// Types whose all-zero bytes are a valid value.
pub(crate) trait Zero: Default {}
impl Zero for u32 {}
impl Zero for u64 {}
impl Zero for i32 {}
impl Zero for i64 {}
impl Zero for [u64; 2] {}
impl Zero for AtomicU16 {}
impl Zero for AtomicU64 {}

/// Vectors from this size on are backed by huge pages: fewer faults while filling them, fewer
/// address-translation misses while reading them at random.
const HUGE_FROM_BYTES: usize = 4 << 20;
/// Of x86-64, and of arm64 with pages of 4 KiB; elsewhere it is only an alignment.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// `len` zeros, untouched by this process until written.
///
/// Unlike `vec![0; len]` it reports a failed allocation instead of aborting the process.
pub(crate) fn zeroed<T: Zero>(len: usize) -> Result<Vec<T>, PackError> {
    let layout = Layout::array::<T>(len).map_err(|_| out_of_memory::<T>(len))?;
    if layout.size() == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the layout is not of size zero.
    let pointer = unsafe { std::alloc::alloc_zeroed(layout) };
    if pointer.is_null() {
        return Err(out_of_memory::<T>(len));
    }
    // SAFETY: allocated just now by the global allocator with the layout of `len` values of T, and
    // zero bytes are a valid T (trait `Zero`).
    let array = unsafe { Vec::from_raw_parts(pointer.cast::<T>(), len, len) };
    if layout.size() >= HUGE_FROM_BYTES {
        advise_huge(array.as_ptr().cast(), layout.size());
    }
    Ok(array)
}

/// `bytes` fresh zeros of the system's own, which begin where a huge page does; None where it has no room for them.
/// `bytes` is a multiple of `HUGE_PAGE`.
pub(crate) fn map(bytes: usize) -> Option<NonNull<u8>> {
    // Room to move the start up to where a huge page begins.
    let mapped = bytes.checked_add(HUGE_PAGE)?;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping where the kernel chooses, which takes nothing from anybody.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), mapped, access, MapFlags::PRIVATE) }.ok()?;
    let start = NonNull::new(start.cast::<u8>())?;
    let lead = start.addr().get().wrapping_neg() % HUGE_PAGE;
    // SAFETY: less than a huge page is cut off before it, the rest of one behind it, and nobody knows of either.
    unsafe {
        let begin = start.add(lead);
        unmap(start, lead);
        unmap(begin.add(bytes), HUGE_PAGE - lead);
        Some(begin)
    }
}

/// Give back memory that was mapped.
///
/// # Safety
/// It is whole pages of what `map` gave, and nobody uses it any more.
pub(crate) unsafe fn unmap(start: NonNull<u8>, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the caller's promise. It fails only where the process has too many mappings to cut one in two, and
        // what was to be given back then stays mapped.
        let _ = unsafe { munmap(start.as_ptr().cast(), bytes) };
    }
}

pub(crate) fn out_of_memory<T>(len: usize) -> PackError {
    PackError::OutOfMemory { bytes: len as u128 * size_of::<T>() as u128, plan_in_memory: false }
}

/// Ask for huge pages in memory of the caller's own, from its first page to its last.
#[cfg(target_os = "linux")]
pub(crate) fn advise_huge(start: *const u8, bytes: usize) {
    // With the pages that it shares with its neighbours: left out, they would part the memory of arrays that lie side
    // by side.
    let page = rustix::param::page_size();
    let begin = start as usize / page * page;
    let end = (start as usize + bytes).next_multiple_of(page);
    // SAFETY: the pages are those of the memory; the advice changes how pages are backed, not what they hold.
    // A kernel without huge pages refuses, which costs speed only.
    let _ =
        unsafe { rustix::mm::madvise(begin as *mut core::ffi::c_void, end - begin, rustix::mm::Advice::LinuxHugepage) };
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn advise_huge(_start: *const u8, _bytes: usize) {}

/// Give memory back to the system, but for pages that are shared with what lies before and behind it.
///
/// # Safety
/// The memory is the caller's, and nobody reads it again before it is written.
#[cfg(target_os = "linux")]
pub(crate) unsafe fn give_back(start: *const u8, bytes: usize) {
    let pages = pages_within(start as usize, bytes, rustix::param::page_size());
    if !pages.is_empty() {
        let begin = pages.start as *mut core::ffi::c_void;
        // SAFETY: the caller's promise; what is refused stays as it is.
        let _ = unsafe { rustix::mm::madvise(begin, pages.len(), rustix::mm::Advice::LinuxDontNeed) };
    }
}

/// The whole pages of some memory. `page` is the system's own size of them, 64 KiB on some machines: of a page that the
/// memory has only a part of, the kernel would take all.
#[cfg(target_os = "linux")]
fn pages_within(start: usize, bytes: usize, page: usize) -> Range<usize> {
    start.next_multiple_of(page)..(start + bytes) / page * page
}

/// Keep the memory, where the system takes nothing back.
///
/// # Safety
/// None needed.
#[cfg(not(target_os = "linux"))]
pub(crate) unsafe fn give_back(_start: *const u8, _bytes: usize) {}

/// Physical memory of this machine in bytes, where the system tells.
#[cfg(target_os = "linux")]
pub(crate) fn physical_bytes() -> Option<u64> {
    let info = rustix::system::sysinfo();
    Some(info.totalram as u64 * u64::from(info.mem_unit))
}

/// Physical memory of this machine in bytes, where the system tells.
#[cfg(not(target_os = "linux"))]
pub(crate) fn physical_bytes() -> Option<u64> {
    None
}

/// As `prefetch_address`, for `array[index]`. Any index is fine.
#[inline(always)]
pub(crate) fn prefetch<T>(array: &[T], index: usize) {
    prefetch_address(array.as_ptr().wrapping_add(index).cast());
}

/// Ask the processor to bring what lies at `address` into its second-level cache. Any address is fine.
///
/// Fewer lines can be on their way to the first-level cache at a time, and all else that loops read comes through it:
/// brought to the second level, random lines took half the time on the machine of `benches/RESULTS.md`.
#[inline(always)]
pub(crate) fn prefetch_address(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, whatever the address.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// The array as bytes in this machine's order.
pub(crate) fn as_bytes<T: Zero + Copy>(array: &[T]) -> &[u8] {
    // SAFETY: T is plain integers without padding; any alignment suits u8; the lifetime is the array's.
    unsafe { core::slice::from_raw_parts(array.as_ptr().cast(), size_of_val(array)) }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn pages_of_any_size_are_given_back_whole_or_not_at_all() {
        for page in [4 << 10, 16 << 10, 64 << 10] {
            for (start, bytes) in [(0, 3 * page), (1, 3 * page), (page, page + 4096), (page, page - 1), (5, 6)] {
                let pages = pages_within(start, bytes, page);
                let expected = (start..start + bytes).filter(|at| at % page == 0 && at + page <= start + bytes).count();
                assert_eq!(pages.len() / page, expected, "{bytes} bytes from {start} on, pages of {page}");
                assert!(pages.is_empty() || pages.start.is_multiple_of(page) && pages.len().is_multiple_of(page));
            }
        }
    }
}

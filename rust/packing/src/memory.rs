//! Allocation that reports failure, and hints to the kernel and the processor about memory.
#![allow(unsafe_code)]

use std::alloc::Layout;
use std::mem::MaybeUninit;
use std::sync::atomic::AtomicU64;

use crate::error::PackError;

/// Plain integers: all-zero bytes are a valid value, and there is no padding.
pub(crate) trait PlainInteger: Default {}
impl PlainInteger for u32 {}
impl PlainInteger for u64 {}
impl PlainInteger for i32 {}
impl PlainInteger for i64 {}
impl PlainInteger for AtomicU64 {}

/// Memory from this size on asks for huge pages: filling it takes fewer page faults, and random reads of it fewer
/// address translations.
const HUGE_FROM_BYTES: usize = 4 << 20;

/// `len` zeros, untouched by this process until written.
///
/// Unlike `vec![0; len]` it reports a failed allocation instead of aborting the process.
pub(crate) fn zeroed<T: PlainInteger>(len: usize) -> Result<Vec<T>, PackError> {
    let layout = Layout::array::<T>(len).map_err(|_| out_of_memory::<T>(len))?;
    if layout.size() == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the layout is not of size zero.
    let pointer = unsafe { std::alloc::alloc_zeroed(layout) };
    if pointer.is_null() {
        return Err(out_of_memory::<T>(len));
    }
    advise_huge_pages(pointer, layout.size());
    // SAFETY: the global allocator has just given it with the layout of `len` values of T, and zero bytes are a
    // valid T (trait `PlainInteger`).
    Ok(unsafe { Vec::from_raw_parts(pointer.cast::<T>(), len, len) })
}

/// An empty vector with capacity for `capacity` values; memory that is never written costs nothing.
///
/// Unlike `Vec::with_capacity` it reports a failed allocation instead of aborting the process.
pub(crate) fn with_capacity<T>(capacity: usize) -> Result<Vec<T>, PackError> {
    let mut values = Vec::new();
    values.try_reserve_exact(capacity).map_err(|_| out_of_memory::<T>(capacity))?;
    let memory: &[MaybeUninit<T>] = values.spare_capacity_mut();
    advise_huge_pages(memory.as_ptr().cast(), size_of_val(memory));
    Ok(values)
}

/// Make room for `more` values in `values`.
pub(crate) fn reserve<T>(values: &mut Vec<T>, more: usize) -> Result<(), PackError> {
    values.try_reserve_exact(more).map_err(|_| out_of_memory::<T>(values.len().saturating_add(more)))
}

fn out_of_memory<T>(len: usize) -> PackError {
    PackError::OutOfMemory { bytes: len as u128 * size_of::<T>() as u128, plan_in_memory: false }
}

/// Ask the kernel to back whole pages of this memory with huge pages, where it is large.
fn advise_huge_pages(start: *const u8, bytes: usize) {
    if bytes < HUGE_FROM_BYTES {
        return;
    }
    let page = rustix::param::page_size();
    let begin = start.addr().next_multiple_of(page);
    let end = (start.addr() + bytes) / page * page;
    let pages = start.wrapping_add(begin - start.addr()).cast_mut().cast();
    // SAFETY: the pages lie within the memory, and the advice changes how they are backed, not what they hold. A kernel
    // without huge pages refuses, which costs speed only.
    let _ = unsafe { rustix::mm::madvise(pages, end - begin, rustix::mm::Advice::LinuxHugepage) };
}

/// Physical memory of this machine in bytes.
pub(crate) fn physical_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram as u64 * u64::from(info.mem_unit)
}

/// Prefetch `array[index]`. Any index is fine.
#[inline(always)]
pub(crate) fn prefetch<T>(array: &[T], index: usize) {
    prefetch_address(array.as_ptr().wrapping_add(index).cast());
}

/// Prefetch the cache line at `address` into the second-level cache. Any address is fine.
///
/// The second level takes more lines at a time than the first: random reads took half the time.
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
pub(crate) fn as_bytes<T: PlainInteger + Copy>(array: &[T]) -> &[u8] {
    // SAFETY: T is plain integers without padding; any alignment suits u8; the lifetime is the array's.
    unsafe { core::slice::from_raw_parts(array.as_ptr().cast(), size_of_val(array)) }
}

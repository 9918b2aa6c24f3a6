//! Large zeroed arrays, and hints to the processor and the kernel about memory.
//!
//! Nothing here changes what is computed.
#![allow(unsafe_code)]

use std::alloc::Layout;
use std::sync::atomic::AtomicU64;

use crate::error::PackError;

/// Types whose all-zero bytes are a valid value.
pub(crate) trait Zero: Default {}
impl Zero for u32 {}
impl Zero for u64 {}
impl Zero for i32 {}
impl Zero for i64 {}
impl Zero for AtomicU64 {}

/// Arrays from this size on are backed by huge pages: fewer faults while filling them, fewer
/// address-translation misses while reading them at random.
const HUGE_FROM_BYTES: usize = 4 << 20;

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
    advise_huge(&array);
    Ok(array)
}

fn out_of_memory<T>(len: usize) -> PackError {
    PackError::Invalid(format!(
        "cannot allocate {} bytes of memory for the plan; write it to a folder with out= or cache_dir=",
        len as u128 * size_of::<T>() as u128
    ))
}

#[cfg(target_os = "linux")]
fn advise_huge<T>(array: &[T]) {
    const PAGE: usize = 4096;
    let bytes = size_of_val(array);
    if bytes < HUGE_FROM_BYTES {
        return;
    }
    let begin = (array.as_ptr() as usize).next_multiple_of(PAGE);
    let end = (array.as_ptr() as usize + bytes) & !(PAGE - 1);
    // SAFETY: the range lies within the array; the advice changes how pages are backed, not what they hold.
    // A kernel without huge pages refuses, which costs speed only.
    let _ =
        unsafe { rustix::mm::madvise(begin as *mut core::ffi::c_void, end - begin, rustix::mm::Advice::LinuxHugepage) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge<T>(_array: &[T]) {
    let _ = HUGE_FROM_BYTES;
}

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

/// Ask the processor to bring `array[index]` into its caches. Any index is fine.
#[inline(always)]
pub(crate) fn prefetch<T>(array: &[T], index: usize) {
    prefetch_address(array.as_ptr().wrapping_add(index).cast());
}

/// Ask the processor to bring what lies at `address` into its caches. Any address is fine.
#[inline(always)]
pub(crate) fn prefetch_address(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults, whatever the address.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// The array as bytes in this machine's order.
pub(crate) fn as_bytes<T: Zero + Copy>(array: &[T]) -> &[u8] {
    // SAFETY: T is a plain integer without padding; any alignment suits u8; the lifetime is the array's.
    unsafe { core::slice::from_raw_parts(array.as_ptr().cast(), size_of_val(array)) }
}

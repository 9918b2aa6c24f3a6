//! Arrays of integers whose memory is as quick to fill as memory can be.
//!
//! Owns the memory of a plan's columns, and of what is as large while they are made. What always holds: the first `len`
//! values were written; of large arrays that are made here every page is a huge one, where the kernel has those, since
//! they begin and end on its boundaries: an allocator's own notes between arrays would leave small pages at both ends
//! of each, of which every one costs a fault. The largest are the system's own memory and go back to it when they are
//! dropped: an allocator keeps what it once gave, and of plans that are made one after the other it kept a second one.
#![allow(unsafe_code)]

use std::alloc::{self, Layout};
use std::fmt;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::error::PackError;
use crate::memory::{self, HUGE_PAGE, Zero};

/// Arrays from this size on are whole huge pages.
const WHOLE_PAGES_FROM_BYTES: usize = 1 << 20;
/// And from this size on no allocator's.
const MAPPED_FROM_BYTES: usize = 4 << 20;

/// As a `Vec`, but for where its memory begins and ends.
pub struct Array<T> {
    start: NonNull<T>,
    len: usize,
    capacity: usize,
    /// That of the memory at `start`, which no allocator gave where `is_mapped` says so.
    layout: Layout,
}

// SAFETY: it owns its values, as a `Vec` does.
unsafe impl<T: Send> Send for Array<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Array<T> {}

/// Whether memory of this layout is the system's own. No `Vec` has one that is aligned so.
fn is_mapped(layout: Layout) -> bool {
    layout.align() == HUGE_PAGE && layout.size() >= MAPPED_FROM_BYTES
}

impl<T> Array<T> {
    /// `len` zeros, untouched by this process until written.
    ///
    /// Unlike `vec![0; len]` it reports a failed allocation instead of aborting the process.
    pub(crate) fn zeroed(len: usize) -> Result<Self, PackError>
    where
        T: Zero,
    {
        if len.saturating_mul(size_of::<T>()) < MAPPED_FROM_BYTES {
            return memory::zeroed(len).map(Self::from);
        }
        let mut array = Self::with_room(len)?;
        // The system maps nothing but zeros, which are values of T.
        array.len = len;
        Ok(array)
    }

    /// An empty array with room for `capacity` values.
    ///
    /// Unlike `Vec::with_capacity` it reports a failed allocation instead of aborting the process.
    pub(crate) fn with_room(capacity: usize) -> Result<Self, PackError> {
        let refused = || memory::out_of_memory::<T>(capacity);
        let plain = Layout::array::<T>(capacity).map_err(|_| refused())?;
        if plain.size() == 0 {
            return Ok(Self::default());
        }
        let layout = match plain.size() < WHOLE_PAGES_FROM_BYTES {
            true => plain,
            false => plain.align_to(HUGE_PAGE).map_err(|_| refused())?.pad_to_align(),
        };
        let start = match is_mapped(layout) {
            true => memory::map(layout.size()),
            // SAFETY: not of size zero.
            false => NonNull::new(unsafe { alloc::alloc(layout) }),
        };
        let start = start.ok_or_else(refused)?.cast::<T>();
        if layout.align() == HUGE_PAGE {
            memory::advise_huge(start.as_ptr().cast(), layout.size());
        }
        Ok(Self { start, len: 0, capacity, layout })
    }

    /// Make room for `more` values behind those that are there.
    pub(crate) fn reserve(&mut self, more: usize) -> Result<(), PackError>
    where
        T: Copy,
    {
        let needed = self.len.saturating_add(more);
        if needed > self.capacity {
            let mut larger = Self::with_room(needed.max(2 * self.capacity))?;
            larger.spare_capacity_mut()[..self.len].write_copy_of_slice(self);
            // SAFETY: just written.
            unsafe { larger.set_len(self.len) };
            *self = larger;
        }
        Ok(())
    }

    /// The room behind the values.
    pub(crate) fn spare_capacity_mut(&mut self) -> &mut [MaybeUninit<T>] {
        // SAFETY: the memory is there for `capacity` values, and may hold anything.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(self.len).cast(), self.capacity - self.len) }
    }

    /// How many values there is room for, in all.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Say how many values there are.
    ///
    /// # Safety
    /// No more than there is room for, and all of them were written.
    pub(crate) unsafe fn set_len(&mut self, len: usize) {
        debug_assert!(len <= self.capacity);
        self.len = len;
    }

    /// Keep the first `len` values at most.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}

impl Array<i64> {
    /// The values in 32 bits, in the lower half of the same memory; the upper half is given back to the system.
    ///
    /// `tick` is called with each position before it is converted, and ends it with an error.
    pub(crate) fn narrowed(
        self,
        mut tick: impl FnMut(usize) -> Result<(), PackError>,
    ) -> Result<Array<i32>, PackError> {
        let narrow = self.start.cast::<i32>().as_ptr();
        for position in 0..self.len {
            tick(position)?;
            // SAFETY: a value is written over bytes of values at or before its own position, which were read.
            unsafe {
                let value = self.start.as_ptr().add(position).read();
                narrow.add(position).write(value as i32);
            }
        }
        let whole = ManuallyDrop::new(self);
        let used = whole.len * size_of::<i32>();
        if whole.layout.size() >= WHOLE_PAGES_FROM_BYTES {
            // SAFETY: within the array, and beyond its values.
            unsafe { memory::give_back(whole.start.as_ptr().cast::<u8>().add(used), whole.layout.size() - used) };
        }
        Ok(Array { start: whole.start.cast(), len: whole.len, capacity: whole.capacity * 2, layout: whole.layout })
    }
}

impl<T> Default for Array<T> {
    fn default() -> Self {
        Self::from(Vec::new())
    }
}

impl<T> From<Vec<T>> for Array<T> {
    fn from(values: Vec<T>) -> Self {
        let mut values = ManuallyDrop::new(values);
        // A Vec has never more than a layout can say.
        let layout = Layout::array::<T>(values.capacity()).unwrap_or(Layout::new::<()>());
        let start = NonNull::new(values.as_mut_ptr()).unwrap_or(NonNull::dangling());
        Self { start, len: values.len(), capacity: values.capacity(), layout }
    }
}

impl<T> Drop for Array<T> {
    fn drop(&mut self) {
        if is_mapped(self.layout) {
            // SAFETY: mapped in this size, and nobody uses it any more.
            unsafe { memory::unmap(self.start.cast(), self.layout.size()) };
        } else if self.layout.size() > 0 {
            // SAFETY: allocated with this layout by the global allocator, which is a Vec's, too.
            unsafe { alloc::dealloc(self.start.as_ptr().cast(), self.layout) };
        }
    }
}

impl<T> Deref for Array<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: the first `len` values were written.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Array<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Clone> Clone for Array<T> {
    fn clone(&self) -> Self {
        Self::from(self.to_vec())
    }
}

impl<T: PartialEq> PartialEq for Array<T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T: Eq> Eq for Array<T> {}

impl<T: fmt::Debug> fmt::Debug for Array<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(len: usize) -> Array<i64> {
        let mut array = Array::with_room(len + 3).unwrap();
        for (place, value) in array.spare_capacity_mut().iter_mut().take(len).zip(0..) {
            place.write(value);
        }
        // SAFETY: just written.
        unsafe { array.set_len(len) };
        array
    }

    #[test]
    fn values_stay_what_they_are_however_the_memory_is_made() {
        for len in [0usize, 1, 1000, WHOLE_PAGES_FROM_BYTES / 8, HUGE_PAGE / 8 + 1] {
            let expected: Vec<i64> = (0..len as i64).collect();
            let mut array = filled(len);
            assert_eq!(*array, expected[..]);
            assert_eq!(array.spare_capacity_mut().len(), array.capacity() - len);
            assert_eq!(array, Array::from(expected.clone()));
            array.reserve(HUGE_PAGE / 8).unwrap();
            assert!(array.capacity() - array.len() >= HUGE_PAGE / 8);
            assert_eq!(*array.clone(), expected[..]);
            array.truncate(len / 2);
            assert_eq!(*array, expected[..len / 2]);
            array.truncate(len);
            assert_eq!(array.len(), len / 2);
        }
    }

    #[test]
    fn large_arrays_begin_on_a_huge_page() {
        for len in [WHOLE_PAGES_FROM_BYTES / 8, HUGE_PAGE / 8, 5 << 20] {
            assert_eq!(filled(len).as_ptr().addr() % HUGE_PAGE, 0);
        }
    }

    #[test]
    fn zeros_are_values_however_the_memory_is_made() {
        for len in [0usize, 1, MAPPED_FROM_BYTES / 8 - 1, MAPPED_FROM_BYTES / 8, 5 << 20] {
            let array = Array::<u64>::zeroed(len).unwrap();
            assert_eq!(array.len(), len);
            assert!(array.iter().all(|&value| value == 0));
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn large_arrays_go_back_to_the_system() {
        for bytes in [MAPPED_FROM_BYTES, 5 << 20, 31 << 20, 100 << 20] {
            let is_gone = |array: Array<i32>| {
                let page = array.as_ptr() as *mut core::ffi::c_void;
                drop(array);
                // SAFETY: advice that changes nothing; it is refused where nothing is mapped.
                let advised = unsafe { rustix::mm::madvise(page, 4096, rustix::mm::Advice::Normal) };
                advised == Err(rustix::io::Errno::NOMEM)
            };
            // Another thread may have been given the same place by then, but not each time.
            assert!((0..100).any(|_| is_gone(filled(bytes / 8).narrowed(|_| Ok(())).unwrap())));
            assert!((0..100).any(|_| is_gone(Array::zeroed(bytes / 4).unwrap())));
        }
    }

    #[test]
    fn narrowed_values_are_the_same_in_half_the_memory() {
        for len in [0usize, 1, 5, HUGE_PAGE / 8, 3 * HUGE_PAGE / 8 + 7] {
            for array in [filled(len), Array::from((0..len as i64).collect::<Vec<_>>())] {
                let narrow = array.narrowed(|_| Ok(())).unwrap();
                assert!(narrow.iter().copied().eq(0..len as i32));
            }
        }
        let mut seen = 0;
        let refused = filled(10).narrowed(|position| {
            seen = position;
            if position == 4 { Err(PackError::InputChanged) } else { Ok(()) }
        });
        assert!(refused.is_err());
        assert_eq!(seen, 4);
    }

    #[test]
    fn what_no_memory_holds_is_refused() {
        for len in [usize::MAX, isize::MAX as usize / 8, 1 << 59] {
            assert!(Array::<i64>::with_room(len).is_err());
        }
    }
}

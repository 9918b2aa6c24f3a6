//! Arrays of integers whose memory is as quick to fill as memory can be.
//!
//! Owns the memory of a plan's columns, and of what is as large while they are made. What always holds: the first `len`
//! values were written; of large arrays that are made here every page is a huge one, where the kernel has those, since
//! their memory begins and ends on its boundaries: an allocator's own notes between arrays would leave small pages at
//! both ends of each, of which every one costs a fault. What takes more than one huge page goes back to the system when
//! it is dropped, unless whoever set up the process's allocator wants memory to be kept: what an allocator would keep
//! by itself is mapped here, since of plans that were made one after the other it kept a second one.
#![allow(unsafe_code)]

use std::alloc::{self, Layout};
use std::fmt;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::PackError;
use crate::memory::{self, HUGE_PAGE, Zero};

/// Memory from this size on is whole huge pages.
const WHOLE_PAGES_FROM_BYTES: usize = 1 << 20;
/// Zeros from this size on are mapped.
const MAPPED_FROM_BYTES: usize = 4 << 20;
/// Memory of more than a huge page is mapped up to this size, and from it on the allocator's: glibc's then has it from
/// the system and gives it back (`M_MMAP_THRESHOLD` grows by itself up to here, mallopt(3)). In a process that is told
/// to keep memory it is kept, and a later plan need not wait until the kernel has cleared as much.
const GIVEN_BACK_FROM_BYTES: usize = 32 << 20;

/// Memory of one array, or of several that lie side by side.
struct Memory {
    /// Where the arrays begin.
    start: NonNull<u8>,
    /// What was given, with the place up to where a huge page begins.
    given: NonNull<u8>,
    layout: Layout,
    /// Whether no allocator gave it.
    is_mapped: bool,
}

// SAFETY: it is only memory.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Memory that may hold anything; none where there is no more. The size is not zero.
    fn new(plain: Layout) -> Option<Self> {
        if plain.size() < WHOLE_PAGES_FROM_BYTES {
            return Self::allocated(plain, 1);
        }
        let whole = whole_pages(plain)?;
        match whole.size() {
            ..=HUGE_PAGE => Self::allocated(whole, 1),
            size if size < GIVEN_BACK_FROM_BYTES => Self::mapped(plain),
            // Moved to the boundary here: an allocator that is asked to do so cuts off what lies before it, and what it
            // is given back is then too small for the next one of the same size.
            size => {
                let with_lead = Layout::from_size_align(size.checked_add(HUGE_PAGE)?, plain.align()).ok()?;
                Self::allocated(with_lead, HUGE_PAGE)
            }
        }
    }

    /// Memory of this layout that begins at a multiple of `boundary`, for which it has room.
    fn allocated(layout: Layout, boundary: usize) -> Option<Self> {
        // SAFETY: not of size zero.
        let given = NonNull::new(unsafe { alloc::alloc(layout) })?;
        let lead = given.addr().get().wrapping_neg() % boundary;
        // SAFETY: within what was given, since it has the room.
        let start = unsafe { given.add(lead) };
        if layout.size() >= WHOLE_PAGES_FROM_BYTES {
            memory::advise_huge(start.as_ptr(), layout.size() - lead);
        }
        Some(Self { start, given, layout, is_mapped: false })
    }

    /// Zeros that the system maps; none where there is no more.
    fn mapped(plain: Layout) -> Option<Self> {
        let layout = whole_pages(plain)?;
        let start = memory::map(layout.size())?;
        memory::advise_huge(start.as_ptr(), layout.size());
        Some(Self { start, given: start, layout, is_mapped: true })
    }
}

/// Of as many bytes, from where a huge page begins to where one ends.
fn whole_pages(layout: Layout) -> Option<Layout> {
    Some(layout.align_to(HUGE_PAGE).ok()?.pad_to_align())
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.is_mapped {
            // SAFETY: mapped in this size, and nobody uses it any more.
            unsafe { memory::unmap(self.given, self.layout.size()) };
        } else if self.layout.size() > 0 {
            // SAFETY: allocated with this layout by the global allocator, which is a Vec's, too.
            unsafe { alloc::dealloc(self.given.as_ptr(), self.layout) };
        }
    }
}

/// As a `Vec`, but for where its memory begins and ends.
pub struct Array<T> {
    start: NonNull<T>,
    len: usize,
    capacity: usize,
    /// What `start` lies in; nobody else uses the part of it that begins there.
    memory: Arc<Memory>,
}

// SAFETY: it owns its values, as a `Vec` does.
unsafe impl<T: Send> Send for Array<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Array<T> {}

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
        let [mut array] = Self::in_one_memory(len, Memory::mapped)?;
        // The system maps nothing but zeros, which are values of T.
        array.len = len;
        Ok(array)
    }

    /// An empty array with room for `capacity` values.
    ///
    /// Unlike `Vec::with_capacity` it reports a failed allocation instead of aborting the process.
    pub(crate) fn with_room(capacity: usize) -> Result<Self, PackError> {
        Self::in_one_memory(capacity, Memory::new).map(|[array]| array)
    }

    /// As `with_room`, `N` times. Large ones lie side by side, and their memory goes back when the last of them is
    /// dropped: so it can be of the size that an allocator knows how to give back or to keep.
    pub(crate) fn with_rooms<const N: usize>(capacity: usize) -> Result<[Self; N], PackError> {
        if capacity.saturating_mul(N * size_of::<T>()) >= GIVEN_BACK_FROM_BYTES {
            return Self::in_one_memory(capacity, Memory::new);
        }
        let mut arrays = [const { None }; N];
        for array in &mut arrays {
            *array = Some(Self::with_room(capacity)?);
        }
        Ok(arrays.map(Option::unwrap_or_default))
    }

    fn in_one_memory<const N: usize>(
        capacity: usize,
        memory_of: impl Fn(Layout) -> Option<Memory>,
    ) -> Result<[Self; N], PackError> {
        let values = capacity.saturating_mul(N);
        let refused = || memory::out_of_memory::<T>(values);
        let layout = Layout::array::<T>(values).map_err(|_| refused())?;
        if layout.size() == 0 {
            return Ok(std::array::from_fn(|_| Self::default()));
        }
        let memory = Arc::new(memory_of(layout).ok_or_else(refused)?);
        Ok(std::array::from_fn(|number| Self {
            // SAFETY: there is room for all of them.
            start: unsafe { memory.start.cast::<T>().add(number * capacity) },
            len: 0,
            capacity,
            memory: Arc::clone(&memory),
        }))
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
        let (used, room) = (self.len * size_of::<i32>(), self.capacity * size_of::<i64>());
        if room >= WHOLE_PAGES_FROM_BYTES {
            // SAFETY: within the array, and beyond its values.
            unsafe { memory::give_back(narrow.cast::<u8>().add(used), room - used) };
        }
        Ok(Array { start: self.start.cast(), len: self.len, capacity: self.capacity * 2, memory: self.memory })
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
        let memory = Arc::new(Memory { start: start.cast(), given: start.cast(), layout, is_mapped: false });
        Self { start, len: values.len(), capacity: values.capacity(), memory }
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
    fn arrays_side_by_side_are_apart() {
        for len in [0usize, 5, HUGE_PAGE / 8 + 1, GIVEN_BACK_FROM_BYTES / 24 + 1] {
            let mut arrays = Array::<i64>::with_rooms::<3>(len).unwrap();
            for (array, first) in arrays.iter_mut().zip(1..) {
                array.spare_capacity_mut().iter_mut().zip(first..).for_each(|(place, value)| _ = place.write(value));
                // SAFETY: just written.
                unsafe { array.set_len(len) };
            }
            let [first, second, third] = arrays;
            let second = second.narrowed(|_| Ok(())).unwrap();
            assert!(first.iter().copied().eq(1..=len as i64));
            drop(first);
            assert!(second.iter().copied().eq(2..2 + len as i32));
            assert!(third.iter().copied().eq(3..3 + len as i64));
        }
        assert!(Array::<i64>::with_rooms::<3>(usize::MAX).is_err());
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
        // As those of numpy do, it raises the size up to which glibc's allocator keeps memory.
        drop(std::hint::black_box(vec![1u8; 30 << 20]));
        for bytes in [HUGE_PAGE + 1, MAPPED_FROM_BYTES, 5 << 20, 31 << 20, 100 << 20] {
            let is_gone = |array: Array<i32>| {
                let page = array.as_ptr() as *mut core::ffi::c_void;
                drop(array);
                // SAFETY: advice that changes nothing; it is refused where nothing is mapped.
                let advised = unsafe { rustix::mm::madvise(page, 4096, rustix::mm::Advice::Normal) };
                advised == Err(rustix::io::Errno::NOMEM)
            };
            // Another thread may have been given the same place by then, but not each time.
            assert!((0..100).any(|_| is_gone(filled(bytes / 8).narrowed(|_| Ok(())).unwrap())));
            assert!(bytes < MAPPED_FROM_BYTES || (0..100).any(|_| is_gone(Array::zeroed(bytes / 4).unwrap())));
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

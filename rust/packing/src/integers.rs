//! A borrowed column of integers of any width, contiguous or strided.
//!
//! Invariants: every read is bounds-checked against the length given at construction, happens once, and goes through a
//! raw pointer. So a column that another thread writes to gives some value, never undefined behaviour in code that
//! trusted two reads to agree.
#![allow(unsafe_code)]

use core::marker::PhantomData;

use crate::simd::vectorized;

/// The integer types a column may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IntegerKind {
    /// 8 bits, signed
    I8,
    /// 16 bits, signed
    I16,
    /// 32 bits, signed
    I32,
    /// 64 bits, signed
    I64,
    /// 8 bits, unsigned
    U8,
    /// 16 bits, unsigned
    U16,
    /// 32 bits, unsigned
    U32,
    /// 64 bits, unsigned
    U64,
}

impl IntegerKind {
    /// Whether values may be negative.
    #[must_use]
    pub fn is_signed(self) -> bool {
        matches!(self, Self::I8 | Self::I16 | Self::I32 | Self::I64)
    }
}

/// Values between the prefetch of one and its use: as many as the memory system can have in flight.
const GATHER_AHEAD: usize = 160;

/// A borrowed column of integers.
#[derive(Clone, Copy, Debug)]
pub struct Integers<'a> {
    data: *const u8,
    len: usize,
    stride: isize,
    kind: IntegerKind,
    borrow: PhantomData<&'a [u8]>,
}

// SAFETY: reads only; the memory outlives 'a by the contract of `from_raw`.
unsafe impl Send for Integers<'_> {}
// SAFETY: as above.
unsafe impl Sync for Integers<'_> {}

/// Integers that a column can be read into: 64 bits, which hold any value, or the low 32 bits of it.
pub trait ColumnWord: Copy + Default + Ord + Send + Sync + 'static {
    /// The low bits of a sign-extended value.
    fn truncate(value: u64) -> Self;
    /// The bits of the value, with zeros above.
    fn widen(self) -> u64;
}

macro_rules! word {
    ($($word:ty, $unsigned:ty);*) => {$(
        impl ColumnWord for $word {
            #[inline(always)]
            fn truncate(value: u64) -> Self {
                value as $word
            }
            #[inline(always)]
            fn widen(self) -> u64 {
                self as $unsigned as u64
            }
        }
    )*};
}
word!(u32, u32; u64, u64; i32, u32; i64, u64);

/// A machine integer, sign-extended to 64 bits.
trait MachineInteger: Copy {
    fn extend(self) -> u64;
}

macro_rules! source {
    ($($type:ty),*) => {$(
        impl MachineInteger for $type {
            #[inline(always)]
            fn extend(self) -> u64 {
                self as i64 as u64
            }
        }
    )*};
}
source!(i8, i16, i32, i64, u8, u16, u32, u64);

/// Evaluate `$body` with `$type` as the type of a column of `$kind`.
macro_rules! with_type {
    ($kind:expr, $type:ident => $body:expr) => {
        with_type!($kind, $type => $body; I8 i8, I16 i16, I32 i32, I64 i64, U8 u8, U16 u16, U32 u32, U64 u64)
    };
    ($kind:expr, $type:ident => $body:expr; $($variant:ident $machine:ty),*) => {
        match $kind {
            $(IntegerKind::$variant => {
                type $type = $machine;
                $body
            })*
        }
    };
}

macro_rules! from_slice {
    ($($type:ty => $kind:ident),*) => {$(
        impl<'a> From<&'a [$type]> for Integers<'a> {
            fn from(slice: &'a [$type]) -> Self {
                // SAFETY: a slice is readable memory of its length for its lifetime.
                unsafe {
                    Self::from_raw(slice.as_ptr().cast(), slice.len(), size_of::<$type>() as isize, IntegerKind::$kind)
                }
            }
        }
    )*};
}
from_slice!(i8 => I8, i16 => I16, i32 => I32, i64 => I64, u8 => U8, u16 => U16, u32 => U32, u64 => U64);

impl<'a> Integers<'a> {
    /// A column over `len` integers of `kind`, `stride` bytes apart, the first at `data`. No alignment is needed.
    ///
    /// # Safety
    /// The memory of every element stays readable for `'a`. Its content may change.
    #[must_use]
    pub unsafe fn from_raw(data: *const u8, len: usize, stride: isize, kind: IntegerKind) -> Self {
        Self { data, len, stride, kind, borrow: PhantomData }
    }

    /// How many integers.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first `len` integers, or all of them where there are fewer.
    #[must_use]
    pub fn first(&self, len: usize) -> Self {
        Self { len: self.len.min(len), ..*self }
    }

    /// The type of the integers.
    #[must_use]
    pub fn kind(&self) -> IntegerKind {
        self.kind
    }

    /// A value that was read from the column, sign-extended, as the number that its type says.
    #[must_use]
    pub(crate) fn as_given(&self, value: u64) -> i128 {
        if self.kind.is_signed() { i128::from(value as i64) } else { i128::from(value) }
    }

    /// One value, sign-extended to 64 bits.
    ///
    /// # Panics
    /// When `index` is out of range.
    #[inline]
    #[must_use]
    pub fn get(&self, index: usize) -> u64 {
        assert!(index < self.len, "index within the column");
        with_type!(self.kind, T => {
            // SAFETY: the index was checked against the column's length.
            unsafe { self.at::<T>(index).read_unaligned() }.extend()
        })
    }

    /// Prefetch the value at `index`. Any index is fine.
    #[inline(always)]
    pub fn prefetch(self, index: usize) {
        crate::memory::prefetch_address(self.at::<u8>(index));
    }

    /// Read `out.len()` consecutive values from `start` on, and return the bitwise or of them all, sign-extended. Its
    /// top bit tells whether any value is negative or 2⁶³ and above, its upper half whether any exceeds 32 bits.
    ///
    /// # Panics
    /// When the range is not within the column.
    pub fn read<W: ColumnWord>(&self, start: usize, out: &mut [W]) -> u64 {
        assert!(start <= self.len && out.len() <= self.len - start, "range within the column");
        with_type!(self.kind, T => {
            // SAFETY: the range was checked against the column's length.
            vectorized(|| unsafe { self.read_typed::<T, W>(start, out) })
        })
    }

    /// # Safety
    /// `start + out.len()` is at most the column's length, and T is the column's type.
    #[inline(always)]
    unsafe fn read_typed<T: MachineInteger, W: ColumnWord>(&self, start: usize, out: &mut [W]) -> u64 {
        let mut seen = 0u64;
        if self.stride == size_of::<T>() as isize {
            // SAFETY: in range, by the caller's promise.
            let base = unsafe { self.data.cast::<T>().add(start) };
            for (offset, slot) in out.iter_mut().enumerate() {
                // SAFETY: in range, by the caller's promise.
                let value = unsafe { base.add(offset).read_unaligned() }.extend();
                seen |= value;
                *slot = W::truncate(value);
            }
        } else {
            for (offset, slot) in out.iter_mut().enumerate() {
                // SAFETY: in range, by the caller's promise.
                let value = unsafe { self.at::<T>(start + offset).read_unaligned() }.extend();
                seen |= value;
                *slot = W::truncate(value);
            }
        }
        seen
    }

    #[inline(always)]
    fn at<T>(&self, index: usize) -> *const T {
        self.data.wrapping_offset(self.stride.wrapping_mul(index as isize)).cast()
    }

    /// Read the values at `indices` into `out`, as many as there are indices, and return the bitwise or of them all as
    /// `read` does.
    ///
    /// # Panics
    /// When an index is out of range, or `out` and `indices` differ in length.
    pub fn gather<I: ColumnWord, W: ColumnWord>(&self, indices: &[I], out: &mut [W]) -> u64 {
        self.gather_with(indices, out, |_| (), |_| ())
    }

    /// As `gather`, and call `visit` with every index, and `prefetch` with the index some reads before that: work that
    /// costs little beside the latency of the memory.
    ///
    /// # Panics
    /// As `gather`.
    pub fn gather_with<I: ColumnWord, W: ColumnWord>(
        &self,
        indices: &[I],
        out: &mut [W],
        prefetch: impl FnMut(u64),
        visit: impl FnMut(u64),
    ) -> u64 {
        assert_eq!(indices.len(), out.len(), "one slot an index");
        with_type!(self.kind, T => {
            if self.stride == size_of::<T>() as isize {
                vectorized(|| self.gather_typed::<T, I, W, true>(indices, out, prefetch, visit))
            } else {
                vectorized(|| self.gather_typed::<T, I, W, false>(indices, out, prefetch, visit))
            }
        })
    }

    #[inline(always)]
    fn gather_typed<T: MachineInteger, I: ColumnWord, W: ColumnWord, const DENSE: bool>(
        &self,
        indices: &[I],
        out: &mut [W],
        mut prefetch: impl FnMut(u64),
        mut visit: impl FnMut(u64),
    ) -> u64 {
        // Checked in a loop of its own, which is vectorised: cheaper than one more test among the loads.
        let largest = indices.iter().map(|index| index.widen()).max().unwrap_or_default();
        assert!(indices.is_empty() || largest < self.len as u64, "index within the column");
        let mut seen = 0u64;
        for (position, (&index, slot)) in indices.iter().zip(out.iter_mut()).enumerate() {
            // A random order misses the caches; the prefetch hides that latency.
            if let Some(ahead) = indices.get(position + GATHER_AHEAD) {
                self.prefetch(ahead.widen() as usize);
                prefetch(ahead.widen());
            }
            visit(index.widen());
            let index = index.widen() as usize;
            let address = if DENSE { self.data.cast::<T>().wrapping_add(index) } else { self.at::<T>(index) };
            // SAFETY: no index exceeds the largest, which was checked against the column's length.
            let value = unsafe { address.read_unaligned() }.extend();
            seen |= value;
            *slot = W::truncate(value);
        }
        seen
    }
}

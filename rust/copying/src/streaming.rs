//! Stores that go past the caches, of several streams at once.
//!
//! One stream waits at each page, where the processor's prefetching ends and begins anew; four wait side by side. On
//! one thread they take 0.78 of the time of one (Zen 4, pages of 4 KiB), on two 0.8 to 0.9. Two or eight gain less, and
//! so do streams that are closer than 64 KiB; at 16 KiB nothing is gained.
//!
//! Invariants: when [`copy`] returns, every thread that is told so sees every byte that it stored.
#![allow(unsafe_code)]

use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
use std::ops::Range;

use crate::pieces::{Copy, Pieces};

/// Less may as well stay in a cache.
const LEAST: usize = 4096;

/// What is stored at once.
const STORE: usize = 32;
/// Two lines of the cache, of each stream in turn: stores that fill lines one after the other are put together on
/// the way to memory.
const BLOCK: usize = 4 * STORE;

const STREAMS: usize = 4;
/// Less is one stream's: several would be so close to each other that they gain little.
const WORTH_STREAMS: usize = STREAMS << 15;

/// # Safety
/// As of [`copy`](crate::copy); the processor has AVX.
#[target_feature(enable = "avx")]
pub(crate) unsafe fn copy(pieces: &Pieces, bytes: Range<usize>) {
    let each = if bytes.len() < WORTH_STREAMS { bytes.len() } else { bytes.len().div_ceil(STREAMS) };
    let mut streams = [0, 1, 2, 3].map(|number| {
        let [start, end] = [number, number + 1].map(|edge| bytes.end.min(bytes.start + edge * each));
        Stream::over(pieces.parts(start..end))
    });
    // SAFETY: of every stream as many bytes are left as are stored.
    unsafe {
        loop {
            let run = streams.iter_mut().map(|stream| stream.prepare()).min().unwrap_or(0);
            if run == 0 {
                break;
            }
            store(streams.each_mut().map(|stream| stream.take(run)), run);
        }
        // The last bytes of streams with more copies to begin and to end, and all of few bytes.
        for stream in &mut streams {
            while let run @ 1.. = stream.prepare() {
                store([stream.take(run)], run);
            }
        }
    }
    // Streaming stores are in no order with others: without this a thread that is told that they are over might
    // read what was there before.
    _mm_sfence();
}

/// Copies one after the other.
struct Stream<I> {
    copies: I,
    /// What is left of the one that was begun; its target is at a multiple of `STORE`.
    left: Copy,
}

impl<I: Iterator<Item = Copy>> Stream<I> {
    fn over(copies: I) -> Self {
        Stream { copies, left: Copy { source: std::ptr::null(), target: std::ptr::null_mut(), length: 0 } }
    }

    /// Copies what is not to be streamed, up to what is; the bytes of that, in whole blocks; 0 at the end.
    ///
    /// # Safety
    /// As of [`copy`](crate::copy).
    unsafe fn prepare(&mut self) -> usize {
        while self.left.length < BLOCK {
            // SAFETY: the caller's promise.
            unsafe { copy_plainly(self.left) };
            self.left.length = 0;
            let Some(next) = self.copies.next() else { break };
            let lead = if next.length < LEAST { next.length } else { next.target.align_offset(STORE).min(next.length) };
            // SAFETY: the caller's promise.
            unsafe { copy_plainly(next.before(lead)) };
            self.left = next.after(lead);
        }
        self.left.length / BLOCK * BLOCK
    }

    /// The next `length` bytes, which are not this stream's any more.
    fn take(&mut self, length: usize) -> Copy {
        let taken = self.left.before(length);
        self.left = self.left.after(length);
        taken
    }
}

unsafe fn copy_plainly(copy: Copy) {
    // SAFETY: the caller's promise.
    unsafe { copy.source.copy_to_nonoverlapping(copy.target, copy.length) };
}

/// `length` bytes of each, a multiple of `BLOCK`, to targets at multiples of `STORE`.
///
/// # Safety
/// As of [`copy`](crate::copy); the processor has AVX.
#[target_feature(enable = "avx")]
unsafe fn store<const N: usize>(copies: [Copy; N], length: usize) {
    for at in (0..length).step_by(BLOCK) {
        for copy in copies {
            // SAFETY: every block lies within; stores are aligned, loads need not be.
            unsafe {
                let from = copy.source.add(at).cast::<__m256i>();
                let to = copy.target.add(at).cast::<__m256i>();
                let parts = [
                    _mm256_loadu_si256(from),
                    _mm256_loadu_si256(from.add(1)),
                    _mm256_loadu_si256(from.add(2)),
                    _mm256_loadu_si256(from.add(3)),
                ];
                _mm256_stream_si256(to, parts[0]);
                _mm256_stream_si256(to.add(1), parts[1]);
                _mm256_stream_si256(to.add(2), parts[2]);
                _mm256_stream_si256(to.add(3), parts[3]);
            }
        }
    }
}

//! Copies host memory past the caches, on several threads.
//!
//! The bytes that a save stages are not read again before they are written to the disk, and are larger than any cache.
//! Ordinary stores would first read each line of the target, and push the training's data out of the caches. Streaming
//! stores do neither: two transfers instead of three take two thirds of the time where memory is the limit.
//!
//! Invariants: every byte is copied once, by one thread. When [`copy`] or [`BackgroundCopy::finish`] returns, or a
//! [`BackgroundCopy`] is dropped, no other thread runs for it.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::{mem, panic, process};

use crate::copy_queue::{CopyQueue, CopyRange};

/// Bytes that are worth a thread of their own, which takes some 50 µs to start.
pub const WORTH_A_THREAD: usize = 8 << 20;

/// Bytes that a thread takes at a time. With fixed shares, all threads would wait for the one whose processor is busy.
const CHUNK: usize = 1 << 20;

/// Chunks between two calls of `on_progress`: some milliseconds, ten times that if memory is fresh.
const CHUNKS_PER_CALL: usize = 32;

/// Copies all of `copies` on up to `threads` threads, including the caller's. The caller's thread calls `on_progress`
/// at intervals with the number of bytes that were begun. If that fails, no more is begun, and its error is returned.
///
/// # Safety
/// All sources can be read and all targets written until this returns. No target overlaps another target or a source,
/// and nobody else accesses a target. If a source changes meanwhile, its copy mixes old and new bytes.
pub unsafe fn copy<E>(
    copies: &[CopyRange],
    threads: usize,
    on_progress: impl FnMut(usize) -> Result<(), E>,
) -> Result<(), E> {
    // SAFETY: the caller's promise.
    unsafe { BackgroundCopy::start(copies.to_vec(), threads) }.finish(on_progress)
}

/// Copies that other threads make while the caller does other work. [`finish`](Self::finish) takes part; dropping this
/// begins no more of them.
#[derive(Debug)]
pub struct BackgroundCopy {
    queue: Arc<CopyQueue>,
    helpers: Vec<JoinHandle<()>>,
    process: u32,
}

impl BackgroundCopy {
    /// Begins with `copies` on as many other threads as they are worth, at most `threads` - 1.
    ///
    /// # Safety
    /// As for [`copy`](fn@copy), until this is finished or dropped.
    #[must_use]
    pub unsafe fn start(copies: Vec<CopyRange>, threads: usize) -> Self {
        let queue = Arc::new(CopyQueue::new(copies));
        let mut helpers = Vec::new();
        while helpers.len() < (queue.total / WORTH_A_THREAD).min(threads.saturating_sub(1)) {
            let shared = Arc::clone(&queue);
            let Ok(helper) = thread::Builder::new().spawn(move || while shared.copy_next().is_some() {}) else {
                // The caller's thread copies what this one would.
                break;
            };
            helpers.push(helper);
        }
        BackgroundCopy { queue, helpers, process: process::id() }
    }

    /// Copies everything that no other thread has begun, and waits for the others. Calls `on_progress` as
    /// [`copy`](fn@copy).
    ///
    /// # Errors
    /// The error of `on_progress`.
    pub fn finish<E>(mut self, mut on_progress: impl FnMut(usize) -> Result<(), E>) -> Result<(), E> {
        let (mut copied, mut own) = (Ok(()), 0);
        while copied.is_ok()
            && let Some(begun) = self.queue.copy_next()
        {
            own += 1;
            if own % CHUNKS_PER_CALL == 0 {
                copied = on_progress(begun);
            }
        }
        self.queue.stop();
        // One after the other: if one panicked, `drop` waits for the rest.
        while let Some(helper) = self.helpers.pop() {
            helper.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
        }
        copied
    }
}

impl Drop for BackgroundCopy {
    fn drop(&mut self) {
        if self.process != process::id() {
            // A child made by `fork` has none of the threads.
            mem::forget(mem::take(&mut self.helpers));
            return;
        }
        self.queue.stop();
        for helper in self.helpers.drain(..) {
            drop(helper.join());
        }
    }
}

impl CopyQueue {
    /// Copies the next chunk and returns where it ends; `None` if all are taken.
    fn copy_next(&self) -> Option<usize> {
        let start = self.next.fetch_add(CHUNK, Ordering::Relaxed);
        let end = (start < self.total).then(|| self.total.min(start + CHUNK))?;
        self.copy_bytes(start..end);
        Some(end)
    }

    /// Begins no more chunks.
    fn stop(&self) {
        self.next.store(self.total, Ordering::Relaxed);
    }

    fn copy_bytes(&self, bytes: Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx") {
            // SAFETY: the promise of the caller of `copy`; the processor has the instructions.
            unsafe { crate::streaming::copy(self, bytes) };
            return;
        }
        for part in self.parts(bytes) {
            // SAFETY: within a copy, by the promise of the caller of `copy`.
            unsafe { part.source.copy_to_nonoverlapping(part.target, part.length) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Copies of any lengths, from and to any addresses, arrive whole, and nothing beside them changes. Some are
        /// shorter than a stream; others take several streams, which begin and end their copies at different times.
        #[test]
        fn every_byte_arrives_and_no_other_changes(
            lengths in prop::collection::vec(
                (prop_oneof![Just(0usize), 0usize..300, 4000usize..4200, 0usize..20_000, 0usize..200_000], 0usize..70, 1usize..70),
                1..20,
            ),
            shares in 1usize..5,
        ) {
            let size: usize = lengths.iter().map(|(length, _, gap)| length + gap).sum();
            let mut target = vec![0xa5u8; size];
            let mut expected = target.clone();
            let sources: Vec<Vec<u8>> = lengths
                .iter()
                .enumerate()
                .map(|(number, (length, lead, _))| (0..length + lead).map(|at| (at % 251 + number) as u8).collect())
                .collect();
            let mut copies = Vec::new();
            let mut at = 0;
            for (source, (length, lead, gap)) in sources.iter().zip(&lengths) {
                expected[at..at + length].copy_from_slice(&source[*lead..]);
                // SAFETY: within both.
                let (source, target) = unsafe { (source.as_ptr().add(*lead), target.as_mut_ptr().add(at)) };
                copies.push(CopyRange { source, target, length: *length });
                at += length + gap;
            }
            let queue = CopyQueue::new(copies);
            let each = queue.total.div_ceil(shares).max(1);
            for start in (0..queue.total).step_by(each) {
                queue.copy_bytes(start..(start + each).min(queue.total));
            }
            prop_assert!(target == expected);
        }
    }

    #[test]
    fn several_threads_copy_what_one_does() {
        let source: Vec<u8> = (0..5 * WORTH_A_THREAD + 17).map(|at| (at % 251) as u8).collect();
        for threads in [0, 1, 2, 3, 64] {
            let mut target = vec![0u8; source.len()];
            let half = source.len() / 2 + 5;
            let copies = [(0, half), (half, source.len())].map(|(start, stop)| CopyRange {
                source: source[start..].as_ptr(),
                target: target[start..].as_mut_ptr(),
                length: stop - start,
            });
            let mut begun = 0;
            // SAFETY: both lie within their vectors, which nobody else accesses.
            let copied: Result<(), ()> = unsafe {
                copy(&copies, threads, |bytes| {
                    assert!(begun < bytes && bytes <= source.len());
                    begun = bytes;
                    Ok(())
                })
            };
            assert_eq!(copied, Ok(()));
            assert!(target == source, "{threads} threads");
        }
    }

    #[test]
    fn nothing_is_begun_after_an_error() {
        let source = vec![1u8; 4 * CHUNKS_PER_CALL * CHUNK];
        for threads in [1, 2] {
            let mut target = vec![0u8; source.len()];
            let copies = [CopyRange { source: source.as_ptr(), target: target.as_mut_ptr(), length: source.len() }];
            let mut asked = 0;
            // SAFETY: both are vectors that nobody else accesses.
            let copied = unsafe {
                copy(&copies, threads, |_| {
                    asked += 1;
                    Err("stop")
                })
            };
            // Another thread may have taken so much that this one did not ask.
            assert!(copied.is_err() == (asked == 1) && (threads > 1 || asked == 1));
            assert!(threads > 1 || target.iter().filter(|&&byte| byte == 1).count() == CHUNKS_PER_CALL * CHUNK);
        }
    }

    fn whole(source: &[u8], target: &mut [u8]) -> Vec<CopyRange> {
        vec![CopyRange { source: source.as_ptr(), target: target.as_mut_ptr(), length: source.len() }]
    }

    #[test]
    fn other_threads_copy_before_the_caller_takes_part() {
        let source: Vec<u8> = (0..4 * WORTH_A_THREAD + 17).map(|at| (at % 251) as u8).collect();
        let mut target = vec![0u8; source.len()];
        // SAFETY: both are vectors that nobody else accesses.
        let copying = unsafe { BackgroundCopy::start(whole(&source, &mut target), 2) };
        let deadline = Instant::now() + Duration::from_secs(60);
        while copying.queue.next.load(Ordering::Relaxed) < source.len() {
            assert!(Instant::now() < deadline);
            thread::yield_now();
        }
        let finished = copying.finish(|_| Err("asked, though nothing was left"));
        assert_eq!(finished, Ok(()));
        assert!(target == source);
    }

    #[test]
    fn threads_begin_if_the_copies_are_worth_them() {
        for (length, threads, helpers) in [
            (WORTH_A_THREAD - 1, 64, 0),
            (2 * WORTH_A_THREAD, 64, 2),
            (9 * WORTH_A_THREAD, 3, 2),
            (2 * WORTH_A_THREAD, 0, 0),
        ] {
            let source = vec![1u8; length];
            let mut target = vec![0u8; source.len()];
            // SAFETY: both are vectors that nobody else accesses.
            let copying = unsafe { BackgroundCopy::start(whole(&source, &mut target), threads) };
            assert_eq!(copying.helpers.len(), helpers);
        }
    }

    #[test]
    fn no_thread_outlives_copies_that_are_dropped() {
        let source = vec![1u8; 8 * WORTH_A_THREAD];
        for threads in [1, 3] {
            let mut target = vec![0u8; source.len()];
            // SAFETY: both are vectors that nobody else accesses.
            let copying = unsafe { BackgroundCopy::start(whole(&source, &mut target), threads) };
            let queue = Arc::downgrade(&copying.queue);
            drop(copying);
            assert!(queue.upgrade().is_none());
        }
    }

    #[test]
    fn no_copies_are_nothing_to_do() {
        // SAFETY: nothing is read or written.
        let copied = unsafe { copy(&[], 3, |_| Err(())) };
        assert_eq!(copied, Ok(()));
    }
}

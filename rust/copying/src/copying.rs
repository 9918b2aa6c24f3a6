//! Copies host memory past the caches, on several threads.
//!
//! The bytes that a save stages are read again only when they are written, and are larger than any cache. Ordinary
//! stores would first read each line of the target, and push the training's data out of the caches. Streaming stores do
//! neither: two transfers instead of three take two thirds of the time where memory is the limit.
//!
//! Invariants: every byte is copied once, by one thread. When [`copy`] or [`Copying::finish`] returns, or a [`Copying`]
//! is dropped, no other thread runs for it.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::{mem, panic, process};

use crate::pieces::{Copy, Pieces};

/// Bytes that are worth a thread of their own, which takes some 50 µs to start.
pub const WORTH_A_THREAD: usize = 8 << 20;

/// What a thread takes at a time. Threads that were given their shares at the beginning would all wait for the one
/// whose processor somebody else wants, too.
const PIECE: usize = 1 << 20;

/// Pieces of a thread between two looks at whether to go on: some milliseconds, ten times that where memory is fresh.
const LOOK_AROUND: usize = 32;

/// Copies all of `copies` on up to `threads` threads, the caller's among them. That one asks `go_on` now and then, with
/// the bytes that were begun; at an error nothing more is begun, and it is returned.
///
/// # Safety
/// All sources can be read and all targets written until this returns; no target overlaps another or a source, and
/// nobody else looks at a target. Who changes a source meanwhile gets some of the old bytes and some of the new.
pub unsafe fn copy<E>(copies: &[Copy], threads: usize, go_on: impl FnMut(usize) -> Result<(), E>) -> Result<(), E> {
    let mut copying = Copying::new(threads);
    copying.add(copies);
    copying.be_helped(copying.total / WORTH_A_THREAD);
    copying.finish(go_on)
}

/// Copies that other threads make, as far as they are worth them, while their caller finds more of them, and does other
/// work. It takes part when it finishes them; when this is dropped, no more is begun.
#[derive(Debug)]
pub struct Copying {
    portions: Arc<Portions>,
    total: usize,
    threads: usize,
    helpers: Vec<JoinHandle<()>>,
    process: u32,
}

impl Copying {
    /// Nothing yet. Up to `threads` are to take part, the caller's among them.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Copying { portions: Arc::default(), total: 0, threads, helpers: Vec::new(), process: process::id() }
    }

    /// Begins with `copies` on other threads, once all that was handed in is worth them.
    ///
    /// # Safety
    /// As of [`copy`](fn@copy), for all that is handed in, until this is finished or dropped.
    pub unsafe fn hand_in(&mut self, copies: &[Copy]) {
        self.add(copies);
        // The caller's does not count, which is at something else.
        self.be_helped(1 + self.total / WORTH_A_THREAD);
    }

    /// Copies what no other thread has begun. Asks `go_on` now and then, with the bytes that were begun; at an error
    /// nothing more is begun.
    ///
    /// # Errors
    /// What `go_on` returns.
    pub fn finish<E>(mut self, mut go_on: impl FnMut(usize) -> Result<(), E>) -> Result<(), E> {
        self.portions.complete();
        let (mut copied, mut before, mut own) = (Ok(()), 0, 0);
        self.portions.each(|pieces| {
            while copied.is_ok()
                && let Some(begun) = pieces.copy_next()
            {
                own += 1;
                if own % LOOK_AROUND == 0 {
                    copied = go_on(before + begun);
                }
            }
            before += pieces.total;
        });
        self.portions.stop();
        // One after the other: where one panicked, the others are waited for all the same.
        while let Some(helper) = self.helpers.pop() {
            helper.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
        }
        copied
    }

    fn add(&mut self, copies: &[Copy]) {
        let pieces = Pieces::of(copies);
        self.total += pieces.total;
        self.portions.add(pieces);
    }

    /// Have other threads copy, so that they are up to `threads` with the caller's.
    fn be_helped(&mut self, threads: usize) {
        while self.helpers.len() + 1 < threads.min(self.threads) {
            let portions = Arc::clone(&self.portions);
            let Ok(helper) = thread::Builder::new().spawn(move || portions.each(Pieces::copy_all)) else {
                // What another thread would copy, the caller's does.
                break;
            };
            self.helpers.push(helper);
        }
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        if self.process != process::id() {
            // In a child made by `fork`, which has none of the threads, and may find the lock held.
            mem::forget(mem::take(&mut self.helpers));
            return;
        }
        self.portions.stop();
        for helper in self.helpers.drain(..) {
            // It has nothing to say any more.
            drop(helper.join());
        }
    }
}

/// What is to be copied, as it comes to be known.
#[derive(Debug, Default)]
struct Portions {
    known: Mutex<Known>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Known {
    portions: Vec<Arc<Pieces>>,
    is_all: bool,
}

impl Portions {
    fn add(&self, pieces: Pieces) {
        self.change(|known| known.portions.push(Arc::new(pieces)));
    }

    /// There will be no more.
    fn complete(&self) {
        self.change(|known| known.is_all = true);
    }

    /// No piece is begun any more.
    fn stop(&self) {
        self.complete();
        self.each(Pieces::stop);
    }

    /// Visits each, and waits for those that are not known yet.
    fn each(&self, mut visit: impl FnMut(&Pieces)) {
        let mut number = 0;
        while let Some(pieces) = self.get(number) {
            visit(&pieces);
            number += 1;
        }
    }

    fn get(&self, number: usize) -> Option<Arc<Pieces>> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let is_awaited = |known: &mut Known| !known.is_all && known.portions.len() <= number;
        let known = self.changed.wait_while(known, is_awaited).unwrap_or_else(PoisonError::into_inner);
        known.portions.get(number).map(Arc::clone)
    }

    fn change(&self, change: impl FnOnce(&mut Known)) {
        change(&mut self.known.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }
}

impl Pieces {
    /// Copies pieces until all are taken.
    fn copy_all(&self) {
        while self.copy_next().is_some() {}
    }

    /// Copies the next piece; where it ends, or nothing where all are taken.
    fn copy_next(&self) -> Option<usize> {
        let start = self.next.fetch_add(PIECE, Ordering::Relaxed);
        let end = (start < self.total).then(|| self.total.min(start + PIECE))?;
        self.copy_bytes(start..end);
        Some(end)
    }

    /// No piece is begun any more.
    fn stop(&self) {
        self.next.store(self.total, Ordering::Relaxed);
    }

    fn copy_bytes(&self, bytes: Range<usize>) {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx") {
            // SAFETY: what the caller of `copy` answers for; the processor has the instructions.
            unsafe { crate::streaming::copy(self, bytes) };
            return;
        }
        for part in self.parts(bytes) {
            // SAFETY: within a copy, which the caller of `copy` answers for.
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

        /// Copies of any lengths, from and to any addresses, arrive whole, and nothing beside them changes: of less than
        /// one stream takes, and of several streams that begin and end their copies at other times.
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
                copies.push(Copy { source, target, length: *length });
                at += length + gap;
            }
            let pieces = Pieces::of(&copies);
            let each = pieces.total.div_ceil(shares).max(1);
            for start in (0..pieces.total).step_by(each) {
                pieces.copy_bytes(start..(start + each).min(pieces.total));
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
            let copies = [(0, half), (half, source.len())].map(|(start, stop)| Copy {
                source: source[start..].as_ptr(),
                target: target[start..].as_mut_ptr(),
                length: stop - start,
            });
            let mut begun = 0;
            // SAFETY: both lie within their vectors, which nobody else looks at.
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
    fn who_is_told_to_stop_begins_nothing_more() {
        let source = vec![1u8; 4 * LOOK_AROUND * PIECE];
        for threads in [1, 2] {
            let mut target = vec![0u8; source.len()];
            let copies = [Copy { source: source.as_ptr(), target: target.as_mut_ptr(), length: source.len() }];
            let mut asked = 0;
            // SAFETY: both are vectors, which nobody else looks at.
            let copied = unsafe {
                copy(&copies, threads, |_| {
                    asked += 1;
                    Err("stop")
                })
            };
            // Another thread may have taken so much that this one was not yet to ask.
            assert!(copied.is_err() == (asked == 1) && (threads > 1 || asked == 1));
            assert!(threads > 1 || target.iter().filter(|&&byte| byte == 1).count() == LOOK_AROUND * PIECE);
        }
    }

    /// The halves of a copy.
    fn halves(source: &[u8], target: &mut [u8]) -> [Copy; 2] {
        let whole = Copy { source: source.as_ptr(), target: target.as_mut_ptr(), length: source.len() };
        [whole.before(source.len() / 2), whole.after(source.len() / 2)]
    }

    /// Waits until other threads have taken all pieces that are known.
    fn wait_for_others(copying: &Copying) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let known = copying.portions.known.lock().unwrap().portions.clone();
        while known.iter().any(|pieces| pieces.next.load(Ordering::Relaxed) < pieces.total) {
            assert!(Instant::now() < deadline);
            thread::yield_now();
        }
    }

    #[test]
    fn what_is_known_is_copied_while_the_rest_is_found_and_after() {
        let source: Vec<u8> = (0..4 * LOOK_AROUND * PIECE + 34).map(|at| (at % 251) as u8).collect();
        for threads in [1, 2, 5] {
            let mut target = vec![0u8; source.len()];
            let mut begun = 0;
            let mut copying = Copying::new(threads);
            for half in halves(&source, &mut target) {
                // SAFETY: both lie within their vectors, which nobody else looks at.
                unsafe { copying.hand_in(&[half]) };
                assert!(copying.helpers.len() == threads - 1);
                if threads > 1 {
                    wait_for_others(&copying);
                }
            }
            let copied: Result<(), ()> = copying.finish(|bytes| {
                assert!(threads == 1 && begun < bytes && bytes <= source.len());
                begun = bytes;
                Ok(())
            });
            assert_eq!(copied, Ok(()));
            assert!(target == source, "{threads} threads");
            assert!(threads > 1 || begun > source.len() / 2 + LOOK_AROUND * PIECE / 2);
        }
    }

    #[test]
    fn who_finishes_many_small_portions_asks_as_often_as_for_one() {
        let source = vec![1u8; 4 * LOOK_AROUND * PIECE];
        let mut target = vec![0u8; source.len()];
        let whole = Copy { source: source.as_ptr(), target: target.as_mut_ptr(), length: source.len() };
        let mut copying = Copying::new(1);
        for start in (0..source.len()).step_by(WORTH_A_THREAD) {
            // SAFETY: both are vectors, which nobody else looks at.
            unsafe { copying.hand_in(&[whole.after(start).before(WORTH_A_THREAD)]) };
        }
        let mut asked = Vec::new();
        let copied: Result<(), ()> = copying.finish(|begun| {
            asked.push(begun);
            Ok(())
        });
        assert_eq!(copied, Ok(()));
        assert_eq!(asked, [1, 2, 3, 4].map(|time| time * LOOK_AROUND * PIECE));
    }

    #[test]
    fn threads_begin_when_they_are_worth_it() {
        let source = vec![1u8; 2 * WORTH_A_THREAD - 2];
        let mut target = vec![0u8; source.len()];
        let mut copying = Copying::new(64);
        for (half, helpers) in halves(&source, &mut target).into_iter().zip([0, 1]) {
            // SAFETY: both are vectors, which nobody else looks at.
            unsafe { copying.hand_in(&[half]) };
            assert_eq!(copying.helpers.len(), helpers);
        }
    }

    #[test]
    fn no_thread_outlives_copies_that_are_given_up() {
        let source = vec![1u8; 8 * WORTH_A_THREAD];
        for threads in [1, 3] {
            let mut target = vec![0u8; source.len()];
            let mut copying = Copying::new(threads);
            for half in halves(&source, &mut target) {
                // SAFETY: both are vectors, which nobody else looks at.
                unsafe { copying.hand_in(&[half]) };
            }
            let portions = Arc::downgrade(&copying.portions);
            drop(copying);
            assert!(portions.upgrade().is_none());
        }
    }

    #[test]
    fn nothing_is_begun_after_an_error() {
        let source = vec![1u8; 4 * LOOK_AROUND * PIECE];
        // In the first half, and in the second.
        for asked_before in [0, 2] {
            for threads in [1, 2] {
                let mut target = vec![0u8; source.len()];
                let mut asked = 0;
                let mut copying = Copying::new(threads);
                for half in halves(&source, &mut target) {
                    // SAFETY: both lie within their vectors, which nobody else looks at.
                    unsafe { copying.hand_in(&[half]) };
                }
                let copied = copying.finish(|_| {
                    asked += 1;
                    if asked > asked_before { Err("stop") } else { Ok(()) }
                });
                // Another thread may have taken so much that this one was not to ask so often.
                assert!(copied.is_err() == (asked > asked_before) && (threads > 1 || copied.is_err()));
                let copied = target.iter().filter(|&&byte| byte == 1).count();
                assert!(threads > 1 || copied == (asked_before + 1) * LOOK_AROUND * PIECE);
            }
        }
    }

    #[test]
    fn nothing_is_copied_of_nothing() {
        // SAFETY: nothing is read or written.
        let copied = unsafe { copy(&[], 3, |_| Err(())) };
        assert_eq!(copied, Ok(()));
    }
}

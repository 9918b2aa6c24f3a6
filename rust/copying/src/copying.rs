//! Copies of host memory, past the caches.
//!
//! It owns nothing. What always holds: every byte is copied once, by one thread; when [`copy`] or [`Rest::copy`] returns
//! all are, and no other thread runs for them.
//!
//! What a save stages, for one, is read again only when it is written, and is larger than any cache. Ordinary stores
//! would first read each line of the target and push the training's data out of the caches; streaming stores do neither,
//! and where memory is the limit, two transfers instead of three take two thirds of the time.
#![allow(unsafe_code)]

use std::ops::Range;
use std::panic;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, Scope, ScopedJoinHandle};

/// Bytes that are worth a thread of their own, which takes some 50 µs to start.
pub const WORTH_A_THREAD: usize = 8 << 20;

/// What a thread takes at a time. Threads that were given their shares at the beginning would all wait for the one
/// whose processor somebody else wants, too.
const PIECE: usize = 1 << 20;

/// Pieces of a thread between two looks at whether to go on: some milliseconds, ten times that where memory is fresh.
const LOOK_AROUND: usize = 32;

/// `length` bytes from `source` to `target`.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    /// The first byte that is read.
    pub source: *const u8,
    /// Where it goes.
    pub target: *mut u8,
    /// How many.
    pub length: usize,
}

// SAFETY: only addresses; whoever calls `copy` answers for what is there.
unsafe impl Send for Copy {}
// SAFETY: as above.
unsafe impl Sync for Copy {}

/// Copies all of `copies` on up to `threads` threads, the caller's among them. That one asks `go_on` now and then, with
/// the bytes that were begun; at an error nothing more is begun, and it is returned.
///
/// # Safety
/// All sources can be read and all targets written until this returns; no target overlaps another or a source, and
/// nobody else looks at a target. Who changes a source meanwhile gets some of the old bytes and some of the new.
pub unsafe fn copy<E>(copies: &[Copy], threads: usize, go_on: impl FnMut(usize) -> Result<(), E>) -> Result<(), E> {
    // SAFETY: the caller's promise.
    unsafe { copy_while_finding(&[], threads, |rest| rest.copy(copies, threads, go_on)) }
}

/// As [`copy`], where not all is known yet: while `find` finds the rest on this thread, another one copies the `first`,
/// if they are worth one. What `find` does not hand to [`Rest::copy`] is not copied.
///
/// # Safety
/// As of [`copy`], for the first copies, whether or not `find` finds more.
pub unsafe fn copy_while_finding<T>(first: &[Copy], threads: usize, find: impl FnOnce(Rest<'_, '_>) -> T) -> T {
    let (first, rest) = (Pieces::of(first), OnceLock::new());
    thread::scope(|scope| {
        let mut found = Rest { first: &first, rest: &rest, scope, helpers: Vec::new() };
        if first.total >= WORTH_A_THREAD {
            found.be_helped(threads.min(2));
        }
        find(found)
    })
}

/// Copies of which the first may be under way, and the rest is to be handed in.
pub struct Rest<'scope, 'env> {
    first: &'scope Pieces,
    rest: &'scope OnceLock<Pieces>,
    scope: &'scope Scope<'scope, 'env>,
    helpers: Vec<ScopedJoinHandle<'scope, ()>>,
}

impl Rest<'_, '_> {
    /// Copies what is left of the first ones, and `copies`, on as many threads as [`copy`](fn@copy) would; it asks
    /// `go_on` alike. When it returns no other thread of it runs.
    ///
    /// # Errors
    /// What `go_on` returns.
    ///
    /// # Safety
    /// As of [`copy`](fn@copy), for these and the first ones together.
    pub unsafe fn copy<E>(
        mut self,
        copies: &[Copy],
        threads: usize,
        mut go_on: impl FnMut(usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let (first, rest) = (self.first, self.rest.get_or_init(|| Pieces::of(copies)));
        self.be_helped(threads.min((first.total + rest.total) / WORTH_A_THREAD));
        let copied = first.copy_asking(&mut go_on);
        let copied = copied.and_then(|()| rest.copy_asking(|begun| go_on(first.total + begun)));
        self.stop();
        for helper in self.helpers.drain(..) {
            helper.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
        }
        copied
    }

    /// Have other threads copy, so that they are up to `threads` with the caller's.
    fn be_helped(&mut self, threads: usize) {
        let (first, rest) = (self.first, self.rest);
        while self.helpers.len() + 1 < threads {
            let copied = thread::Builder::new().spawn_scoped(self.scope, || {
                first.copy_all();
                rest.wait().copy_all();
            });
            let Ok(helper) = copied else {
                // What another thread would copy, the caller's does.
                break;
            };
            self.helpers.push(helper);
        }
    }

    /// Nothing more is begun, and nobody waits for a rest.
    fn stop(&self) {
        self.first.stop();
        self.rest.get_or_init(|| Pieces::of(&[])).stop();
    }
}

impl Drop for Rest<'_, '_> {
    fn drop(&mut self) {
        self.stop();
    }
}

/// All copies, counted through one after the other and cut into pieces, which threads take in turn.
pub(crate) struct Pieces {
    /// Its own, as threads may look at them when whoever handed them in is gone.
    copies: Vec<Copy>,
    /// Where each copy ends.
    ends: Vec<usize>,
    total: usize,
    /// The first byte that no thread has taken.
    next: AtomicUsize,
}

impl Pieces {
    fn of(copies: &[Copy]) -> Self {
        let mut total = 0;
        let end_of = |copy: &Copy| {
            total += copy.length;
            total
        };
        let ends = copies.iter().map(end_of).collect();
        Pieces { copies: copies.to_vec(), ends, total, next: AtomicUsize::new(0) }
    }

    /// Copies pieces until all are taken.
    fn copy_all(&self) {
        while self.copy_next().is_some() {}
    }

    /// As `copy_all`; asks whether to go on now and then.
    fn copy_asking<E>(&self, mut go_on: impl FnMut(usize) -> Result<(), E>) -> Result<(), E> {
        let mut own = 0;
        while let Some(begun) = self.copy_next() {
            own += 1;
            if own % LOOK_AROUND == 0 {
                go_on(begun).inspect_err(|_| self.stop())?;
            }
        }
        Ok(())
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

    /// What the copies have of `bytes`, in order.
    pub(crate) fn parts(&self, bytes: Range<usize>) -> impl Iterator<Item = Copy> {
        let first = self.ends.partition_point(|&end| end <= bytes.start);
        self.copies[first..].iter().zip(&self.ends[first..]).map_while(move |(copy, end)| {
            let begin = end - copy.length;
            let (from, to) = (bytes.start.max(begin), bytes.end.min(*end));
            (begin < bytes.end).then(|| copy.after(from - begin).before(to - from))
        })
    }
}

impl Copy {
    /// All but its first `bytes`, of which it has as many.
    pub(crate) fn after(self, bytes: usize) -> Self {
        // Nothing is read or written here.
        let (source, target) = (self.source.wrapping_add(bytes), self.target.wrapping_add(bytes));
        Copy { source, target, length: self.length - bytes }
    }

    /// Its first `bytes` alone.
    pub(crate) fn before(self, bytes: usize) -> Self {
        Copy { length: bytes, ..self }
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

    /// Waits until all pieces are taken, by other threads.
    fn wait_for(pieces: &Pieces) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while pieces.next.load(Ordering::Relaxed) < pieces.total {
            assert!(Instant::now() < deadline);
            thread::yield_now();
        }
    }

    #[test]
    fn what_is_known_first_is_copied_while_the_rest_is_found() {
        let source: Vec<u8> = (0..4 * LOOK_AROUND * PIECE + 34).map(|at| (at % 251) as u8).collect();
        for threads in [1, 2, 5] {
            let mut target = vec![0u8; source.len()];
            let [first, rest] = halves(&source, &mut target);
            let mut begun = 0;
            // SAFETY: both lie within their vectors, which nobody else looks at.
            let copied: Result<(), ()> = unsafe {
                copy_while_finding(&[first], threads, |found| {
                    if threads > 1 {
                        wait_for(found.first);
                    }
                    assert!(found.helpers.len() == 1.min(threads - 1));
                    found.copy(&[rest], threads, |bytes| {
                        assert!(begun < bytes && bytes <= source.len());
                        begun = bytes;
                        Ok(())
                    })
                })
            };
            assert_eq!(copied, Ok(()));
            assert!(target == source, "{threads} threads");
            assert!(threads > 1 || begun > first.length + LOOK_AROUND * PIECE / 2);
        }
    }

    #[test]
    fn little_is_not_worth_another_thread() {
        let source = vec![1u8; WORTH_A_THREAD - 1];
        let mut target = vec![0u8; source.len()];
        let whole = Copy { source: source.as_ptr(), target: target.as_mut_ptr(), length: source.len() };
        // SAFETY: both are vectors, which nobody else looks at.
        unsafe { copy_while_finding(&[whole], 64, |found| assert!(found.helpers.is_empty())) };
    }

    #[test]
    fn nobody_waits_for_a_rest_that_is_not_found() {
        let source = vec![1u8; 2 * WORTH_A_THREAD];
        for threads in [1, 3] {
            let mut target = vec![0u8; source.len()];
            let [first, _] = halves(&source, &mut target);
            // SAFETY: both lie within their vectors, which nobody else looks at.
            let found = unsafe { copy_while_finding(&[first], threads, |_| Err::<(), _>("lost")) };
            assert_eq!(found, Err("lost"));
            let lost = panic::catch_unwind(panic::AssertUnwindSafe(|| {
                // SAFETY: as above.
                unsafe { copy_while_finding(&[first], threads, |_| panic::resume_unwind(Box::new("lost"))) }
            }));
            assert!(lost.is_err_and(|panic| panic.downcast_ref() == Some(&"lost")));
        }
    }

    #[test]
    fn nothing_is_begun_after_an_error() {
        let source = vec![1u8; 4 * LOOK_AROUND * PIECE];
        // In the first half, and in the second.
        for asked_before in [0, 2] {
            for threads in [1, 2] {
                let mut target = vec![0u8; source.len()];
                let [first, rest] = halves(&source, &mut target);
                let mut asked = 0;
                // SAFETY: both lie within their vectors, which nobody else looks at.
                let copied = unsafe {
                    copy_while_finding(&[first], threads, |found| {
                        found.copy(&[rest], threads, |_| {
                            asked += 1;
                            if asked > asked_before { Err("stop") } else { Ok(()) }
                        })
                    })
                };
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

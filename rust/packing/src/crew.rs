//! The threads of one call: the caller, and helpers that go through the steps of its work with it.
//!
//! A step takes a millisecond, so what counts is how soon the next one begins on every thread. The caller works too,
//! and helpers wait for the next step awake. Threads of a pool would fall asleep between steps, and a kernel that
//! wakes two of them at once often puts both on one processor, where they stay as long as they sleep so often: two
//! threads then took as long as one. A thread that is started is put on an idle processor.
//!
//! What always holds: when a step ends, by returning or by a panic, no other thread is at it; its panics, on whichever
//! thread, are its own caller's; helpers end with their crew, so that a child of `fork` inherits none.
#![allow(unsafe_code)]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a thread waits awake: longer than anything a caller does between two steps but writing to a disk.
const AWAKE: Duration = Duration::from_millis(1);
/// So many threads are started whatever the number of processors.
const FEW: usize = 8;
/// Looks at what is waited for between two times that the processor is offered to others.
const LOOKS: usize = 64;

/// What is done in a step, given the number of the thread that does it. It does not panic.
type Step<'a> = &'a (dyn Fn(usize) + Sync + 'a);

#[derive(Default)]
struct State {
    /// The step that helpers may join.
    step: Option<Step<'static>>,
    /// Helpers at the step.
    inside: usize,
    /// Helpers, and callers, that wait asleep.
    asleep: usize,
    is_over: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Steps begun, plus one once it is over: what helpers look at while they wait awake.
    begun: AtomicUsize,
    /// As `State::inside`, for a caller that waits awake.
    inside: AtomicUsize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wait until `is_so` of the state, first awake as long as `seems_so` is false.
    fn wait(&self, seems_so: impl Fn() -> bool, is_so: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let begin = Instant::now();
        while !seems_so() && begin.elapsed() < AWAKE {
            for _ in 0..LOOKS {
                core::hint::spin_loop();
            }
            thread::yield_now();
        }
        let mut state = self.lock();
        while !is_so(&state) {
            state.asleep += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.asleep -= 1;
        }
        state
    }

    fn tell(&self, state: MutexGuard<'_, State>) {
        let is_anybody_asleep = state.asleep > 0;
        drop(state);
        if is_anybody_asleep {
            self.changed.notify_all();
        }
    }

    /// A helper's life: join each step that it is in time for.
    fn help(&self, number: usize) {
        let mut seen = 0;
        loop {
            let mut state = self.wait(
                || self.begun.load(Ordering::Relaxed) != seen,
                |state| state.is_over || self.begun.load(Ordering::Relaxed) != seen,
            );
            if state.is_over {
                return;
            }
            seen = self.begun.load(Ordering::Relaxed);
            let Some(step) = state.step else { continue };
            state.inside += 1;
            self.inside.store(state.inside, Ordering::Relaxed);
            drop(state);
            step(number);
            let mut state = self.lock();
            state.inside -= 1;
            self.inside.store(state.inside, Ordering::Relaxed);
            self.tell(state);
        }
    }
}

/// A caller and its helpers.
pub(crate) struct Crew {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

impl Crew {
    /// Of up to `threads` threads, the calling one among them: as many as the system starts, and no more than there
    /// are processors for, but for a few. A step of more would take so much longer that nobody could interrupt it in
    /// time.
    pub(crate) fn new(threads: usize) -> Self {
        let threads = match threads > FEW {
            true => threads.min(thread::available_parallelism().map_or(FEW, usize::from).max(FEW)),
            false => threads,
        };
        let mut crew = Self { shared: Arc::default(), helpers: Vec::new() };
        for number in 1..threads {
            let shared = Arc::clone(&crew.shared);
            let started = thread::Builder::new().name(format!("tundish-{number}")).spawn(move || shared.help(number));
            let Ok(helper) = started else { break };
            crew.helpers.push(helper);
        }
        crew
    }

    /// How many threads there are, the calling one among them.
    pub(crate) fn threads(&self) -> usize {
        self.helpers.len() + 1
    }

    /// Do `work` with each of `items` once, on all threads: it is given the number of the thread, below `threads()`,
    /// and that of the item.
    ///
    /// A thread begins with its own share, the same in each step over as many items: what it wrote of them in one step
    /// is in its caches in the next. Only then it helps others.
    ///
    /// # Panics
    /// Where `work` does; other items may be left out then.
    pub(crate) fn each<T: Send>(&self, items: &mut [T], work: impl Fn(usize, usize, &mut T) + Sync) {
        struct Items<T>(*mut T);
        // SAFETY: threads share the address alone; each item is used by the one thread that drew its number.
        unsafe impl<T: Send> Sync for Items<T> {}
        impl<T> Items<T> {
            fn at(&self, number: usize) -> *mut T {
                self.0.wrapping_add(number)
            }
        }
        let len = items.len();
        let items = Items(items.as_mut_ptr());
        let threads = self.threads();
        // The first item of each thread's own that nobody has drawn.
        let next: Vec<AtomicUsize> = (0..threads).map(|thread| AtomicUsize::new(thread * len / threads)).collect();
        self.step(&|thread| {
            for owner in (thread..threads).chain(0..thread) {
                let end = (owner + 1) * len / threads;
                loop {
                    let number = next[owner].fetch_add(1, Ordering::Relaxed);
                    if number >= end {
                        break;
                    }
                    // SAFETY: in range, and this number is drawn once; the slice is borrowed until the step is over.
                    work(thread, number, unsafe { &mut *items.at(number) });
                }
            }
        });
    }

    /// Call `work` on the calling thread, and on the helpers that come while it is at it; return when all are done.
    fn step(&self, work: &(dyn Fn(usize) + Sync)) {
        let mut state = self.shared.lock();
        if state.step.is_some() || self.helpers.is_empty() {
            drop(state);
            // Another caller has the helpers.
            work(0);
            return;
        }
        // The step's own: helpers may be at those of several callers.
        let panic: Mutex<Option<Box<dyn Any + Send>>> = Mutex::new(None);
        let step: Step<'_> = &|number| {
            if let Err(caught) = catch_unwind(AssertUnwindSafe(|| work(number))) {
                panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(caught);
            }
        };
        // SAFETY: `Ending` takes the step back and waits until nobody is at it, before this call returns or unwinds;
        // it is dropped before what the step borrows.
        state.step = Some(unsafe { core::mem::transmute::<Step<'_>, Step<'static>>(step) });
        self.shared.begun.fetch_add(1, Ordering::Relaxed);
        self.shared.tell(state);
        let ending = Ending(&self.shared);
        step(0);
        drop(ending);
        if let Some(caught) = panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(caught);
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.is_over = true;
        self.shared.begun.fetch_add(1, Ordering::Relaxed);
        self.shared.tell(state);
        for helper in self.helpers.drain(..) {
            // A step catches its panics.
            let _ = helper.join();
        }
    }
}

/// The end of a step: nobody joins any more, and whoever did has left.
struct Ending<'a>(&'a Shared);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.lock().step = None;
        drop(self.0.wait(|| self.0.inside.load(Ordering::Relaxed) == 0, |state| state.inside == 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_item_is_done_once_in_every_step() {
        for threads in 1..5 {
            let crew = Crew::new(threads);
            assert_eq!(crew.threads(), threads);
            let mut items = vec![0usize; 1000];
            for round in 1..200 {
                crew.each(&mut items, |thread, number, item| {
                    assert!(thread < threads);
                    *item += number;
                });
                assert!(items.iter().enumerate().all(|(number, &item)| item == round * number));
            }
        }
    }

    #[test]
    fn helpers_take_part_also_after_they_fell_asleep() {
        let crew = Crew::new(3);
        for pause in [Duration::ZERO, AWAKE * 5] {
            thread::sleep(pause);
            // Nobody leaves before all have come.
            let come = AtomicUsize::new(0);
            let mut threads = [usize::MAX; 3];
            crew.each(&mut threads, |thread, _, seen| {
                *seen = thread;
                come.fetch_add(1, Ordering::SeqCst);
                while come.load(Ordering::SeqCst) < 3 {
                    thread::yield_now();
                }
            });
            threads.sort_unstable();
            assert_eq!(threads, [0, 1, 2]);
        }
    }

    #[test]
    fn there_are_never_many_more_threads_than_processors() {
        let most = thread::available_parallelism().map_or(FEW, usize::from).max(FEW);
        for threads in [1, 2, FEW, FEW + 1, 512, usize::MAX] {
            assert_eq!(Crew::new(threads).threads(), threads.min(most));
        }
    }

    #[test]
    fn a_panic_on_any_thread_is_the_callers_and_the_crew_goes_on() {
        let crew = Crew::new(3);
        for guilty in 0..3 {
            let come = AtomicUsize::new(0);
            let result = catch_unwind(AssertUnwindSafe(|| {
                crew.each(&mut [(); 3], |thread, _, ()| {
                    come.fetch_add(1, Ordering::SeqCst);
                    while come.load(Ordering::SeqCst) < 3 {
                        thread::yield_now();
                    }
                    assert!(thread != guilty, "thread {guilty}");
                });
            }));
            let panic = result.unwrap_err();
            assert_eq!(panic.downcast_ref::<String>().unwrap(), &format!("thread {guilty}"));
            let mut items = [0; 100];
            crew.each(&mut items, |_, _, item| *item += 1);
            assert_eq!(items, [1; 100]);
        }
    }

    #[test]
    fn a_panic_is_that_of_the_caller_whose_item_it_was() {
        let crew = Crew::new(3);
        for guilty in [1, 2] {
            let come = AtomicUsize::new(0);
            let is_other_at_work = AtomicUsize::new(0);
            let mut items = [0; 100];
            let result = thread::scope(|scope| {
                let first = scope.spawn(|| {
                    catch_unwind(AssertUnwindSafe(|| {
                        crew.each(&mut [(); 3], |thread, _, ()| {
                            come.fetch_add(1, Ordering::SeqCst);
                            while come.load(Ordering::SeqCst) < 3 {
                                thread::yield_now();
                            }
                            while thread == 2 && is_other_at_work.load(Ordering::SeqCst) == 0 {
                                thread::yield_now();
                            }
                            assert!(thread != guilty, "thread {guilty}");
                        });
                    }))
                });
                // Until the first caller's step is taken back, while one helper is still at it.
                loop {
                    let state = crew.shared.lock();
                    if state.step.is_none() && state.inside == 1 {
                        break;
                    }
                    drop(state);
                    thread::yield_now();
                }
                crew.each(&mut items, |_, _, item| {
                    is_other_at_work.store(1, Ordering::SeqCst);
                    *item += 1;
                });
                first.join().unwrap()
            });
            assert_eq!(items, [1; 100]);
            assert_eq!(result.unwrap_err().downcast_ref::<String>().unwrap(), &format!("thread {guilty}"));
        }
    }

    #[test]
    fn callers_that_share_a_crew_do_not_wait_for_each_other() {
        let crew = Crew::new(2);
        let is_second_done = AtomicUsize::new(0);
        thread::scope(|scope| {
            let (begun, has_begun) = std::sync::mpsc::channel();
            let (crew, is_second_done) = (&crew, &is_second_done);
            scope.spawn(move || {
                crew.each(&mut [()], |_, _, ()| {
                    begun.send(()).unwrap();
                    while is_second_done.load(Ordering::SeqCst) == 0 {
                        thread::yield_now();
                    }
                });
            });
            has_begun.recv().unwrap();
            crew.each(&mut [()], |_, _, ()| is_second_done.store(1, Ordering::SeqCst));
        });
    }
}

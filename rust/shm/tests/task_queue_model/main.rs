//! The protocol of the task queue under a model checker: all orders of its steps, and all values that its orderings
//! allow, up to a number of times that a thread is held up in favour of another.
//!
//! The protocol's own source is compiled here over the checker's words ([`words`]). A wake-up that is lost is a
//! deadlock, which the checker reports; a payload that two touch at once is a race, which it reports too.
#![expect(clippy::arc_with_non_send_sync, reason = "the checker runs the threads of a model one at a time, on one")]
#![expect(dead_code, reason = "the parts of the protocol that only the real words need")]

mod atomic {
    pub(crate) use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
    pub(crate) use loom::sync::Mutex;
    pub(crate) use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
}
#[path = "../../src/task_queue/protocol/mod.rs"]
mod protocol;
mod words;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use loom::sync::{Condvar, Mutex};
use loom::thread;

use protocol::TimeLimit;
use protocol::parent::{ParentProtocol, WaitOutcome};
use protocol::slots::TaskId;
use protocol::worker::{TakeOutcome, WorkerProtocol};
use protocol::{QueueWords, WaiterRole};
use words::{Memory, View, survives};

/// Explore with at most `preemptions` of threads that could have gone on.
fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    builder.check(model);
}

fn parent(memory: &Arc<Memory>) -> Arc<ParentProtocol<View>> {
    Arc::new(ParentProtocol::new(View::immortal(memory), false))
}

fn put(parent: &ParentProtocol<View>, payload: u8) -> Option<TaskId> {
    let mut task_id = None;
    parent.put([(1, [payload])].into_iter(), |given| task_id = Some(given));
    task_id
}

/// Take and finish tasks until the queue is stopped.
fn work(worker: &WorkerProtocol<View>, number: u16) {
    while let TakeOutcome::Task(task_id) = worker.take(number, &mut TimeLimit::new(None, None, &mut || true)) {
        finish(worker, task_id);
    }
}

/// Take and finish tasks until none is queued.
fn do_all(worker: &WorkerProtocol<View>, number: u16) {
    while let Some(task_id) = worker.try_take(number) {
        finish(worker, task_id);
    }
}

/// A result is its task's payload plus one hundred.
fn finish(worker: &WorkerProtocol<View>, task_id: TaskId) {
    let payload = worker.words().read(task_id.slot(), |kind, payload| {
        assert_eq!(kind, 1);
        payload[0]
    });
    worker.finish(task_id, 2, &[payload + 100]);
}

/// Wait as a caller until so many results have come in total.
fn collect(parent: &ParentProtocol<View>, expected: usize, results: &mut Vec<(TaskId, u8)>) {
    while results.len() < expected {
        parent.wait(WaiterRole::Caller, &mut TimeLimit::new(None, None, &mut || true));
        collect_now(parent, results);
    }
}

fn collect_now(parent: &ParentProtocol<View>, results: &mut Vec<(TaskId, u8)>) {
    parent.collect(|task_id, kind, payload| {
        assert_eq!(kind, 2);
        results.push((task_id, payload[0]));
    });
}

fn sorted(mut results: Vec<(TaskId, u8)>) -> Vec<(TaskId, u8)> {
    results.sort_unstable();
    results
}

#[test]
fn each_task_comes_back_once_and_no_thread_sleeps_through_it() {
    check(3, || {
        let memory = Memory::new(2);
        let parent = parent(&memory);
        let worker = thread::spawn({
            let worker = WorkerProtocol::new(View::immortal(&memory), 0);
            move || work(&worker, 0)
        });
        let mut results = Vec::new();
        let first = put(&parent, 1).unwrap();
        let second = put(&parent, 2).unwrap();
        collect(&parent, 2, &mut results);
        parent.stop();
        worker.join().unwrap();
        assert_eq!(sorted(results), [(first, 101), (second, 102)]);
    });
}

#[test]
fn a_slot_that_is_freed_is_used_again_while_workers_look_at_old_entries() {
    check(2, || {
        let memory = Memory::new(1);
        let parent = parent(&memory);
        let workers = [0, 1].map(|number| {
            let worker = WorkerProtocol::new(View::immortal(&memory), 0);
            thread::spawn(move || {
                if let Some(task_id) = worker.try_take(number) {
                    finish(&worker, task_id);
                }
            })
        });
        let mut results = Vec::new();
        let mut task_ids = Vec::new();
        for payload in 0..3 {
            task_ids.extend(put(&parent, payload));
            collect_now(&parent, &mut results);
        }
        for worker in workers {
            worker.join().unwrap();
        }
        // Results that no thread collected in time.
        do_all(&WorkerProtocol::new(View::immortal(&memory), 0), 0);
        collect_now(&parent, &mut results);
        let found: Vec<_> = sorted(results).into_iter().map(|(task_id, _)| task_id).collect();
        assert_eq!(found, task_ids);
    });
}

#[test]
fn a_task_is_revoked_or_done_and_never_both() {
    check(3, || {
        let memory = Memory::new(2);
        let parent = parent(&memory);
        let first = put(&parent, 1).unwrap();
        let second = put(&parent, 2).unwrap();
        let worker = thread::spawn({
            let worker = WorkerProtocol::new(View::immortal(&memory), 0);
            move || work(&worker, 0)
        });
        let is_revoked = parent.revoke(first);
        let mut results = Vec::new();
        if is_revoked {
            assert!(!parent.is_running(first));
            assert!(!parent.revoke(first));
            let third = put(&parent, 3).unwrap();
            collect(&parent, 2, &mut results);
            assert_eq!(sorted(results), [(second, 102), (third, 103)]);
        } else {
            collect(&parent, 2, &mut results);
            assert_eq!(sorted(results), [(first, 101), (second, 102)]);
        }
        parent.stop();
        worker.join().unwrap();
    });
}

/// Of two tasks, each ends only when the other has begun: a worker that sleeps while one waits would sleep for ever.
#[test]
fn no_task_is_left_to_a_worker_that_is_busy() {
    check(2, || {
        let memory = Memory::new(2);
        let parent = parent(&memory);
        let begun = Arc::new((Mutex::new(0), Condvar::new()));
        let workers = [0, 1].map(|number| {
            let worker = WorkerProtocol::new(View::immortal(&memory), 0);
            let begun = Arc::clone(&begun);
            thread::spawn(move || {
                let taken = worker.take(number, &mut TimeLimit::new(None, None, &mut || true));
                assert!(matches!(taken, TakeOutcome::Task(_)));
                let mut count = begun.0.lock().unwrap();
                *count += 1;
                begun.1.notify_all();
                while *count < 2 {
                    count = begun.1.wait(count).unwrap();
                }
            })
        });
        put(&parent, 1).unwrap();
        put(&parent, 2).unwrap();
        for worker in workers {
            worker.join().unwrap();
        }
    });
}

/// When a caller gives up, the background thread is woken for the results that are left.
#[test]
fn a_caller_that_leaves_passes_the_results_on() {
    check(3, || {
        let memory = Memory::new(1);
        let parent = parent(&memory);
        let results = Arc::new(Mutex::new(Vec::new()));
        put(&parent, 1).unwrap();
        let worker = thread::spawn({
            let worker = WorkerProtocol::new(View::immortal(&memory), 0);
            move || {
                let task_id = worker.try_take(0).unwrap();
                finish(&worker, task_id);
            }
        });
        let caller = thread::spawn({
            let (parent, results) = (Arc::clone(&parent), Arc::clone(&results));
            move || {
                let waited =
                    parent.wait(WaiterRole::Caller, &mut TimeLimit::new(Some(Duration::ZERO), None, &mut || true));
                if waited == WaitOutcome::Ready {
                    let mut mine = Vec::new();
                    collect_now(&parent, &mut mine);
                    results.lock().unwrap().extend(mine);
                    parent.end_waits();
                }
            }
        });
        while results.lock().unwrap().is_empty() {
            parent.wait(WaiterRole::Background, &mut TimeLimit::new(None, None, &mut || true));
            let mut mine = Vec::new();
            collect_now(&parent, &mut mine);
            results.lock().unwrap().extend(mine);
        }
        worker.join().unwrap();
        caller.join().unwrap();
        assert_eq!(results.lock().unwrap().len(), 1);
    });
}

/// One of two workers dies before each of its steps in turn, while the other looks for tasks, too.
#[test]
fn a_death_costs_one_task_at_most() {
    let steps = live_and_die(3, |steps| {
        let memory = Memory::new(2);
        let parent = parent(&memory);
        let task_ids = [put(&parent, 1).unwrap(), put(&parent, 2).unwrap()];
        let mortal = thread::spawn({
            let worker = WorkerProtocol::new(View::mortal(&memory, steps), 0);
            move || survives(|| do_all(&worker, 0))
        });
        let other = WorkerProtocol::new(View::immortal(&memory), 0);
        do_all(&other, 1);
        let survived = mortal.join().unwrap();
        let lost = if survived { Vec::new() } else { parent.reap(0) };
        assert!(lost.len() <= 1);
        do_all(&other, 1);
        let mut results = Vec::new();
        collect_now(&parent, &mut results);
        let mut found: Vec<_> = results.iter().map(|(task_id, _)| *task_id).chain(lost).collect();
        found.sort_unstable();
        assert_eq!((&found[..], parent.room()), (&task_ids[..], 2));
        survived
    });
    assert!(steps > 12, "a life of {steps} steps");
}

/// As above, for a worker that dies before it has sent the parent a result or a wake-up. A thread that notices the
/// death reaps the worker and ends all waits, as a pool does.
#[test]
fn a_parent_does_not_wait_for_the_dead() {
    let steps = live_and_die(2, |steps| {
        let memory = Memory::new(1);
        let parent = parent(&memory);
        let task_id = put(&parent, 1).unwrap();
        let lost = Arc::new(Mutex::new(Vec::new()));
        let mortal = thread::spawn({
            let worker = WorkerProtocol::new(View::mortal(&memory, steps), 0);
            let (parent, lost) = (Arc::clone(&parent), Arc::clone(&lost));
            move || {
                let survived = survives(|| do_all(&worker, 0));
                if !survived {
                    *lost.lock().unwrap() = parent.reap(0);
                    // The steps that it did not reach.
                    do_all(&WorkerProtocol::new(worker.words().next(), 0), 0);
                    parent.end_waits();
                }
                survived
            }
        });
        let mut found = Vec::new();
        while found.is_empty() {
            parent.wait(WaiterRole::Caller, &mut TimeLimit::new(None, None, &mut || true));
            parent.collect(|task_id, _, _| found.push(task_id));
            found.append(&mut lost.lock().unwrap());
        }
        assert_eq!(found, [task_id]);
        mortal.join().unwrap()
    });
    assert!(steps > 12, "a life of {steps} steps");
}

/// As above, for a worker that was to take a task while another slept, or that died while it woke the other.
#[test]
fn a_worker_does_not_sleep_for_the_dead() {
    // Three threads with one preemption take minutes.
    let steps = live_and_die(usize::from(is_soak()), |steps| {
        let memory = Memory::new(2);
        let parent = parent(&memory);
        // Tasks that a worker has begun.
        let begun = Arc::new((Mutex::new(0), Condvar::new()));
        let begin = |count: usize, begun: &(Mutex<usize>, Condvar)| {
            *begun.0.lock().unwrap() += count;
            begun.1.notify_all();
        };
        let mortal = thread::spawn({
            let worker = WorkerProtocol::new(View::mortal(&memory, steps), 0);
            let (parent, begun) = (Arc::clone(&parent), Arc::clone(&begun));
            move || {
                let mut taken = TakeOutcome::Nothing;
                let survived = survives(|| taken = worker.take(0, &mut TimeLimit::new(None, None, &mut || true)));
                let count = if survived { usize::from(taken != TakeOutcome::Stop) } else { parent.reap(0).len() };
                begin(count, &begun);
                survived
            }
        });
        let other = thread::spawn({
            let worker = WorkerProtocol::new(View::immortal(&memory), 0);
            let begun = Arc::clone(&begun);
            move || {
                while let TakeOutcome::Task(_) = worker.take(1, &mut TimeLimit::new(None, None, &mut || true)) {
                    begin(1, &begun);
                }
            }
        });
        parent.put([(1, [1]), (1, [2])].into_iter(), |_| ());
        let mut count = begun.0.lock().unwrap();
        while *count < 2 {
            count = begun.1.wait(count).unwrap();
        }
        drop(count);
        parent.stop();
        other.join().unwrap();
        mortal.join().unwrap()
    });
    assert!(steps > 20, "a life of {steps} steps");
}

/// The searching worker dies before a task is put that it was to take, and is reaped afterwards.
#[test]
fn reaping_wakes_threads_that_sleep_beside_a_task() {
    let steps = live_and_die(1, |steps| {
        let memory = Memory::new(1);
        let parent = parent(&memory);
        let other = thread::spawn({
            let worker = WorkerProtocol::new(View::immortal(&memory), 0);
            move || work(&worker, 1)
        });
        let mortal = thread::spawn({
            let worker = WorkerProtocol::new(View::mortal(&memory, steps), 0);
            move || {
                survives(|| {
                    worker.take(0, &mut TimeLimit::new(Some(Duration::ZERO), None, &mut || true));
                })
            }
        });
        let survived = mortal.join().unwrap();
        let task_id = put(&parent, 1).unwrap();
        if !survived {
            assert_eq!(parent.reap(0), []);
        }
        let mut results = Vec::new();
        collect(&parent, 1, &mut results);
        assert_eq!(results, [(task_id, 101)]);
        parent.stop();
        other.join().unwrap();
        survived
    });
    assert!(steps > 8, "a life of {steps} steps");
}

fn is_soak() -> bool {
    std::env::var_os("TUNDISH_SOAK").is_some_and(|value| value != "0")
}

/// Models workers that die before their first step, their second and so on, until one survives in all orders. Returns
/// how many steps that took. `model` returns whether the worker survived.
fn live_and_die(preemptions: usize, model: impl Fn(usize) -> bool + Copy + Send + Sync + 'static) -> usize {
    for steps in 0.. {
        let has_died = Arc::new(AtomicBool::new(false));
        check(preemptions, {
            let has_died = Arc::clone(&has_died);
            move || {
                if !model(steps) {
                    has_died.store(true, Ordering::Relaxed);
                }
            }
        });
        if !has_died.load(Ordering::Relaxed) {
            return steps;
        }
    }
    unreachable!("no life is endless")
}

//! The task queue against lists and maps that do the same.
#![cfg(target_os = "linux")]

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use proptest::prelude::*;
use tundish_shm::task_queue::{ParentQueue, TakeOutcome, TaskId, TimeLimit, WaitOutcome, WaiterRole, WorkerQueue};

const CAPACITY: usize = 256;

#[derive(Clone, Debug)]
enum Step {
    Put(Vec<usize>),
    Take(u16),
    /// The taken task of this number, counted from the oldest.
    Finish(usize, usize),
    Revoke(usize),
    Reap(u16),
    Collect,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => prop::collection::vec(0..=CAPACITY, 1..4).prop_map(Step::Put),
        4 => (0u16..3).prop_map(Step::Take),
        3 => (0usize..4, 0..=CAPACITY).prop_map(|(which, length)| Step::Finish(which, length)),
        3 => (0usize..6).prop_map(Step::Revoke),
        1 => (0u16..3).prop_map(Step::Reap),
        2 => Just(Step::Collect),
    ];
    prop::collection::vec(step, 0..200)
}

/// The model of a queue: its tasks with a gap for each revoked one, the taken tasks, and the finished tasks.
struct Oracle {
    slots: usize,
    queue: VecDeque<Option<(TaskId, Vec<u8>)>>,
    taken: Vec<(u16, TaskId)>,
    done: BTreeMap<TaskId, Vec<u8>>,
}

impl Oracle {
    fn queued(&self) -> impl Iterator<Item = TaskId> + '_ {
        self.queue.iter().flatten().map(|(task_id, _)| *task_id)
    }

    fn pass_gaps(&mut self) {
        while let Some(None) = self.queue.front() {
            self.queue.pop_front();
        }
    }

    fn room(&mut self) -> usize {
        self.pass_gaps();
        let free = self.slots - self.queued().count() - self.taken.len() - self.done.len();
        free.min((2 * self.slots).next_power_of_two() - self.queue.len())
    }
}

fn message(seed: usize, length: usize) -> Vec<u8> {
    (0..length).map(|index| (seed * 31 + index) as u8).collect()
}

proptest! {
    #[test]
    fn a_queue_does_what_lists_do(slots in 1usize..6, steps in steps()) {
        let queue = ParentQueue::create(slots, CAPACITY + 16).unwrap();
        let worker = WorkerQueue::open(queue.descriptor()).unwrap();
        prop_assert_eq!((queue.capacity(), worker.capacity()), (CAPACITY, CAPACITY));
        let mut oracle = Oracle { slots, queue: VecDeque::new(), taken: Vec::new(), done: BTreeMap::new() };
        for (seed, step) in steps.into_iter().enumerate() {
            match step {
                Step::Put(lengths) => {
                    let payloads: Vec<_> = lengths.iter().map(|&length| message(seed, length)).collect();
                    let mut task_ids = Vec::new();
                    queue.put_many(payloads.iter().map(|payload| (seed as u32, payload)), |task_id| task_ids.push(task_id));
                    prop_assert_eq!(task_ids.len(), oracle.room().min(payloads.len()));
                    prop_assert!(task_ids.is_sorted());
                    oracle.queue.extend(task_ids.into_iter().zip(payloads).map(Some));
                }
                Step::Take(number) => {
                    let taken = worker.try_take(number, |task_id, _, payload| (task_id, payload.to_vec())).unwrap();
                    oracle.pass_gaps();
                    let expected = oracle.queue.pop_front().flatten();
                    prop_assert_eq!(&taken, &expected);
                    oracle.taken.extend(taken.map(|(task_id, _)| (number, task_id)));
                }
                Step::Finish(which, length) if which < oracle.taken.len() => {
                    let (_, task_id) = oracle.taken.remove(which);
                    prop_assert!(queue.is_running(task_id) && !queue.revoke(task_id));
                    worker.finish(task_id, 5, &message(seed, length)).unwrap();
                    prop_assert!(worker.finish(task_id, 5, &[]).is_err());
                    oracle.done.insert(task_id, message(seed, length));
                }
                Step::Revoke(which) => {
                    let Some(task_id) = oracle.queued().nth(which) else { continue };
                    prop_assert!(!queue.is_running(task_id));
                    prop_assert!(queue.revoke(task_id));
                    prop_assert!(!queue.revoke(task_id));
                    let gap = oracle.queue.iter_mut().find(|entry| entry.as_ref().is_some_and(|(of, _)| *of == task_id));
                    *gap.unwrap() = None;
                }
                Step::Reap(number) => {
                    let mut lost = queue.reap(number).unwrap();
                    lost.sort_unstable();
                    let mut expected: Vec<_> =
                        oracle.taken.extract_if(.., |(of, _)| *of == number).map(|(_, task_id)| task_id).collect();
                    expected.sort_unstable();
                    prop_assert_eq!(lost, expected);
                }
                Step::Collect => {
                    prop_assert_eq!(queue.is_ready(), !oracle.done.is_empty());
                    let mut results = BTreeMap::new();
                    queue.collect(|task_id, kind, payload| {
                        assert_eq!(kind, 5);
                        assert_eq!(results.insert(task_id, payload.to_vec()), None);
                    });
                    prop_assert_eq!(&results, &core::mem::take(&mut oracle.done));
                }
                Step::Finish(..) => {}
            }
            prop_assert_eq!(queue.room(), oracle.room());
        }
    }
}

#[test]
fn a_wait_without_time_reports_present_results() {
    let queue = ParentQueue::create(2, 4096).unwrap();
    let worker = WorkerQueue::open(queue.descriptor()).unwrap();
    let wait = |role| queue.wait(role, &mut TimeLimit::new(Some(Duration::ZERO), None, &mut || true));
    let take = || worker.take(3, &mut TimeLimit::new(Some(Duration::ZERO), None, &mut || true)).unwrap();
    assert_eq!((wait(WaiterRole::Caller), wait(WaiterRole::Background)), (WaitOutcome::Nothing, WaitOutcome::Nothing));
    assert_eq!(take(), TakeOutcome::Nothing);
    let task_id = queue.put(1, b"task").unwrap().unwrap();
    queue.stop();
    assert_eq!(take(), TakeOutcome::Task(task_id));
    assert_eq!(take(), TakeOutcome::Stop);
    worker.finish(task_id, 1, b"result").unwrap();
    assert_eq!((wait(WaiterRole::Caller), wait(WaiterRole::Background)), (WaitOutcome::Ready, WaitOutcome::Ready));
}

#[test]
fn results_that_a_panic_kept_from_their_reader_come_again() {
    let queue = ParentQueue::create(3, 4096).unwrap();
    let worker = WorkerQueue::open(queue.descriptor()).unwrap();
    for _ in 0..3 {
        queue.put(1, b"").unwrap().unwrap();
        let task_id = worker.try_take(0, |task_id, _, _| task_id).unwrap().unwrap();
        worker.finish(task_id, 1, b"").unwrap();
    }
    let mut seen = Vec::new();
    let panic = std::panic::catch_unwind(core::panic::AssertUnwindSafe(|| {
        queue.collect(|task_id, _, _| {
            assert!(seen.is_empty(), "one is enough");
            seen.push(task_id);
        });
    }));
    assert!(panic.is_err() && seen.len() == 1);
    queue.collect(|task_id, _, _| seen.push(task_id));
    seen.sort_unstable();
    seen.dedup();
    assert_eq!((seen.len(), queue.room()), (3, 3));
}

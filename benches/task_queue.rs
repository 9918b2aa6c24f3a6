//! The task queue between two processes: tasks a second, and one task there and back, beside a pair of pipes.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use tundish_shm::task_queue::{ParentQueue, TakeOutcome, TimeLimit, WaiterRole, WorkerQueue};

const PAYLOAD: [u8; 32] = [7; 32];
const BATCH: usize = 64;

/// A process that runs `life`, and is killed when this is dropped.
struct Child(libc::pid_t);

impl Child {
    fn start(life: impl FnOnce()) -> Self {
        // SAFETY: this program has one thread; the child does its part and ends.
        match unsafe { libc::fork() } {
            0 => {
                life();
                // SAFETY: ends the child without running the parent's code in it.
                unsafe { libc::_exit(0) }
            }
            pid => Self(pid),
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: a child that was not waited for.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, core::ptr::null_mut(), 0);
        }
    }
}

fn worker(queue: &ParentQueue) -> Child {
    Child::start(|| {
        let queue = WorkerQueue::open(queue.descriptor()).expect("a queue");
        let mut payload = Vec::new();
        while let Ok(TakeOutcome::Task(task_id)) = queue.take(0, &mut TimeLimit::new(None, None, &mut || true)) {
            payload.clear();
            queue.read(task_id, |_, _, bytes| payload.extend_from_slice(bytes)).expect("a task");
            queue.finish(task_id, 0, &payload).expect("a result");
        }
    })
}

/// Puts batches and collects results until `rounds` results have come.
fn stream(queue: &ParentQueue, rounds: u64) {
    let (mut put, mut collected) = (0, 0);
    while collected < rounds {
        let count = BATCH.min((rounds - put) as usize);
        queue.put_many(core::iter::repeat_n((0, PAYLOAD), count), |_| put += 1);
        queue.wait(WaiterRole::Caller, &mut TimeLimit::new(Some(Duration::from_secs(10)), None, &mut || true));
        queue.collect(|_, _, _| collected += 1);
    }
}

fn there_and_back(queue: &ParentQueue) {
    queue.put(0, &PAYLOAD).expect("a small payload").expect("room");
    queue.wait(WaiterRole::Caller, &mut TimeLimit::new(Some(Duration::from_secs(10)), None, &mut || true));
    queue.collect(|_, _, payload| assert_eq!(payload, PAYLOAD));
}

fn timed(rounds: u64, work: impl FnOnce(u64)) -> Duration {
    let begin = Instant::now();
    work(rounds);
    begin.elapsed()
}

fn task_queue(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("task_queue");
    group.throughput(Throughput::Elements(1)).measurement_time(Duration::from_secs(3));
    let queue = ParentQueue::create(512, 16 << 10).expect("memory for a queue");
    let child = worker(&queue);
    group.bench_function("tasks in batches", |bencher| {
        bencher.iter_custom(|rounds| timed(rounds, |rounds| stream(&queue, rounds)));
    });
    group.bench_function("there and back", |bencher| bencher.iter(|| there_and_back(&queue)));
    drop(child);

    let (mut there, mut back) = (std::io::pipe().expect("a pipe"), std::io::pipe().expect("a pipe"));
    let child = Child::start(|| {
        let mut payload = PAYLOAD;
        while there.0.read_exact(&mut payload).is_ok() && back.1.write_all(&payload).is_ok() {}
    });
    group.bench_function("there and back through pipes", |bencher| {
        bencher.iter(|| {
            let mut payload = PAYLOAD;
            there.1.write_all(&payload).expect("a reader");
            back.0.read_exact(&mut payload).expect("a writer");
            payload
        });
    });
    drop(child);
    group.finish();
}

criterion_group!(benches, task_queue);
criterion_main!(benches);

//! The task queue between processes that are killed at random instants.
#![cfg(target_os = "linux")]

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rustix::fd::AsFd;
use tundish_shm::task_queue::{ParentQueue, TakeOutcome, TaskId, TimeLimit, WaitOutcome, WaiterRole, WorkerQueue};

/// Far longer than anything here takes.
// time: what comes at all comes within this
const STUCK: Duration = Duration::from_secs(20);

/// A child process, killed at the end at the latest.
struct Child(libc::pid_t);

impl Child {
    fn start(life: impl FnOnce()) -> Self {
        // SAFETY: the child runs `life` alone, which starts no thread and takes no lock of another one, and ends
        // itself.
        match unsafe { libc::fork() } {
            0 => {
                life();
                // SAFETY: ends the child without running the parent's code in it.
                unsafe { libc::_exit(0) }
            }
            pid => {
                assert!(pid > 0, "no process left");
                Self(pid)
            }
        }
    }

    /// Wait for its own end; its status.
    fn join(self) -> i32 {
        let mut status = 0;
        // SAFETY: a child of this process that no other thread waits for.
        assert_eq!(unsafe { libc::waitpid(self.0, &raw mut status, 0) }, self.0);
        core::mem::forget(self);
        status
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: a child that was not waited for, so its number is its own.
        unsafe {
            libc::kill(self.0, libc::SIGKILL);
            libc::waitpid(self.0, core::ptr::null_mut(), 0);
        }
    }
}

/// Pseudo-random numbers, the same in each run (Marsaglia's xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

fn worker(queue: &ParentQueue, number: u16) -> Child {
    Child::start(|| {
        let Ok(queue) = WorkerQueue::open(queue.descriptor()) else { return };
        while let Ok(TakeOutcome::Task(task_id)) = queue.take(number, &mut TimeLimit::new(None, None, &mut || true)) {
            let Ok(answer) = queue.read(task_id, |_, _, payload| answer(payload)) else { return };
            if queue.finish(task_id, 7, &answer).is_err() {
                return;
            }
        }
    })
}

/// As long as the question, so that a half-written result is detected.
fn answer(question: &[u8]) -> Vec<u8> {
    question.iter().rev().map(|byte| byte ^ 0x5a).collect()
}

fn question(number: u64) -> Vec<u8> {
    let mut state = Random(number + 1);
    (0..8 + state.below(3000)).map(|_| state.below(256) as u8).collect()
}

/// Wait for results, and check them off.
fn collect(queue: &ParentQueue, open: &mut HashMap<TaskId, u64>) {
    let begin = Instant::now();
    while queue.wait(WaiterRole::Caller, &mut TimeLimit::new(Some(STUCK), None, &mut || true)) != WaitOutcome::Ready {
        assert!(begin.elapsed() < STUCK, "{} tasks wait for nobody", open.len());
    }
    queue.collect(|task_id, kind, payload| {
        let number = open.remove(&task_id).expect("each result comes once");
        assert_eq!((kind, payload), (7, &answer(&question(number))[..]));
    });
}

#[test]
fn a_killed_worker_costs_the_task_that_it_had_and_nothing_else() {
    const WORKERS: u16 = 3;
    let is_soak = std::env::var_os("TUNDISH_SOAK").is_some_and(|value| value != "0");
    let kills = if is_soak { 5000 } else { 100 };
    let mut random = Random(20_261_121);
    for slots in [1, 4, 64] {
        let queue = ParentQueue::create(slots, 4096).unwrap();
        let mut workers: HashMap<_, _> = (0..WORKERS).map(|number| (number, worker(&queue, number))).collect();
        let mut open = HashMap::new();
        let (mut put, mut lost) = (0, 0);
        for _ in 0..kills {
            while queue.room() > 0 {
                let task_id = queue.put(3, &question(put)).unwrap().unwrap();
                assert_eq!(open.insert(task_id, put), None);
                put += 1;
            }
            let pause = Duration::from_nanos(random.below(200_000));
            let begin = Instant::now();
            while begin.elapsed() < pause {
                core::hint::spin_loop();
            }
            let number = random.below(u64::from(WORKERS)) as u16;
            drop(workers.remove(&number));
            let died = queue.reap(number).unwrap();
            workers.insert(number, worker(&queue, number));
            assert!(died.len() <= 1);
            for task_id in died {
                assert!(open.remove(&task_id).is_some(), "what is lost was not done");
                lost += 1;
            }
            if !open.is_empty() {
                collect(&queue, &mut open);
            }
        }
        while !open.is_empty() {
            collect(&queue, &mut open);
        }
        assert_eq!(queue.room(), slots);
        assert!(lost <= kills && put > lost);
        queue.stop();
        for worker in workers.into_values() {
            assert_eq!(worker.join(), 0);
        }
    }
}

#[test]
fn workers_that_sleep_when_they_are_killed_are_not_waited_for() {
    let queue = ParentQueue::create(8, 4096).unwrap();
    let mut random = Random(4);
    let mut workers: HashMap<_, _> = (0..2).map(|number| (number, worker(&queue, number))).collect();
    for number in 0..50u64 {
        // Long enough for both to fall asleep, or nearly.
        std::thread::sleep(Duration::from_micros(random.below(300)));
        let victim = (number % 2) as u16;
        drop(workers.remove(&victim));
        // The task may be left to the dead one, which was searching or asleep.
        let task_id = queue.put(3, &question(number)).unwrap().unwrap();
        assert_eq!(queue.reap(victim).unwrap(), []);
        collect(&queue, &mut HashMap::from([(task_id, number)]));
        workers.insert(victim, worker(&queue, victim));
    }
    queue.stop();
    for worker in workers.into_values() {
        assert_eq!(worker.join(), 0);
    }
}

#[test]
fn a_watcher_ends_its_process_when_another_one_is_killed() {
    for by_pipe in [false, true] {
        // Held by the watching process alone: it is at its end when that one is.
        let (alive, keeper) = std::io::pipe().unwrap();
        let (watched, held) = std::io::pipe().unwrap();
        let middle = Child::start(|| {
            // SAFETY: no arguments, cannot fail.
            let middle = unsafe { libc::getpid() };
            // SAFETY: as in `Child::start`; ended by its watcher.
            if unsafe { libc::fork() } == 0 {
                let pid = if by_pipe {
                    drop(held);
                    1
                } else {
                    middle
                };
                if tundish_shm::exit_with_parent(watched.as_fd(), pid).is_ok() {
                    loop {
                        std::thread::sleep(STUCK);
                    }
                }
                return;
            }
            drop(keeper);
            loop {
                std::thread::sleep(STUCK);
            }
        });
        std::thread::sleep(Duration::from_millis(100));
        drop(middle);
        let begin = Instant::now();
        let mut ends = [rustix::event::PollFd::new(&alive, rustix::event::PollFlags::IN)];
        let seconds = rustix::event::Timespec { tv_sec: 20, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut ends, Some(&seconds)).unwrap(), 1);
        // time: the kernel ends the process at once; it would sleep for STUCK
        assert!(begin.elapsed() < Duration::from_secs(10));
    }
}

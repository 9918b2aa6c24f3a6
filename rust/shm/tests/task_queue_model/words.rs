//! The words of a queue for the model checker, and threads that die before a given step.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering as Plain};
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64};
use loom::sync::{Condvar, Mutex};

use crate::protocol::{QueueWords, WaiterRole};

const WORKERS: u16 = 2;
/// Words on which threads may sleep: the listeners' and the workers'.
const BEDS: usize = 2 + WORKERS as usize;

/// The state that all threads share.
pub(crate) struct Memory {
    states: Vec<AtomicU64>,
    queue: Vec<AtomicU32>,
    head: AtomicU64,
    tail: AtomicU64,
    finished: AtomicU64,
    idle_workers: AtomicU64,
    worker_count: AtomicU32,
    stopped: AtomicU32,
    callers: AtomicU32,
    beds: [AtomicU32; BEDS],
    kernel: [(Mutex<()>, Condvar); BEDS],
    payloads: Vec<UnsafeCell<(u32, u8)>>,
}

impl Memory {
    pub(crate) fn new(slots: usize) -> Arc<Self> {
        Arc::new(Self {
            states: (0..slots).map(|_| AtomicU64::new(0)).collect(),
            queue: (0..2 * slots).map(|_| AtomicU32::new(0)).collect(),
            head: AtomicU64::new(0),
            tail: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            idle_workers: AtomicU64::new(0),
            worker_count: AtomicU32::new(0),
            stopped: AtomicU32::new(0),
            callers: AtomicU32::new(0),
            beds: core::array::from_fn(|_| AtomicU32::new(0)),
            kernel: core::array::from_fn(|_| (Mutex::new(()), Condvar::new())),
            payloads: (0..slots).map(|_| UnsafeCell::new((0, 0))).collect(),
        })
    }
}

/// The view of one process. Every use of a word is a step; a mortal process is killed before a given step.
#[derive(Clone)]
pub(crate) struct View {
    memory: Arc<Memory>,
    left: Option<Arc<AtomicUsize>>,
}

/// The panic payload of a killed thread.
struct Killed;

impl View {
    pub(crate) fn immortal(memory: &Arc<Memory>) -> Self {
        Self { memory: Arc::clone(memory), left: None }
    }

    pub(crate) fn mortal(memory: &Arc<Memory>, steps: usize) -> Self {
        Self { memory: Arc::clone(memory), left: Some(Arc::new(AtomicUsize::new(steps))) }
    }

    /// The view of the next process.
    pub(crate) fn next(&self) -> Self {
        Self::immortal(&self.memory)
    }

    fn step(&self) {
        let Some(left) = &self.left else { return };
        match left.load(Plain::Relaxed) {
            0 => resume_unwind(Box::new(Killed)),
            steps => left.store(steps - 1, Plain::Relaxed),
        }
    }

    fn bed(&self, word: &AtomicU32) -> &(Mutex<()>, Condvar) {
        let number = self.memory.beds.iter().position(|bed| core::ptr::eq(bed, word)).expect("a word to sleep on");
        &self.memory.kernel[number]
    }
}

/// Whether `life` ran to its end.
pub(crate) fn survives(life: impl FnOnce()) -> bool {
    match catch_unwind(AssertUnwindSafe(life)) {
        Ok(()) => true,
        Err(end) if end.is::<Killed>() => false,
        Err(panic) => resume_unwind(panic),
    }
}

impl QueueWords for View {
    fn slots(&self) -> usize {
        self.memory.states.len()
    }

    fn entries(&self) -> u64 {
        self.memory.queue.len() as u64
    }

    fn workers(&self) -> u16 {
        WORKERS
    }

    fn state(&self, slot: usize) -> &AtomicU64 {
        self.step();
        &self.memory.states[slot]
    }

    fn entry(&self, position: u64) -> &AtomicU32 {
        self.step();
        &self.memory.queue[position as usize % self.memory.queue.len()]
    }

    fn head(&self) -> &AtomicU64 {
        self.step();
        &self.memory.head
    }

    fn tail(&self) -> &AtomicU64 {
        self.step();
        &self.memory.tail
    }

    fn finished(&self, _word: usize) -> &AtomicU64 {
        self.step();
        &self.memory.finished
    }

    fn idle_workers(&self, _number: usize) -> &AtomicU64 {
        self.step();
        &self.memory.idle_workers
    }

    fn wake_word(&self, worker: u16) -> &AtomicU32 {
        self.step();
        &self.memory.beds[2 + usize::from(worker)]
    }

    fn worker_count(&self) -> &AtomicU32 {
        self.step();
        &self.memory.worker_count
    }

    fn stopped(&self) -> &AtomicU32 {
        self.step();
        &self.memory.stopped
    }

    fn callers(&self) -> &AtomicU32 {
        self.step();
        &self.memory.callers
    }

    fn result_word(&self, role: WaiterRole) -> &AtomicU32 {
        self.step();
        &self.memory.beds[role as usize]
    }

    fn write(&self, slot: usize, kind: u32, payload: &[u8]) {
        self.step();
        // SAFETY: the checker finds any access at the same time.
        self.memory.payloads[slot].with_mut(|cell| unsafe { (*cell).0 = kind });
        self.step();
        // SAFETY: as above.
        self.memory.payloads[slot].with_mut(|cell| unsafe { (*cell).1 = payload[0] });
    }

    fn read<R>(&self, slot: usize, with: impl FnOnce(u32, &[u8]) -> R) -> R {
        self.step();
        // SAFETY: as above.
        let (kind, byte) = self.memory.payloads[slot].with(|cell| unsafe { *cell });
        with(kind, &[byte])
    }

    /// As the kernel does it: the word is compared under a lock, so a waker finds the sleeper or comes before it.
    fn sleep(&self, word: &AtomicU32, seen: u32, _longest: Option<Duration>) {
        self.step();
        let (lock, sleepers) = self.bed(word);
        let guard = lock.lock().expect("nobody dies under it");
        let is_so = word.load(core::sync::atomic::Ordering::Relaxed) == seen;
        drop(if is_so { sleepers.wait(guard).expect("nobody dies under it") } else { guard });
        self.step();
    }

    fn wake_all(&self, word: &AtomicU32) {
        self.step();
        let (lock, sleepers) = self.bed(word);
        let _guard = lock.lock().expect("nobody dies under it");
        sleepers.notify_all();
    }
}

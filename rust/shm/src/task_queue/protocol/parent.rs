//! The parent's side: puts tasks, collects results, reaps dead workers.
//!
//! Invariants: the list of free slots and the tail are the parent's own, under a lock. The lock is never held while a
//! thread sleeps or the caller's code runs. A slot is in the list, or its state names a task, or a thread of
//! the parent works on it.

use std::sync::PoisonError;

use super::super::atomic::{AcqRel, Acquire, AtomicU32, Mutex, Relaxed, Release};
use super::SpinHistory;
use super::TimeLimit;
use super::slots::{self as state, FREE, TaskId};
use super::{QueueWords, WaiterRole, slots, wakeups};

/// The outcome of a wait for results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitOutcome {
    /// There are results; the thread that gets this collects them.
    Ready,
    /// The time was over, `end_waits` was called, or another thread collected the results.
    Nothing,
    /// The check of the wait ended it.
    Interrupted,
}

/// State that only the parent has.
struct ParentState {
    /// The last one freed is used first: its pages are warm.
    free: Vec<u32>,
    tail: u64,
    /// A copy of the head, maybe an old one: reading the head costs a cache line that all workers write.
    head: u64,
    /// Kept for its memory.
    collected: Vec<CollectedSlot>,
}

/// A slot whose mark was taken away, and the state that it was in.
struct CollectedSlot {
    slot: usize,
    state: u64,
}

/// A queue as its parent sees it.
pub(crate) struct ParentProtocol<W> {
    words: W,
    local: Mutex<ParentState>,
    /// For each role: not zero if a call of `end_waits` is to end the next wait.
    wait_ended: [AtomicU32; 2],
    spins: bool,
    spin: SpinHistory,
}

impl<W: QueueWords> ParentProtocol<W> {
    /// Over words that are all zero. Callers wait awake for a while if there is a processor for it.
    pub(crate) fn new(words: W, spins: bool) -> Self {
        // Counted from one, so that no task id is zero.
        words.head().store(1, Relaxed);
        words.tail().store(1, Release);
        let free = (0..words.slots() as u32).rev().collect();
        Self {
            words,
            local: Mutex::new(ParentState { free, tail: 1, head: 1, collected: Vec::new() }),
            wait_ended: [AtomicU32::new(0), AtomicU32::new(0)],
            spins,
            spin: SpinHistory::default(),
        }
    }

    pub(crate) fn words(&self) -> &W {
        &self.words
    }

    /// How many tasks there is room for now.
    pub(crate) fn room(&self) -> usize {
        self.with_local(|local| self.room_at(local))
    }

    /// Queues as many messages as there is room for, and calls `each` with their ids.
    pub(crate) fn put<P: AsRef<[u8]>>(&self, messages: impl Iterator<Item = (u32, P)>, mut each: impl FnMut(TaskId)) {
        self.with_local(|local| {
            let room = self.room_at(local);
            for (kind, payload) in messages.take(room) {
                let Some(slot) = local.free.pop() else { break };
                self.words.write(slot as usize, kind, payload.as_ref());
                each(slots::push(&self.words, local.tail, slot as usize));
                local.tail += 1;
            }
            slots::publish(&self.words, local.tail);
        });
        wakeups::wake_needed(&self.words);
    }

    /// Take a task back that no worker has taken.
    pub(crate) fn revoke(&self, task_id: TaskId) -> bool {
        self.with_local(|local| {
            let is_mine = slots::revoke(&self.words, task_id);
            if is_mine {
                local.free.push(task_id.slot() as u32);
            }
            is_mine
        })
    }

    /// Whether a worker has taken the task, and its result is not collected.
    pub(crate) fn is_running(&self, task_id: TaskId) -> bool {
        task_id.slot() < self.words.slots() && {
            let state = self.words.state(task_id.slot()).load(Relaxed);
            task_id.is_in(state) && (state::is_taken(state) || state::is_done(state))
        }
    }

    /// Whether there are results.
    pub(crate) fn is_ready(&self) -> bool {
        wakeups::is_ready(&self.words)
    }

    /// Call `each` with every result that there is, and free their slots. It runs without the lock.
    pub(crate) fn collect(&self, mut each: impl FnMut(TaskId, u32, &[u8])) {
        if !wakeups::is_ready(&self.words) {
            return;
        }
        let collected = self.with_local(|local| {
            let mut collected = std::mem::take(&mut local.collected);
            wakeups::take_marks(&self.words, |slot| {
                let state = self.words.state(slot).load(Acquire);
                if state::is_done(state) {
                    // Freed at once, or `reap` would mark it again.
                    self.words.state(slot).store(FREE, Relaxed);
                    collected.push(CollectedSlot { slot, state });
                }
            });
            collected
        });
        let mut delivery = DeliveryGuard { parent: self, collected, delivered: 0 };
        while let Some(&CollectedSlot { slot, state }) = delivery.collected.get(delivery.delivered) {
            self.words.read(slot, |kind, payload| each(TaskId::of(state, slot), kind, payload));
            delivery.delivered += 1;
        }
    }

    /// Wait until there are results.
    pub(crate) fn wait(&self, role: WaiterRole, limit: &mut TimeLimit<'_>) -> WaitOutcome {
        if wakeups::is_ready(&self.words) {
            return WaitOutcome::Ready;
        }
        if role == WaiterRole::Background {
            return self.sleep_until_ready(role, limit);
        }
        wakeups::add_caller(&self.words);
        let started = self.spin.begin();
        if self.spins {
            self.spin.spin_until(&started, limit, || wakeups::is_ready(&self.words));
        }
        let waited = self.sleep_until_ready(role, limit);
        self.spin.end(&started);
        wakeups::remove_caller(&self.words);
        match waited {
            WaitOutcome::Nothing if wakeups::is_ready(&self.words) => WaitOutcome::Ready,
            WaitOutcome::Interrupted => {
                if wakeups::is_ready(&self.words) {
                    wakeups::wake_for_result(&self.words);
                }
                waited
            }
            _ => waited,
        }
    }

    /// Frees the slots of a dead worker, and wakes all waiters. Returns the tasks that died with it; its finished ones
    /// can still be collected.
    pub(crate) fn reap(&self, worker: u16) -> Vec<TaskId> {
        let mut lost = Vec::new();
        self.with_local(|local| {
            for slot in 0..self.words.slots() {
                let state = self.words.state(slot).load(Acquire);
                if !state::is_of(state, worker) {
                    continue;
                }
                if state::is_done(state) {
                    wakeups::mark(&self.words, slot);
                } else {
                    self.words.state(slot).store(FREE, Relaxed);
                    local.free.push(slot as u32);
                    lost.push(TaskId::of(state, slot));
                }
            }
        });
        wakeups::forget(&self.words, worker);
        wakeups::wake_all_workers(&self.words);
        wakeups::wake_again(&self.words);
        self.end_waits();
        lost
    }

    /// Let workers stop when no task is left.
    pub(crate) fn stop(&self) {
        self.words.stopped().store(1, Release);
        wakeups::wake_all_workers(&self.words);
    }

    /// End all waits for results, or the next one in each role.
    pub(crate) fn end_waits(&self) {
        for role in [WaiterRole::Caller, WaiterRole::Background] {
            self.wait_ended(role).store(1, Release);
            wakeups::wake(&self.words, role);
        }
    }

    /// Wait asleep.
    fn sleep_until_ready(&self, role: WaiterRole, limit: &mut TimeLimit<'_>) -> WaitOutcome {
        loop {
            if let Some(waited) = self.wait_outcome(role) {
                return waited;
            }
            if limit.is_over() {
                return WaitOutcome::Nothing;
            }
            let seen = wakeups::arm(&self.words, role);
            if let Some(waited) = self.wait_outcome(role) {
                return waited;
            }
            let result_word = self.words.result_word(role);
            self.words.sleep(result_word, seen, limit.next_sleep());
            // A caller that was woken returns, to see whether another thread has collected its result.
            let was_woken = result_word.load(Acquire) != seen;
            if was_woken && role == WaiterRole::Caller && !wakeups::is_ready(&self.words) {
                return WaitOutcome::Nothing;
            }
            if !was_woken && !limit.may_continue() {
                return WaitOutcome::Interrupted;
            }
        }
    }

    fn wait_outcome(&self, role: WaiterRole) -> Option<WaitOutcome> {
        if wakeups::is_ready(&self.words) {
            return Some(WaitOutcome::Ready);
        }
        let is_ended = self.wait_ended(role).load(Relaxed) != 0 && self.wait_ended(role).swap(0, AcqRel) != 0;
        is_ended.then_some(WaitOutcome::Nothing)
    }

    fn wait_ended(&self, role: WaiterRole) -> &AtomicU32 {
        &self.wait_ended[role as usize]
    }

    fn room_at(&self, local: &mut ParentState) -> usize {
        let left = |local: &ParentState| self.words.entries().saturating_sub(local.tail.saturating_sub(local.head));
        if left(local) < local.free.len() as u64 {
            slots::skip_revoked(&self.words);
            local.head = self.words.head().load(Acquire);
        }
        local.free.len().min(left(local) as usize)
    }

    fn with_local<R>(&self, work: impl FnOnce(&mut ParentState) -> R) -> R {
        work(&mut self.local.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Results whose marks were taken away. On drop, also in a panic of the caller's code, the slots of delivered results
/// are freed and the others are marked again.
struct DeliveryGuard<'a, W: QueueWords> {
    parent: &'a ParentProtocol<W>,
    collected: Vec<CollectedSlot>,
    delivered: usize,
}

impl<W: QueueWords> Drop for DeliveryGuard<'_, W> {
    fn drop(&mut self) {
        let words = &self.parent.words;
        for CollectedSlot { slot, state } in self.collected.drain(self.delivered..) {
            words.state(slot).store(state, Release);
            wakeups::mark(words, slot);
        }
        self.parent.with_local(|local| {
            local.free.extend(self.collected.iter().map(|collected| collected.slot as u32));
            self.collected.clear();
            local.collected = std::mem::take(&mut self.collected);
        });
    }
}

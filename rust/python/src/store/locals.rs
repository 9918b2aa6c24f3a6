//! The tensors that handles keep once they were made local.
//!
//! Invariant: a handle keeps its tensor for as long as this process has the shard, stored or fetched, and no longer,
//! however that is drained or removed.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use tundish_shm::PerProcess;
use tundish_store::Node;
use tundish_store::handles::Handle;

use super::node::elsewhere;

/// So few are looked after by who drains, and are gone when he is told so; more by a thread of the node's.
const FEW: usize = 1024;

/// All that were fetched in this process and may be there still.
static KNOWN: PerProcess<Mutex<Vec<Weak<Kept>>>> = PerProcess::new(Mutex::default);

/// Threads that let go of tensors at the moment.
static UNDER_WAY: PerProcess<AtomicUsize> = PerProcess::new(AtomicUsize::default);

/// How long one waits for the others at most: a class of somebody's may do anything when an object of it ends.
const PATIENCE: Duration = Duration::from_millis(100);

static LISTENING: Once = Once::new();

struct Kept {
    handle: Handle,
    tensor: Mutex<Option<Py<PyAny>>>,
}

/// What a handle keeps.
pub(super) enum Local {
    /// What it was made with.
    Given(Py<PyAny>),
    /// What it fetched.
    Fetched(Fetched),
}

/// A tensor that ends with its shard.
pub(super) struct Fetched(Arc<Kept>);

impl Local {
    /// KeptShards what was fetched of a shard, if that is here still.
    pub(super) fn fetched(handle: &Handle, tensor: Py<PyAny>) -> Self {
        LISTENING.call_once(|| Node::after_drains(forget_drained));
        let kept = Arc::new(Kept { handle: handle.clone(), tensor: Mutex::new(Some(tensor)) });
        {
            let mut known = known();
            if known.len() == known.capacity() {
                known.retain(|one| one.strong_count() > 0);
            }
            known.push(Arc::downgrade(&kept));
        }
        // It may have been drained before it was known.
        kept.look();
        Local::Fetched(Fetched(kept))
    }

    /// The same once more.
    pub(super) fn another(&self, py: Python<'_>) -> Self {
        match self {
            Local::Given(tensor) => Local::Given(tensor.clone_ref(py)),
            Local::Fetched(Fetched(kept)) => Local::Fetched(Fetched(Arc::clone(kept))),
        }
    }

    /// The tensor, if it is there still. To be called without a lock: what is forgotten is let go of.
    pub(super) fn tensor(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        match self {
            Local::Given(tensor) => Some(tensor.clone_ref(py)),
            Local::Fetched(Fetched(kept)) => {
                kept.look();
                kept.lock().as_ref().map(|tensor| tensor.clone_ref(py))
            }
        }
    }
}

impl Kept {
    fn lock(&self) -> MutexGuard<'_, Option<Py<PyAny>>> {
        self.tensor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the tensor where the shard is gone.
    fn look(&self) {
        if !self.is_alive() {
            let gone = self.lock().take();
            drop(gone);
        }
    }

    fn is_alive(&self) -> bool {
        let Handle { id, kind, rows } = &self.handle;
        let node = Node::of_process();
        node.has(&kind.owner, id, rows.as_deref()) || node.has(&elsewhere(&kind.owner, id), id, rows.as_deref())
    }
}

fn known() -> MutexGuard<'static, Vec<Weak<Kept>>> {
    KNOWN.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has handles forget the tensors of shards that were drained, where that takes no time to speak of: afterwards none of
/// them is in use.
pub(super) fn forget_few(py: Python<'_>) {
    if known().len() > FEW {
        return;
    }
    forget_drained();
    // The node's thread may be at some of them: torch gives up the GIL while it frees a tensor.
    let begin = Instant::now();
    while UNDER_WAY.get().load(Ordering::Acquire) > 0 && begin.elapsed() < PATIENCE {
        py.detach(|| thread::sleep(Duration::from_micros(20)));
    }
}

/// Has handles forget the tensors of shards that were drained.
fn forget_drained() {
    // Looked at without the lock, as are tensors let go of: the GIL may change hands meanwhile.
    let looked_at: Vec<Arc<Kept>> = known().iter().filter_map(Weak::upgrade).collect();
    let gone: Vec<_> = looked_at.iter().filter(|kept| !kept.is_alive()).cloned().collect();
    if !looked_at.is_empty() {
        let under_way = UNDER_WAY.get();
        under_way.fetch_add(1, Ordering::Relaxed);
        let tensors: Vec<_> = gone.iter().filter_map(|kept| kept.lock().take()).collect();
        // Where the interpreter is ending, PyO3 knows what to do with them.
        Python::try_attach(|_| drop((tensors, looked_at)));
        under_way.fetch_sub(1, Ordering::Release);
    }
    if !gone.is_empty() {
        let places: HashSet<_> = gone.iter().map(Arc::as_ptr).collect();
        known().retain(|one| !places.contains(&one.as_ptr()));
    }
}

//! The tensors that handles keep once they were made local.
//!
//! What always holds: a handle has its tensor for as long as this process has the shard, stored or fetched, and no longer,
//! by whatever way that is drained or removed.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, Weak};

use pyo3::prelude::*;
use tundish_shm::PerProcess;
use tundish_store::Node;
use tundish_store::handles::Handle;

use super::node::ELSEWHERE;

/// So few are looked after by who drains, and are gone when he is told so; more by a thread of the node's.
const FEW: usize = 1024;

/// All that were fetched in this process and may be there still.
static KNOWN: PerProcess<Mutex<Vec<Weak<Kept>>>> = PerProcess::new(Mutex::default);

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
    /// Keeps what was fetched of a shard, if that is here still.
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
        node.has(&kind.owner, id, rows.as_deref()) || node.has(&ELSEWHERE.into(), id, rows.as_deref())
    }
}

fn known() -> MutexGuard<'static, Vec<Weak<Kept>>> {
    KNOWN.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has handles forget the tensors of shards that were drained, where that takes no time to speak of.
pub(super) fn forget_few() {
    if known().len() <= FEW {
        forget_drained();
    }
}

/// Has handles forget the tensors of shards that were drained.
fn forget_drained() {
    // Looked at without the lock, and let go of without it: the GIL may change hands meanwhile.
    let looked_at: Vec<Arc<Kept>> = known().iter().filter_map(Weak::upgrade).collect();
    let gone: Vec<_> = looked_at.iter().filter(|kept| !kept.is_alive()).collect();
    if !gone.is_empty() {
        let places: HashSet<_> = gone.iter().map(|kept| Arc::as_ptr(kept)).collect();
        known().retain(|one| !places.contains(&one.as_ptr()));
    }
    let tensors: Vec<_> = gone.iter().filter_map(|kept| kept.lock().take()).collect();
    if !looked_at.is_empty() {
        // Where the interpreter is ending, PyO3 knows what to do with them.
        Python::try_attach(|_| drop((tensors, looked_at)));
    }
}

//! One shard that is being fetched, and the threads that wait for it.
//!
//! Invariant: it is settled once, and every waiting thread learns the outcome.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::Step;
use crate::entries::sync::{Condvar, Mutex};
use crate::error::StoreError;
use crate::shard_id::{Rows, ShardId};

/// The outcome of a fetch for the threads that wait for it.
#[derive(Clone, Debug)]
pub(crate) enum Outcome<P> {
    /// It arrived, with these rows.
    Arrived(P, Option<Rows>),
    /// It failed, and would fail for all.
    Failed(StoreError),
    /// It failed for a reason that may be the fetcher's own: the others ask again.
    Again,
}

/// A fetch of a shard, or of some of its rows, by the first thread that asked for it.
#[derive(Debug)]
pub(crate) struct InFlight<P> {
    pub(crate) id: ShardId,
    pub(crate) owner: Arc<str>,
    pub(crate) rows: Option<Rows>,
    /// The step under which it began, and the token of that step's entries.
    pub(crate) step: Option<Step>,
    pub(crate) token: u64,
    outcome: Mutex<Option<Outcome<P>>>,
    finished: Condvar,
}

impl<P: Clone> InFlight<P> {
    pub(crate) fn new(id: ShardId, owner: Arc<str>, rows: Option<Rows>, step: Option<Step>, token: u64) -> Self {
        InFlight { id, owner, rows, step, token, outcome: Mutex::new(None), finished: Condvar::new() }
    }

    /// Sets the outcome, unless it is set, and wakes all waiting threads.
    pub(crate) fn finish(&self, outcome: Outcome<P>) {
        let mut current = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        if current.is_none() {
            *current = Some(outcome);
            self.finished.notify_all();
        }
    }

    /// Fails it, since it was drained.
    pub(crate) fn cancel(&self) {
        self.finish(Outcome::Failed(StoreError::Drained { id: self.id.clone() }));
    }

    /// The outcome; `None` if there is none after `longest`.
    pub(crate) fn wait(&self, longest: Duration) -> Option<Outcome<P>> {
        let mut current = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        if current.is_none() {
            current = self.finished.wait_timeout(current, longest).unwrap_or_else(PoisonError::into_inner).0;
        }
        current.clone()
    }
}

/// Whether rows `wanted` lie within rows `had`, where none means all.
pub(crate) fn covers(had: Option<&Rows>, wanted: Option<&Rows>) -> bool {
    match (had, wanted) {
        (None, _) => true,
        (Some(_), None) => false,
        (Some(had), Some(wanted)) => had.start <= wanted.start && wanted.end <= had.end,
    }
}

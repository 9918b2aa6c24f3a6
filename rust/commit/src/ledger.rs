//! What a folder knows about its files: which are unfinished, and the first failure.
//!
//! Shared by the folder and its files, which may be written from several threads. Invariant: a failure once noted is
//! never forgotten.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::CommitError;

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    unfinished: Vec<PathBuf>,
    failure: Option<Failure>,
}

#[derive(Debug)]
struct Failure {
    operation: &'static str,
    path: PathBuf,
    errno: i32,
}

impl Ledger {
    /// Refuses once anything failed.
    pub(crate) fn check(&self) -> Result<(), CommitError> {
        self.lock().check()
    }

    /// Refuses once anything failed, or while a file is unfinished.
    pub(crate) fn check_complete(&self) -> Result<(), CommitError> {
        let state = self.lock();
        state.check()?;
        match state.unfinished.first() {
            Some(path) => Err(CommitError::Unfinished { path: path.clone() }),
            None => Ok(()),
        }
    }

    pub(crate) fn begin(&self, path: &Path) {
        self.lock().unfinished.push(path.to_path_buf());
    }

    pub(crate) fn finish(&self, path: &Path) {
        self.lock().unfinished.retain(|unfinished| unfinished != path);
    }

    /// Passes an outcome through, noting a failed system call.
    pub(crate) fn note<T>(&self, outcome: Result<T, CommitError>) -> Result<T, CommitError> {
        if let Err(CommitError::Io { operation, path, source }) = &outcome {
            self.lock().failure.get_or_insert_with(|| Failure {
                operation,
                path: path.clone(),
                errno: source.raw_os_error().unwrap_or(rustix::io::Errno::IO.raw_os_error()),
            });
        }
        outcome
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn check(&self) -> Result<(), CommitError> {
        match &self.failure {
            Some(failure) => Err(CommitError::Poisoned {
                operation: failure.operation,
                path: failure.path.clone(),
                source: io::Error::from_raw_os_error(failure.errno),
            }),
            None => Ok(()),
        }
    }
}

//! The status of a folder's files: which of them are unfinished, and the first failure.
//!
//! The folder and its files share it; several threads may write. Invariant: a recorded failure is never forgotten.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::CommitError;

#[derive(Debug, Default)]
pub(crate) struct WriteStatus {
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

impl WriteStatus {
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

    /// Returns an outcome unchanged; records a failed system call.
    pub(crate) fn record<T>(&self, outcome: Result<T, CommitError>) -> Result<T, CommitError> {
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

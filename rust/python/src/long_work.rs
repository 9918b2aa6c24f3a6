//! Runs long work for Python: every binding that may take over 50 µs enters through [`enter`].
//!
//! Invariant: the work runs without the GIL, and calls its [`SignalCheck`] at least every 30 ms. So Ctrl-C ends it
//! within 100 ms, and the caller's progress callback learns how far it is.

use std::time::{Duration, Instant};

use pyo3::marker::Ungil;
use pyo3::prelude::*;
use tundish_commit::CommitError;
use tundish_packing::{PackError, Progress};
use tundish_shm::ShmError;
use tundish_store::StoreError;

use crate::error::BindingError;

/// The time between two checks for signals.
const CHECK_INTERVAL: Duration = Duration::from_millis(30);

/// Checks for signals, and reports progress, while work runs.
pub(crate) struct SignalCheck {
    progress: Option<Py<PyAny>>,
    last: Instant,
    raised: Option<PyErr>,
}

impl SignalCheck {
    /// Check for signals now. Returns whether to go on.
    pub(crate) fn look(&mut self) -> bool {
        let checked = Python::attach(|py| py.check_signals());
        self.last = Instant::now();
        checked.map_err(|error| self.raised = Some(error)).is_ok()
    }
}

impl Progress for SignalCheck {
    fn tick(&mut self, phase: &'static str, done: u64, total: u64) -> Result<(), PackError> {
        if self.last.elapsed() < CHECK_INTERVAL {
            return Ok(());
        }
        let progress = &self.progress;
        let checked = Python::attach(|py| {
            py.check_signals()?;
            if let Some(callback) = progress {
                callback.call1(py, (phase, done, total))?;
            }
            Ok(())
        });
        self.last = Instant::now();
        checked.map_err(|error: PyErr| {
            self.raised = Some(error);
            PackError::Interrupted
        })
    }
}

/// Run `work` without the GIL. `progress(phase, done, total)` is called now and then, if there is one.
pub(crate) fn enter<T, F>(py: Python<'_>, progress: Option<Py<PyAny>>, work: F) -> PyResult<T>
where
    T: Ungil + Send,
    F: Ungil + Send + FnOnce(&mut SignalCheck) -> Result<T, BindingError>,
{
    let mut signals = SignalCheck { progress, last: Instant::now(), raised: None };
    let result = py.detach(|| work(&mut signals));
    match (result, signals.raised) {
        (Err(BindingError::Pack(PackError::Interrupted)), Some(raised)) => Err(raised),
        (Err(BindingError::Commit(CommitError::Interrupted { .. })), Some(raised)) => Err(raised),
        (Err(BindingError::Shm(ShmError::Interrupted)), Some(raised)) => Err(raised),
        (Err(BindingError::Store(StoreError::Interrupted)), Some(raised)) => Err(raised),
        (result, _) => result.map_err(PyErr::from),
    }
}

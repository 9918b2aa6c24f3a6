//! Binds the shared votes of `tundish-shm`.
//!
//! Invariant: a wait releases the GIL and ends after the time given, so that its caller can handle signals.

use std::time::Duration;

use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use tundish_shm::votes::{self, MemoryAddress, RoundState};

use crate::error::BindingError;

/// Shared memory in which processes of one node vote.
///
/// `SharedVotes(members)` creates it, `SharedVotes.open(address, members)` maps it in another process. The state of a
/// round is True if it succeeded, False if it is to be decided in another way, None while it is open.
#[pyclass(frozen, module = "tundish._native")]
pub(crate) struct SharedVotes {
    inner: votes::SharedVotes,
    members: usize,
}

#[pymethods]
impl SharedVotes {
    #[new]
    fn new(members: usize) -> Result<Self, BindingError> {
        let inner = votes::SharedVotes::create(members)?;
        Ok(Self { inner, members })
    }

    /// Map the memory at the `address` of another process.
    #[staticmethod]
    fn open(address: MemoryAddress, members: usize) -> Result<Self, BindingError> {
        let inner = votes::SharedVotes::open(address, members)?;
        Ok(Self { inner, members })
    }

    /// Where others find it: process, descriptor, identity; None if it was opened here, or all have joined.
    #[getter]
    fn address(&self) -> Option<MemoryAddress> {
        self.inner.address()
    }

    /// Whether all members have joined.
    #[getter]
    fn have_all_joined(&self) -> bool {
        self.inner.have_all_joined()
    }

    /// Say that `member` will vote here; once.
    fn join(&self, member: usize) -> PyResult<()> {
        self.inner.join(self.checked(member)?);
        Ok(())
    }

    /// Cast a vote of 32 bytes in round `number`, once. The round succeeds if all votes are equal.
    fn cast(&self, member: usize, number: u64, vote: &[u8]) -> PyResult<Option<bool>> {
        let member = self.checked(member)?;
        let parts = vote.chunks_exact(8).map(|part| u64::from_ne_bytes(part.try_into().unwrap_or_default()));
        let parts: Vec<u64> = parts.collect();
        let vote = parts.try_into().map_err(|_| PyValueError::new_err("a vote has 32 bytes"))?;
        Ok(succeeded(self.inner.cast(member, number, vote)))
    }

    /// The state of a round in which this member voted, after waiting up to `seconds` for its end.
    fn wait(&self, py: Python<'_>, number: u64, seconds: f64) -> PyResult<Option<bool>> {
        let longest = Duration::try_from_secs_f64(seconds).map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(succeeded(py.detach(|| self.inner.wait(number, longest))))
    }

    /// Give a round up, unless it is decided. Returns whether it succeeded.
    fn give_up(&self, number: u64) -> bool {
        succeeded(self.inner.give_up(number)) == Some(true)
    }
}

impl SharedVotes {
    fn checked(&self, member: usize) -> PyResult<usize> {
        if member < self.members {
            return Ok(member);
        }
        Err(PyIndexError::new_err(format!("there are {} members, and none of number {member}", self.members)))
    }
}

fn succeeded(state: RoundState) -> Option<bool> {
    match state {
        RoundState::Open => None,
        RoundState::Succeeded => Some(true),
        RoundState::Deferred => Some(false),
    }
}

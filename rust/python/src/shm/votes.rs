//! Binds the shared votes of `tundish-shm`.
//!
//! What always holds: anyone who waits does so without the GIL; every call is over by itself after the time that it is given,
//! so that its caller hears of signals between two of them.

use std::time::Duration;

use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use tundish_shm::votes::{self, BoxAddress, Standing};

use crate::error::BindingError;

/// Where processes of one node agree in some microseconds, as long as all is well.
///
/// `SharedVotes(members)` makes one, `SharedVotes.open(address, members)` is another member's. Whatever says how a round
/// stands says True where it went well, False where it is to be decided elsewhere, None as long as it is open.
#[pyclass(frozen, module = "tundish._native")]
pub(crate) struct SharedVotes {
    inner: votes::SharedVotes,
    members: usize,
}

#[pymethods]
impl SharedVotes {
    #[new]
    fn new(members: usize) -> PyResult<Self> {
        let inner = votes::SharedVotes::create(members).map_err(BindingError::from)?;
        Ok(Self { inner, members })
    }

    /// The box at another one's `address`.
    #[staticmethod]
    fn open(address: BoxAddress, members: usize) -> PyResult<Self> {
        let inner = votes::SharedVotes::open(address, members).map_err(BindingError::from)?;
        Ok(Self { inner, members })
    }

    /// Where others find it: process, descriptor, identity; None of one that was opened, or that all have found.
    #[getter]
    fn address(&self) -> Option<BoxAddress> {
        self.inner.address()
    }

    /// Whether all members have joined.
    #[getter]
    fn are_all_there(&self) -> bool {
        self.inner.are_all_there()
    }

    /// Say that `member` will use it; once.
    fn join(&self, member: usize) -> PyResult<()> {
        self.inner.join(self.checked(member)?);
        Ok(())
    }

    /// Cast the 32 bytes of a shared vote in round `number`, once: the round goes well where those of all are equal.
    fn cast(&self, member: usize, number: u64, shared_vote: &[u8]) -> PyResult<Option<bool>> {
        let member = self.checked(member)?;
        let parts = shared_vote.chunks_exact(8).map(|part| u64::from_ne_bytes(part.try_into().unwrap_or_default()));
        let parts: Vec<u64> = parts.collect();
        let shared_vote = parts.try_into().map_err(|_| PyValueError::new_err("a shared_vote has 32 bytes"))?;
        Ok(is_well(self.inner.cast(member, number, shared_vote)))
    }

    /// How a round stands in which this member cast its shared vote; waits up to `seconds` for it to be decided.
    fn wait(&self, py: Python<'_>, number: u64, seconds: f64) -> PyResult<Option<bool>> {
        let longest = Duration::try_from_secs_f64(seconds).map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(is_well(py.detach(|| self.inner.wait(number, longest))))
    }

    /// Have a round be decided elsewhere, unless it was decided here: then how.
    fn give_up(&self, number: u64) -> bool {
        is_well(self.inner.give_up(number)) == Some(true)
    }
}

impl SharedVotes {
    fn checked(&self, member: usize) -> PyResult<usize> {
        if member < self.members {
            return Ok(member);
        }
        Err(PyIndexError::new_err(format!("a box of {} members has none of number {member}", self.members)))
    }
}

fn is_well(standing: Standing) -> Option<bool> {
    match standing {
        Standing::Open => None,
        Standing::Well => Some(true),
        Standing::Elsewhere => Some(false),
    }
}

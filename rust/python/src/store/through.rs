//! Fetches through a Python function instead of HTTP.
//!
//! Invariant: an exception of the function is raised by the call that passed it. Other threads that wait for the same
//! bytes get a `TransferError` if it is about these bytes; else they call their own function, since the handle may be
//! what is wrong.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::PyList;
use tundish_store::{Meta, Receiver, Selection, StoreError, TimeLimit, Transport, Wanted};

use crate::error::BindingError;

/// Gets bytes by calling a function.
pub(super) struct Through {
    get: Py<PyAny>,
    /// Of what is wanted of each owner, where it is in the caller's list, and what it is.
    places: HashMap<(Arc<str>, Selection), (usize, Meta)>,
    raised: Mutex<Option<PyErr>>,
}

impl Through {
    pub(super) fn new(get: Py<PyAny>, wanted: &[Wanted]) -> Self {
        let selection = |one: &Wanted| Selection { id: one.id.clone(), rows: one.rows.clone() };
        let places = wanted.iter().enumerate().map(|(place, one)| {
            let owner = Arc::clone(&one.owner);
            ((owner, selection(one)), (place, one.meta.clone()))
        });
        Through { get, places: places.collect(), raised: Mutex::new(None) }
    }

    /// What the function raised.
    pub(super) fn raised(&self) -> Option<PyErr> {
        self.raised.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn call<'py>(&self, py: Python<'py>, wanted: &[&(usize, Meta)]) -> PyResult<Vec<PyBuffer<u8>>> {
        let places: Vec<usize> = wanted.iter().map(|(place, _)| *place).collect();
        let found = self.get.bind(py).call1((PyList::new(py, places)?,))?;
        let found = found.try_iter()?.map(|one| PyBuffer::get(&one?)).collect::<PyResult<Vec<_>>>()?;
        if found.len() != wanted.len() {
            let (came, asked) = (found.len(), wanted.len());
            return Err(BindingError::Value(format!("{came} buffers came for {asked} shards")).into());
        }
        Ok(found)
    }
}

impl Transport for Through {
    fn fetch(
        &self,
        owner: &Arc<str>,
        wanted: &[Selection],
        receiver: &mut dyn Receiver,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(), StoreError> {
        let places: Vec<_> = wanted.iter().map(|one| &self.places[&(Arc::clone(owner), one.clone())]).collect();
        let found = Python::attach(|py| {
            self.call(py, &places).map_err(|error| {
                let reason = error.value(py).to_string();
                let is_of_bytes = is_transfer_error(py, &error);
                *self.raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                let id = wanted[0].id.clone();
                match is_of_bytes {
                    true => StoreError::Unreachable { id, owner: Arc::clone(owner), reason },
                    false => StoreError::Interrupted,
                }
            })
        })?;
        for (index, ((selection, (_, declared)), buffer)) in wanted.iter().zip(places).zip(found).enumerate() {
            let space = receiver.space(index, declared, time_limit)?;
            let fits =
                Python::attach(|py| buffer.item_count() == space.len() && buffer.copy_to_slice(py, space).is_ok());
            if !fits {
                return Err(StoreError::Corrupt {
                    id: selection.id.clone(),
                    owner: Arc::clone(owner),
                    reason: "it has another length than its handle declares".to_owned(),
                });
            }
            receiver.complete(index)?;
        }
        Ok(())
    }
}

fn is_transfer_error(py: Python<'_>, error: &PyErr) -> bool {
    let class = py.import("tundish.errors").and_then(|errors| errors.getattr("TransferError"));
    class.is_ok_and(|class| error.is_instance(py, &class))
}

//! `ShardStore`: stores, fetches, claims and drains shards.
//!
//! Invariants: bytes are copied, waited for and freed without the GIL. The caller keeps tensors alive whose memory is
//! read or written, until the call returns.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};
use tundish_packing::Progress;
use tundish_store::{
    Limits, Number, Removed, Selection, ShardId, ShardRows, Step, StoreError, TensorMeta, TensorStore, TensorToStore,
    TimeLimit, Value, Wanted,
};

use super::dtypes::meta_of;
use super::handle::{RTensor, ShardHandle, SharedFields, name_of};
use super::http::transport;
use super::shard_view::ShardView;
use crate::error::BindingError;
use crate::long_work::{SignalCheck, enter};

/// A tensor's memory, to be read or written while the GIL is released.
#[derive(Clone, Copy)]
struct TensorAddress(*mut u8);

// SAFETY: only an address; its users answer for the memory there.
unsafe impl Send for TensorAddress {}
// SAFETY: as above.
unsafe impl Sync for TensorAddress {}

/// The shards that one store owns, and those that it fetched.
#[pyclass(frozen)]
pub(crate) struct ShardStore {
    pub(super) store: Arc<TensorStore>,
}

#[pymethods]
impl ShardStore {
    #[new]
    fn new() -> Self {
        ShardStore { store: TensorStore::new(Limits::default()) }
    }

    /// Releases what a child made by `fork` inherited of it. The child must not use it otherwise.
    fn forget_inherited(&self) {
        self.store.forget_inherited();
    }

    /// Limits the memory of stored and of fetched shards, in bytes.
    fn set_limits(&self, py: Python<'_>, storage_bytes: u64, buffer_bytes: u64) {
        py.detach(|| self.store.set_limits(Limits { storage_bytes, buffer_bytes }));
    }

    /// Declares `owner` an address of this process: its handles are not fetched.
    fn add_own_address(&self, owner: &str) {
        self.store.add_own_address(owner.into());
    }

    /// Stores copies of dense tensors in host memory, all or none. Returns their handles.
    fn put<'py>(
        &self,
        py: Python<'py>,
        tensors: &Bound<'py, PyList>,
        owner: &str,
        timeout: f64,
    ) -> PyResult<Bound<'py, PyList>> {
        let deadline = deadline_of(timeout)?;
        let owner: Arc<str> = owner.into();
        let mut shared: Vec<Arc<SharedFields>> = Vec::with_capacity(tensors.len());
        let mut places = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let meta = meta_of(&tensor)?;
            places.push(address_of(&tensor)?);
            // Equal fields are held once.
            let before = shared.last().filter(|shared| *shared.meta == meta).map(Arc::clone);
            let make = || Arc::new(SharedFields { owner: Arc::clone(&owner), meta: Arc::new(meta) });
            shared.push(before.unwrap_or_else(make));
        }
        let given = &shared;
        let ids = enter(py, None, move |signals| {
            let sources: Vec<TensorToStore<'_>> = given
                .iter()
                .zip(&places)
                // SAFETY: the caller holds the tensors until this returns, and they are dense.
                .map(|(shared, place)| unsafe { TensorToStore::from_raw(TensorMeta::clone(&shared.meta), place.0) })
                .collect();
            Ok(self.store.put(&sources, &mut TimeLimit::new(deadline, &mut || check_signals(signals)))?)
        })?;
        let handles = ids
            .into_iter()
            .zip(shared)
            .map(|(id, shared)| RTensor::new(ShardHandle { id, shared, rows: Selection::All }));
        PyList::new(py, handles.collect::<Vec<_>>())
    }

    /// Stores a copy of a dense tensor in host memory under a name. Returns its handle.
    fn put_as(
        &self,
        py: Python<'_>,
        shard_id: &Bound<'_, PyString>,
        tensor: &Bound<'_, PyAny>,
        owner: &str,
        timeout: f64,
    ) -> PyResult<RTensor> {
        let deadline = deadline_of(timeout)?;
        let id = name_of(shard_id)?;
        let meta = Arc::new(meta_of(tensor)?);
        let place = address_of(tensor)?;
        let (name, named) = (id.clone(), TensorMeta::clone(&meta));
        enter(py, None, move |signals| {
            let place = place;
            // SAFETY: the caller holds the tensor until this returns, and it is dense.
            let source = unsafe { TensorToStore::from_raw(named, place.0) };
            let mut check_cancelled = || check_signals(signals);
            Ok(self.store.put_as(&name, source, &mut TimeLimit::new(deadline, &mut check_cancelled))?)
        })?;
        let shared = Arc::new(SharedFields { owner: owner.into(), meta });
        Ok(RTensor::new(ShardHandle { id, shared, rows: Selection::All }))
    }

    /// The handle of a shard that is stored here.
    fn handle_of(&self, py: Python<'_>, shard_id: &Bound<'_, PyString>, owner: &str) -> PyResult<RTensor> {
        let id = name_of(shard_id)?;
        let wanted = [ShardRows { id: id.clone(), rows: Selection::All }];
        let found = enter(py, None, move |_| Ok(self.store.look_up(&wanted)?))?;
        let meta = found.first().map(|one| one.meta().clone());
        let meta = meta.ok_or_else(|| BindingError::Value(format!("no shard {id} was found")))?;
        let shared = Arc::new(SharedFields { owner: owner.into(), meta: Arc::new(meta) });
        Ok(RTensor::new(ShardHandle { id, shared, rows: Selection::All }))
    }

    /// The shards of the handles, in order. Each is fetched once; from owners on this node through shared memory, if
    /// `shared_memory`.
    fn fetch<'py>(
        &self,
        py: Python<'py>,
        handles: &Bound<'py, PyList>,
        timeout: f64,
        shared_memory: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let wanted = wanted_of(handles)?;
        let deadline = deadline_of(timeout)?;
        let views = enter(py, None, move |signals| {
            let client = transport(shared_memory);
            Ok(self.store.fetch(&wanted, client, &mut TimeLimit::new(deadline, &mut || check_signals(signals)))?)
        })?;
        let views = views.into_iter().map(|view| Bound::new(py, ShardView::new(view))).collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, views)
    }

    /// Removes shards. Returns their count, the count of their tensors, and their bytes.
    fn remove(&self, py: Python<'_>, shard_ids: &Bound<'_, PyAny>) -> PyResult<(u64, u64, u64)> {
        let ids = ids_of(shard_ids)?;
        Ok(as_tuple(py.detach(|| self.store.remove(&ids))))
    }

    /// Removes all stored and fetched shards. Returns the counts of the storage, as `remove`.
    fn clear(&self, py: Python<'_>) -> (u64, u64, u64) {
        as_tuple(py.detach(|| self.store.clear_all()))
    }

    /// The names of these that have no shard here.
    fn absent(&self, py: Python<'_>, shard_ids: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
        let wanted: Vec<_> = ids_of(shard_ids)?.into_iter().map(|id| ShardRows { id, rows: Selection::All }).collect();
        match py.detach(|| self.store.look_up(&wanted).map(drop)) {
            Ok(()) => Ok(Vec::new()),
            Err(StoreError::Missing { shards, .. }) => Ok(shards.iter().map(|shard| shard.id.to_string()).collect()),
            Err(error) => Err(BindingError::from(error).into()),
        }
    }

    /// Drops the fetched entries of these shards, or all. Returns their number.
    #[pyo3(signature = (shard_ids=None))]
    fn clear_buffer(&self, py: Python<'_>, shard_ids: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        let ids = shard_ids.map(ids_of).transpose()?;
        Ok(py.detach(|| self.store.clear_buffer(ids.as_deref())))
    }

    /// Begins a step: later fetches belong to it. Messages show its `number`, or its id without one.
    #[pyo3(signature = (step_id, claimant, number=None))]
    fn begin_step(&self, py: Python<'_>, step_id: u64, claimant: u64, number: Option<u64>) -> PyResult<()> {
        let step = Step { id: step_id, number };
        enter(py, None, move |_| Ok(self.store.begin_step(step, claimant)?))
    }

    /// Claims shards for a step. Returns their bytes, the missing ones, and those of other steps.
    #[pyo3(signature = (step_id, claimant, shard_ids, number=None))]
    fn claim(
        &self,
        py: Python<'_>,
        step_id: u64,
        claimant: u64,
        shard_ids: &Bound<'_, PyAny>,
        number: Option<u64>,
    ) -> PyResult<(u64, Vec<String>, Vec<String>)> {
        let ids = ids_of(shard_ids)?;
        let step = Step { id: step_id, number };
        let claimed = enter(py, None, move |_| Ok(self.store.claim(step, claimant, &ids)?))?;
        let names = |ids: &[ShardId]| ids.iter().map(ShardId::to_string).collect();
        Ok((claimed.total_bytes, names(&claimed.missing), names(&claimed.taken)))
    }

    /// Ends the claims of a claimant: unclaims its shards, and drops the entries that were fetched in its steps.
    fn release_claimant(&self, py: Python<'_>, claimant: u64) {
        py.detach(|| self.store.release_claimant(claimant));
    }

    /// Ends a step: drops its claimed shards and fetched entries. Returns its counts as JSON.
    #[pyo3(signature = (step_id, number=None))]
    fn end_step(&self, py: Python<'_>, step_id: u64, number: Option<u64>) -> PyResult<String> {
        as_json(&py.detach(|| self.store.end_step(Step { id: step_id, number })))
    }

    /// Keeps shards and fetched entries beyond their step. Returns their number.
    fn keep(&self, py: Python<'_>, shard_ids: &Bound<'_, PyAny>) -> PyResult<u64> {
        let ids = ids_of(shard_ids)?;
        let kept = py.detach(|| self.store.keep(&ids));
        Ok(kept.shards + kept.entries)
    }

    /// All counts by name, flat, with their units in the names.
    fn numbers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let numbers = PyDict::new(py);
        for Number { name, value, .. } in py.detach(|| self.store.stats()).numbers() {
            match value {
                Value::Gauge(value) | Value::Counter(value) => numbers.set_item(name, value)?,
                Value::Seconds(value) => numbers.set_item(name, value)?,
            }
        }
        Ok(numbers)
    }

    /// All counts, in JSON.
    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        as_json(&py.detach(|| self.store.stats()))
    }
}

/// The ids of the shards of handles, each once, in their order.
#[pyfunction]
pub(crate) fn shard_ids<'py>(handles: &Bound<'py, PyList>) -> PyResult<Bound<'py, PyList>> {
    let mut seen = std::collections::HashSet::new();
    let found = PyList::empty(handles.py());
    for handle in handles {
        let handle = handle.cast_into::<RTensor>()?;
        if seen.insert(handle.get().id().clone()) {
            found.append(handle.get().id().to_string())?;
        }
    }
    Ok(found)
}

/// Checks for signals during waits and copies.
pub(super) fn check_signals(signals: &mut SignalCheck) -> Result<(), StoreError> {
    signals.tick("store", 0, 0).map_err(|_| StoreError::Interrupted)
}

pub(super) fn deadline_of(timeout: f64) -> PyResult<Instant> {
    // A century can be added to any instant. `min` would turn NaN into it, and NaN is refused.
    let longest = if timeout.is_nan() { timeout } else { timeout.min(3.2e9) };
    let seconds = Duration::try_from_secs_f64(longest);
    let seconds = seconds.map_err(|_| BindingError::Value(format!("timeout is {timeout}, not seconds to wait")))?;
    Ok(Instant::now() + seconds)
}

/// Ids that are read at once with the GIL held: a fraction of a millisecond.
const AT_ONCE: usize = 4096;

/// The pause in which other threads can take the GIL.
const BREATH: Duration = Duration::from_micros(50);

/// The ids in any iterable of strings, but not in a string, which would be read as its letters.
pub(super) fn ids_of(shard_ids: &Bound<'_, PyAny>) -> PyResult<Vec<ShardId>> {
    if shard_ids.is_instance_of::<PyString>() {
        let reason = "shard_ids is a list of texts, not a text: put it into a list".to_owned();
        return Err(BindingError::Type(reason).into());
    }
    let mut ids = Vec::new();
    for id in shard_ids.try_iter()? {
        if ids.len() % AT_ONCE == AT_ONCE - 1 {
            // A waiting thread takes the GIL if it is still free when the thread wakes up.
            shard_ids.py().detach(|| sleep(BREATH));
        }
        ids.push(id_of(&id?)?);
    }
    Ok(ids)
}

fn id_of(id: &Bound<'_, PyAny>) -> Result<ShardId, BindingError> {
    let Ok(text) = id.cast::<PyString>() else {
        let kind = id.get_type().name()?;
        return Err(BindingError::Type(format!("a shard id is a text, not a {kind}")));
    };
    name_of(text)
}

fn wanted_of(handles: &Bound<'_, PyList>) -> PyResult<Vec<Wanted>> {
    handles.iter().map(|handle| handle.cast::<RTensor>()?.get().wanted()).collect()
}

fn address_of(tensor: &Bound<'_, PyAny>) -> PyResult<TensorAddress> {
    Ok(TensorAddress(std::ptr::with_exposed_provenance_mut(
        tensor.call_method0(intern!(tensor.py(), "data_ptr"))?.extract()?,
    )))
}

fn as_tuple(removed: Removed) -> (u64, u64, u64) {
    (removed.cleared_count, removed.num_tensors, removed.total_bytes)
}

fn as_json<T: serde::Serialize>(value: &T) -> PyResult<String> {
    serde_json::to_string(value).map_err(|error| BindingError::Value(format!("cannot be told: {error}")).into())
}

//! The store of this process: shards that it holds for others, and shards that it fetched.
//!
//! Invariants: bytes are copied, waited for and freed without the GIL. The caller keeps tensors alive whose memory is
//! read or written, until the call returns.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString};
use tundish_packing::Progress;
use tundish_store::handles::{Handle, Kind};
use tundish_store::{
    Checksum, Limits, Meta, Node, Removed, Selection, Service, ShardId, Source, StoreError, TimeLimit, Wanted,
};

use super::collector::untracked;
use super::dtypes::meta_of;
use super::handle::{RTensor, name_of};
use super::locals::forget_few;
use super::through::Through;
use super::view::ShardView;
use super::wire::transport;
use crate::enter::{Door, enter};
use crate::error::BindingError;

/// The owner of what another store holds of `owner`'s: no process serves there, and it is not this one. Names that nodes
/// give are of one shard each, and have the same, so that they are fetched together; others may be given by several.
pub(super) fn elsewhere(owner: &str, id: &ShardId) -> Arc<str> {
    match id.as_numbered() {
        Some(_) => "elsewhere".into(),
        None => format!("elsewhere, of {owner}").into(),
    }
}

/// A tensor's memory, to be read or written while the GIL is released.
#[derive(Clone, Copy)]
struct Address(*mut u8);

// SAFETY: only an address; who uses it answers for what is there.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

/// The store of this process: what it holds for others as an owner, and what it fetched as a consumer.
#[pyclass(frozen)]
pub(crate) struct ShardStore;

#[pymethods]
impl ShardStore {
    #[new]
    fn new() -> Self {
        ShardStore
    }

    /// The most bytes of each side, from here on.
    #[staticmethod]
    fn set_limits(py: Python<'_>, storage_bytes: u64, buffer_bytes: u64) {
        py.detach(|| Node::of_process().set_limits(Limits { storage_bytes, buffer_bytes }));
    }

    /// Handles that name `owner` are this process's own.
    #[staticmethod]
    fn announce(owner: &str) {
        Node::of_process().announce(owner.into());
    }

    /// Stores copies of dense tensors in host memory, all or none: their handles.
    #[staticmethod]
    fn put<'py>(
        py: Python<'py>,
        tensors: &Bound<'py, PyList>,
        owner: &str,
        timeout: f64,
    ) -> PyResult<Bound<'py, PyList>> {
        let deadline = deadline_of(timeout)?;
        let owner: Arc<str> = owner.into();
        let mut kinds: Vec<Arc<Kind>> = Vec::with_capacity(tensors.len());
        let mut places = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            let meta = meta_of(&tensor)?;
            places.push(address_of(&tensor)?);
            // What many have in common is held once.
            let before = kinds.last().filter(|kind| *kind.meta == meta).map(Arc::clone);
            let make = || Arc::new(Kind { owner: Arc::clone(&owner), meta: Arc::new(meta) });
            kinds.push(before.unwrap_or_else(make));
        }
        let given = &kinds;
        let ids = enter(py, None, move |door| {
            let sources: Vec<Source<'_>> = given
                .iter()
                .zip(&places)
                // SAFETY: the caller holds the tensors until this returns, and they are dense.
                .map(|(kind, place)| unsafe { Source::from_raw(Meta::clone(&kind.meta), place.0) })
                .collect();
            Ok(Node::of_process().put(&sources, &mut TimeLimit::new(deadline, &mut || look(door)))?)
        })?;
        let handles = ids.into_iter().zip(kinds).map(|(id, kind)| RTensor::new(Handle { id, kind, rows: None }));
        let made = handles.map(|handle| untracked(py, handle)).collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, made)
    }

    /// Stores a copy of a dense tensor in host memory under a name: its handle.
    #[staticmethod]
    fn put_as(
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
        let (name, kind) = (id.clone(), Arc::clone(&meta));
        enter(py, None, move |door| {
            let place = place;
            let mut go_on = || look(door);
            let mut time_limit = TimeLimit::new(deadline, &mut go_on);
            let mut incoming = loop {
                match Node::of_process().receive(name.clone(), Meta::clone(&kind)) {
                    Err(StoreError::Full { .. }) if !time_limit.is_over() => {
                        std::thread::sleep(time_limit.turn());
                        time_limit.look()?;
                    }
                    outcome => break outcome?,
                }
            };
            let space = incoming.space();
            // SAFETY: the caller holds the tensor, which is dense and as long as the space.
            unsafe { place.0.copy_to_nonoverlapping(space.as_mut_ptr(), space.len()) };
            let checksum = Checksum::of(incoming.space());
            Ok(incoming.commit(checksum)?)
        })?;
        let kind = Arc::new(Kind { owner: owner.into(), meta });
        Ok(RTensor::new(Handle { id, kind, rows: None }))
    }

    /// The handle of a shard that is stored here.
    #[staticmethod]
    fn handle_of(py: Python<'_>, shard_id: &Bound<'_, PyString>, owner: &str) -> PyResult<RTensor> {
        let id = name_of(shard_id)?;
        let wanted = [Selection { id: id.clone(), rows: None }];
        let found = enter(py, None, move |_| Ok(Node::of_process().look_up(&wanted)?))?;
        let meta = found.first().map(|one| one.meta().clone());
        let meta = meta.ok_or_else(|| BindingError::Value(format!("no shard {id} was found")))?;
        let kind = Arc::new(Kind { owner: owner.into(), meta: Arc::new(meta) });
        Ok(RTensor::new(Handle { id, kind, rows: None }))
    }

    /// What the handles lead to, in order, each shard fetched once however often it is wanted; of owners on this node
    /// through shared memory, where that is wanted.
    #[staticmethod]
    fn fetch<'py>(
        py: Python<'py>,
        handles: &Bound<'py, PyList>,
        timeout: f64,
        shared_memory: bool,
    ) -> PyResult<Bound<'py, PyList>> {
        let wanted = wanted_of(handles)?;
        let deadline = deadline_of(timeout)?;
        let views = enter(py, None, move |door| {
            let node = Node::of_process();
            let client = transport(shared_memory);
            Ok(node.fetch(&wanted, client, &mut TimeLimit::new(deadline, &mut || look(door)))?)
        })?;
        let views = views.into_iter().map(|view| Bound::new(py, ShardView::new(view))).collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, views)
    }

    /// As `fetch`, where the bytes come from `get(places)`: of a list of places in `handles`, a list of buffers. Of
    /// handles of different owners it may be called by several threads at once.
    #[staticmethod]
    fn fetch_through<'py>(
        py: Python<'py>,
        handles: &Bound<'py, PyList>,
        get: Py<PyAny>,
        timeout: f64,
    ) -> PyResult<Bound<'py, PyList>> {
        let mut wanted = wanted_of(handles)?;
        wanted.iter_mut().for_each(|one| one.owner = elsewhere(&one.owner, &one.id));
        let deadline = deadline_of(timeout)?;
        let through = Through::new(get, &wanted);
        let views = enter(py, None, |door| {
            let node = Node::of_process();
            Ok(node.fetch(&wanted, &through, &mut TimeLimit::new(deadline, &mut || look(door)))?)
        });
        if let Some(raised) = through.raised() {
            return Err(raised);
        }
        let views =
            views?.into_iter().map(|view| Bound::new(py, ShardView::new(view))).collect::<PyResult<Vec<_>>>()?;
        PyList::new(py, views)
    }

    /// As `fetch`, into dense tensors in host memory of the same dtypes and shapes; nothing is kept.
    #[staticmethod]
    fn fetch_into(
        py: Python<'_>,
        handles: &Bound<'_, PyList>,
        targets: &Bound<'_, PyList>,
        timeout: f64,
        shared_memory: bool,
    ) -> PyResult<()> {
        let wanted = wanted_of(handles)?;
        let deadline = deadline_of(timeout)?;
        let mut places = Vec::with_capacity(wanted.len());
        for (number, target) in targets.iter().enumerate() {
            let meta = meta_of(&target)?;
            let declared = wanted.get(number).map(|one| &one.meta);
            if declared != Some(&meta) {
                let reason = format!("out[{number}] is a {meta:?}, and what is fetched into it a {declared:?}");
                return Err(BindingError::Value(reason).into());
            }
            places.push((address_of(&target)?, usize::try_from(meta.nbytes())?));
        }
        if places.len() != wanted.len() {
            let (spaces, asked) = (places.len(), wanted.len());
            return Err(BindingError::Value(format!("{asked} tensors are fetched into {spaces}")).into());
        }
        enter(py, None, move |door| {
            let mut spaces: Vec<&mut [u8]> = places
                .iter()
                .map(|(place, length)| match length {
                    0 => &mut [][..],
                    // SAFETY: the caller holds the tensors, which are dense, and lets nobody else have them meanwhile.
                    length => unsafe { std::slice::from_raw_parts_mut(place.0, *length) },
                })
                .collect();
            let node = Node::of_process();
            let client = transport(shared_memory);
            Ok(node.fetch_into(&wanted, &mut spaces, client, &mut TimeLimit::new(deadline, &mut || look(door)))?)
        })
    }

    /// Shards that were found and removed here, the tensors that they held, and their bytes.
    #[staticmethod]
    fn remove(py: Python<'_>, shard_ids: &Bound<'_, PyAny>) -> PyResult<(u64, u64, u64)> {
        let ids = ids_of(shard_ids)?;
        let removed = py.detach(|| Node::of_process().remove(&ids));
        forget_few(py);
        Ok(as_tuple(removed))
    }

    /// Removes all that is here, on both sides: what the storage held, as of `remove`.
    #[staticmethod]
    fn clear(py: Python<'_>) -> (u64, u64, u64) {
        let removed = py.detach(|| Node::of_process().clear_node());
        forget_few(py);
        as_tuple(removed)
    }

    /// Those of these names that nothing is stored under here.
    #[staticmethod]
    fn absent(py: Python<'_>, shard_ids: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
        let wanted: Vec<_> = ids_of(shard_ids)?.into_iter().map(|id| Selection { id, rows: None }).collect();
        match py.detach(|| Node::of_process().look_up(&wanted).map(drop)) {
            Ok(()) => Ok(Vec::new()),
            Err(StoreError::Missing { shards, .. }) => Ok(shards.iter().map(|shard| shard.id.to_string()).collect()),
            Err(error) => Err(BindingError::from(error).into()),
        }
    }

    /// Drops what was fetched of these shards, or all of it: how many entries.
    #[staticmethod]
    #[pyo3(signature = (shard_ids=None))]
    fn clear_buffer(py: Python<'_>, shard_ids: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        let ids = shard_ids.map(ids_of).transpose()?;
        let dropped = py.detach(|| Node::of_process().clear_buffer(ids.as_deref()));
        forget_few(py);
        Ok(dropped)
    }

    /// From here on what is fetched belongs to this step.
    #[staticmethod]
    fn begin_epoch(py: Python<'_>, epoch: u64, claimant: u64) -> PyResult<()> {
        enter(py, None, move |_| Ok(Node::of_process().begin_epoch(epoch, claimant)?))
    }

    /// Has these shards end with the step: their bytes, those that are not here, those that are another step's.
    #[staticmethod]
    fn claim(
        py: Python<'_>,
        epoch: u64,
        claimant: u64,
        shard_ids: &Bound<'_, PyAny>,
    ) -> PyResult<(u64, Vec<String>, Vec<String>)> {
        let ids = ids_of(shard_ids)?;
        let claimed = enter(py, None, move |_| Ok(Node::of_process().claim(epoch, claimant, &ids)?))?;
        let names = |ids: &[ShardId]| ids.iter().map(ShardId::to_string).collect();
        Ok((claimed.total_bytes, names(&claimed.missing), names(&claimed.taken)))
    }

    /// The claimant is gone: what it claimed is unclaimed again, what was fetched in its steps is dropped, and what it
    /// kept of others' steps ends with these.
    #[staticmethod]
    fn give_up(py: Python<'_>, claimant: u64) {
        py.detach(|| Node::of_process().give_up(claimant));
        forget_few(py);
    }

    /// Drops what the step claimed and fetched: its account, in JSON.
    #[staticmethod]
    fn end_epoch(py: Python<'_>, epoch: u64) -> PyResult<String> {
        let ledger = py.detach(|| Node::of_process().end_epoch(epoch));
        forget_few(py);
        as_json(&ledger)
    }

    /// Has these shards, stored or fetched here, outlive their step, of another claimant's as long as this one lives: how
    /// many entries that were.
    #[staticmethod]
    fn keep(py: Python<'_>, claimant: u64, shard_ids: &Bound<'_, PyAny>) -> PyResult<u64> {
        let ids = ids_of(shard_ids)?;
        let kept = py.detach(|| Node::of_process().keep(claimant, &ids));
        Ok(kept.shards + kept.entries)
    }

    /// The step that fetches belong to.
    #[staticmethod]
    fn current_epoch() -> Option<u64> {
        Node::of_process().current_epoch()
    }

    /// How all of it stands, in JSON.
    #[staticmethod]
    fn stats(py: Python<'_>) -> PyResult<String> {
        as_json(&py.detach(|| Node::of_process().stats()))
    }
}

/// The names of the handles' shards, each once, in the order in which they are met.
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

/// Looks for signals in the middle of waits and copies.
pub(super) fn look(door: &mut Door) -> Result<(), StoreError> {
    door.tick("store", 0, 0).map_err(|_| StoreError::Interrupted)
}

pub(super) fn deadline_of(timeout: f64) -> PyResult<Instant> {
    // A century is as good as for ever, and can be added to any instant; NaN, which `min` would make one, is refused.
    let longest = if timeout.is_nan() { timeout } else { timeout.min(3.2e9) };
    let seconds = Duration::try_from_secs_f64(longest);
    let seconds = seconds.map_err(|_| BindingError::Value(format!("timeout is {timeout}, not seconds to wait")))?;
    Ok(Instant::now() + seconds)
}

/// Ids that are read with the GIL held, at most: a fraction of a millisecond.
const AT_ONCE: usize = 4096;

/// For how long other threads can have it then.
const BREATH: Duration = Duration::from_micros(50);

/// `shard_ids`: any iterable of texts; a lone text would be taken for its letters.
pub(super) fn ids_of(shard_ids: &Bound<'_, PyAny>) -> PyResult<Vec<ShardId>> {
    if shard_ids.is_instance_of::<PyString>() {
        let reason = "shard_ids is a list of texts, not a text: put it into a list".to_owned();
        return Err(BindingError::Type(reason).into());
    }
    let mut ids = Vec::new();
    for id in shard_ids.try_iter()? {
        if ids.len() % AT_ONCE == AT_ONCE - 1 {
            // Who waits for the GIL takes it when it is let go of and stays so until he is awake.
            shard_ids.py().detach(|| sleep(BREATH));
        }
        ids.push(id_of(&id?)?);
    }
    Ok(ids)
}

fn id_of(id: &Bound<'_, PyAny>) -> PyResult<ShardId> {
    let Ok(text) = id.cast::<PyString>() else {
        let kind = id.get_type().name()?;
        return Err(BindingError::Type(format!("a shard id is a text, not a {kind}")).into());
    };
    name_of(text)
}

fn wanted_of(handles: &Bound<'_, PyList>) -> PyResult<Vec<Wanted>> {
    handles.iter().map(|handle| handle.cast::<RTensor>()?.get().wanted()).collect()
}

fn address_of(tensor: &Bound<'_, PyAny>) -> PyResult<Address> {
    Ok(Address(std::ptr::with_exposed_provenance_mut(
        tensor.call_method0(intern!(tensor.py(), "data_ptr"))?.extract()?,
    )))
}

fn as_tuple(removed: Removed) -> (u64, u64, u64) {
    (removed.cleared_count, removed.num_tensors, removed.total_bytes)
}

fn as_json<T: serde::Serialize>(value: &T) -> PyResult<String> {
    serde_json::to_string(value).map_err(|error| BindingError::Value(format!("cannot be told: {error}")).into())
}

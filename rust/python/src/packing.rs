//! Binds `tundish-packing`.

use std::path::PathBuf;
use std::thread;

use numpy::{PyArray1, PyArrayMethods, PyUntypedArray};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tundish_packing::hard::{OrderSource, Prepared, Request};
use tundish_packing::lookup::{self, Lengths, Lookup};
use tundish_packing::plan::{Column as PlanColumn, Facts, Views};
use tundish_packing::sample_index::{self as indexing, Inputs};
use tundish_packing::shuffle::RandomState;
use tundish_packing::{Integers, PackError, Silent, folder, verify as checking};

use crate::columns::Column;
use crate::enter::{Door, enter};
use crate::error::BindingError;
use crate::lent;
use crate::mapped;

/// What `pack`, `write` and `fingerprint` are asked for.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Job<'py> {
    lengths: Vec<Bound<'py, PyUntypedArray>>,
    order: Option<Bound<'py, PyUntypedArray>>,
    seed: Option<u32>,
    max_length: u64,
    drop_last: bool,
    global_pack: bool,
    threads: Option<usize>,
}

impl Job<'_> {
    /// Check and hash the inputs, then go on with `work`; all of it without the GIL.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        progress: Option<Py<PyAny>>,
        work: impl FnOnce(Request<'_>, &mut Door) -> Result<T, PackError> + Send,
    ) -> PyResult<T> {
        let lengths = Column::all(&self.lengths)?;
        let order = self.order.as_ref().map(Column::new).transpose()?;
        let (seed, max_length, drop_last, global_pack) = (self.seed, self.max_length, self.drop_last, self.global_pack);
        let threads = self.threads.unwrap_or_else(available_threads);
        enter(py, progress, move |door| {
            let request = Request {
                lengths: lengths.iter().map(Column::view).collect(),
                order: match (&order, seed) {
                    (Some(order), _) => OrderSource::Given(order.view()),
                    (None, Some(seed)) => OrderSource::Seed(seed),
                    (None, None) => OrderSource::Natural,
                },
                max_length,
                drop_last,
                global_pack,
                threads,
            };
            Ok(work(request, door)?)
        })
    }
}

/// Check and hash the inputs, which are those of the plan with the fingerprint `expected` where there is one.
fn prepared<'r>(request: Request<'r>, expected: Option<&str>, door: &mut Door) -> Result<Prepared<'r>, PackError> {
    let prepared = Prepared::new(request, door)?;
    match expected {
        Some(fingerprint) => prepared.expecting(fingerprint),
        None => Ok(prepared),
    }
}

/// The facts of a plan as JSON, and its six columns.
#[pyfunction]
#[pyo3(signature = (job, progress=None, expected=None))]
pub(crate) fn pack<'py>(
    py: Python<'py>,
    job: Job<'py>,
    progress: Option<Py<PyAny>>,
    expected: Option<String>,
) -> PyResult<(String, Bound<'py, PyTuple>)> {
    let plan = job.run(py, progress, |request, door| prepared(request, expected.as_deref(), door)?.pack(door))?;
    let columns: Vec<_> = plan.columns.into_iter().map(|column| lent::as_numpy(py, column)).collect::<PyResult<_>>()?;
    Ok((to_json(&plan.facts)?, PyTuple::new(py, columns)?))
}

/// Compute a plan straight into the folder `target`; its facts as JSON.
#[pyfunction]
#[pyo3(signature = (job, target, progress=None, expected=None))]
pub(crate) fn write(
    py: Python<'_>,
    job: Job<'_>,
    target: PathBuf,
    progress: Option<Py<PyAny>>,
    expected: Option<String>,
) -> PyResult<String> {
    let work =
        |request: Request<'_>, door: &mut Door| prepared(request, expected.as_deref(), door)?.write(&target, door);
    let facts = job.run(py, progress, work)?;
    to_json(&facts)
}

/// The fingerprint of the plan that `pack` would make.
#[pyfunction]
#[pyo3(signature = (job, progress=None))]
pub(crate) fn fingerprint(py: Python<'_>, job: Job<'_>, progress: Option<Py<PyAny>>) -> PyResult<String> {
    job.run(py, progress, |request, door| Ok(request.fingerprint(door)?.to_string()))
}

/// Write a plan to a folder.
#[pyfunction]
#[pyo3(signature = (columns, facts, target, progress=None))]
pub(crate) fn save(
    py: Python<'_>,
    columns: [Bound<'_, PyUntypedArray>; 6],
    facts: &str,
    target: PathBuf,
    progress: Option<Py<PyAny>>,
) -> PyResult<()> {
    let columns = six(&columns)?;
    let facts = from_json(facts)?;
    enter(py, progress, move |door| Ok(folder::save(&views(&columns)?, &facts, &target, door)?))
}

/// Check a plan folder and map it: the facts as JSON, and the six columns.
#[pyfunction]
#[pyo3(signature = (path, progress=None))]
pub(crate) fn open_plan<'py>(
    py: Python<'py>,
    path: PathBuf,
    progress: Option<Py<PyAny>>,
) -> PyResult<(String, Bound<'py, PyTuple>)> {
    let (facts, columns) = enter(py, progress, move |door| Ok(folder::open(&path, door)?))?;
    let columns: Vec<_> = columns.into_iter().map(|column| mapped::as_numpy(py, column)).collect::<PyResult<_>>()?;
    Ok((to_json(&facts)?, PyTuple::new(py, columns)?))
}

/// Check a plan against lengths, and the order that was given.
#[pyfunction]
#[pyo3(signature = (columns, facts, lengths, order=None, threads=None, progress=None))]
pub(crate) fn verify(
    py: Python<'_>,
    columns: [Bound<'_, PyUntypedArray>; 6],
    facts: &str,
    lengths: Vec<Bound<'_, PyUntypedArray>>,
    order: Option<Bound<'_, PyUntypedArray>>,
    threads: Option<usize>,
    progress: Option<Py<PyAny>>,
) -> PyResult<()> {
    let columns = six(&columns)?;
    let lengths = Column::all(&lengths)?;
    let order = order.as_ref().map(Column::new).transpose()?;
    let facts = from_json(facts)?;
    enter(py, progress, move |door| {
        let threads = threads.unwrap_or_else(available_threads);
        let lengths: Vec<Integers<'_>> = lengths.iter().map(Column::view).collect();
        let order = order.as_ref().map(Column::view);
        Ok(checking::verify(&views(&columns)?, &facts, &lengths, order, threads, door)?)
    })
}

/// Megatron's `sample_index` of a plan, a row of two integers a pack.
#[pyfunction]
#[pyo3(signature = (columns, facts, lengths=None, order=None, progress=None))]
pub(crate) fn sample_index<'py>(
    py: Python<'py>,
    columns: [Bound<'py, PyUntypedArray>; 6],
    facts: &str,
    lengths: Option<Vec<Bound<'py, PyUntypedArray>>>,
    order: Option<Bound<'py, PyUntypedArray>>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let columns = six(&columns)?;
    let lengths = lengths.as_deref().map(Column::all).transpose()?;
    let order = order.as_ref().map(Column::new).transpose()?;
    let facts = from_json(facts)?;
    let rows = enter(py, progress, move |door| {
        let lengths: Option<Vec<Integers<'_>>> =
            lengths.as_ref().map(|columns| columns.iter().map(Column::view).collect());
        let order = order.as_ref().map(Column::view);
        let inputs = Inputs { lengths: lengths.as_deref(), order, threads: available_threads() };
        Ok(indexing::sample_index(&views(&columns)?, &facts, &inputs, door)?)
    })?;
    let shape = [rows.len() / 2, 2];
    Ok(match rows {
        PlanColumn::I32(values) => lent::values(py, values)?.reshape(shape)?.into_any(),
        PlanColumn::I64(values) => lent::values(py, values)?.reshape(shape)?.into_any(),
    })
}

/// The order that numpy's `RandomState(seed).shuffle(arange(samples))` gives, or, with an epoch, that of
/// `RandomState([seed, epoch])`.
#[pyfunction]
#[pyo3(signature = (samples, seed, epoch=None, progress=None))]
pub(crate) fn shuffled_indices<'py>(
    py: Python<'py>,
    samples: usize,
    seed: u32,
    epoch: Option<u32>,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    let column = enter(py, progress, move |door| {
        let mut random = match epoch {
            None => RandomState::new(seed),
            Some(epoch) => RandomState::of_pair(seed, epoch),
        };
        Ok(if samples <= 1 << 31 {
            PlanColumn::I32(random.shuffled(samples, door)?)
        } else {
            PlanColumn::I64(random.shuffled(samples, door)?)
        })
    })?;
    lent::as_numpy(py, column)
}

/// Looks packs up in the columns of a plan.
#[pyclass(frozen)]
pub(crate) struct PlanReader {
    columns: [Column; 6],
    lengths: Option<Lengths<Column>>,
}

/// So many packs, or pieces, of a plan in memory are read within some 40 µs, for which the GIL is kept: who gives it
/// away waits, where other threads run Python, until one of them ends its turn of 5 ms. Of a mapped plan whose pages
/// have yet to come from a disk even one may take longer, which nobody knows before.
const QUICK: usize = 256;

/// sample, start, stop
type Piece = (i64, i64, Option<i64>);
/// dataset_id, piece_cu, sample, start, stop
type LookupArrays<'py> = (
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
);

#[pymethods]
impl PlanReader {
    #[new]
    #[pyo3(signature = (columns, lengths, global_pack))]
    fn new(
        columns: [Bound<'_, PyUntypedArray>; 6],
        lengths: Option<Vec<Bound<'_, PyUntypedArray>>>,
        global_pack: bool,
    ) -> PyResult<Self> {
        let columns = six(&columns)?;
        views(&columns)?;
        let lengths = lengths.as_deref().map(Column::all).transpose()?;
        Ok(Self { columns, lengths: lengths.map(|columns| Lengths::new(columns, global_pack)) })
    }

    /// The dataset of pack `number`, and sample, start and stop of each of its pieces.
    fn pack(&self, py: Python<'_>, number: usize) -> PyResult<(i64, Vec<Piece>)> {
        let number = [number as u64];
        let found = self.find(py, &Integers::from(&number[..]))?;
        let pieces = found.sample.iter().zip(&found.start).zip(&found.stop);
        let pieces =
            pieces.map(|((&sample, &start), &stop)| (sample, start, (stop != lookup::TO_THE_END).then_some(stop)));
        Ok((found.dataset_id[0], pieces.collect()))
    }

    /// The packs numbered `packs`, column by column.
    fn lookup<'py>(&self, py: Python<'py>, packs: &Bound<'py, PyUntypedArray>) -> PyResult<LookupArrays<'py>> {
        let packs = Column::new(packs)?;
        let found = self.find(py, &packs.view())?;
        Ok((
            PyArray1::from_vec(py, found.dataset_id),
            PyArray1::from_vec(py, found.piece_cu),
            PyArray1::from_vec(py, found.sample),
            PyArray1::from_vec(py, found.start),
            PyArray1::from_vec(py, found.stop),
        ))
    }
}

impl PlanReader {
    fn find(&self, py: Python<'_>, packs: &Integers<'_>) -> PyResult<Lookup> {
        let views = views(&self.columns)?;
        let lengths = self.lengths.as_ref();
        if packs.len() > QUICK {
            return enter(py, None, |door| Ok(lookup::lookup(&views, packs, lengths, door)?));
        }
        let located = lookup::locate(&views, packs, &mut Silent).map_err(BindingError::Pack)?;
        if located.pieces() > QUICK {
            return enter(py, None, |door| Ok(located.read(&views, lengths, door)?));
        }
        Ok(located.read(&views, lengths, &mut Silent).map_err(BindingError::Pack)?)
    }
}

fn six(columns: &[Bound<'_, PyUntypedArray>; 6]) -> Result<[Column; 6], BindingError> {
    let [a, b, c, d, e, f] = columns.each_ref().map(Column::new);
    Ok([a?, b?, c?, d?, e?, f?])
}

fn views(columns: &[Column; 6]) -> Result<Views<'_>, BindingError> {
    Ok(Views::new(columns.each_ref().map(Column::view))?)
}

fn to_json(facts: &Facts) -> PyResult<String> {
    facts.to_json().map_err(|error| BindingError::Pack(error).into())
}

fn from_json(text: &str) -> Result<Facts, BindingError> {
    Facts::from_json(text).map_err(BindingError::Pack)
}

/// How many threads this process may run on at once.
fn available_threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

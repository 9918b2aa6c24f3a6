//! A plan's columns: opens a plan folder, looks packs up, saves and verifies a plan.

use std::path::PathBuf;
use std::sync::Arc;

use numpy::{PyArray1, PyUntypedArray};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tundish_packing::plan::{self, AttachedLengths, PackBatch, PlanView};
use tundish_packing::{ColumnChecks, Integers, Mode, NoProgress, folder, verify};

use super::integer_array::{IntegerArray, view};
use super::packer::as_integer;
use super::{from_json, mapped_array, to_json};
use crate::error::BindingError;
use crate::long_work::enter;

/// The checksums of a plan's files.
#[pyclass(frozen)]
pub(crate) struct PlanChecks(Arc<Vec<ColumnChecks>>);

/// Check a plan folder and map it: the metadata as JSON, the six or eight columns, and their checksums.
#[pyfunction]
#[pyo3(signature = (path, progress=None))]
pub(crate) fn open_plan<'py>(
    py: Python<'py>,
    path: PathBuf,
    progress: Option<Py<PyAny>>,
) -> PyResult<(String, Bound<'py, PyTuple>, PlanChecks)> {
    let folder::OpenPlan { metadata, columns, checks } =
        enter(py, progress, move |signals| Ok(folder::open(&path, signals)?))?;
    let columns: Vec<_> =
        columns.into_iter().map(|column| mapped_array::as_numpy(py, column)).collect::<PyResult<_>>()?;
    Ok((to_json(&metadata)?, PyTuple::new(py, columns)?, PlanChecks(Arc::new(checks))))
}

/// Reads the columns of a plan. Those that are mapped from files are compared with their checksums before they are used.
#[pyclass(frozen)]
pub(crate) struct PackLookup {
    columns: Vec<IntegerArray>,
    lengths: Option<AttachedLengths<IntegerArray>>,
    checks: Option<Arc<Vec<ColumnChecks>>>,
}

/// Reading this many packs or pieces of a plan in memory takes some 40 µs, so the GIL is kept. To release it may cost
/// 5 ms: the turn of another thread that runs Python. A mapped plan whose pages come from a disk may take longer.
const QUICK: usize = 256;

/// dataset_id, piece_cu, sample, start, stop
type LookupArrays<'py> = (
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
);

#[pymethods]
impl PackLookup {
    #[new]
    #[pyo3(signature = (columns, lengths, global_pack, checks=None))]
    fn new(
        columns: Vec<Bound<'_, PyUntypedArray>>,
        lengths: Option<Vec<Bound<'_, PyUntypedArray>>>,
        global_pack: bool,
        checks: Option<&PlanChecks>,
    ) -> PyResult<Self> {
        let columns = IntegerArray::all(&columns)?;
        view(&columns)?;
        let lengths = lengths.as_deref().map(IntegerArray::all).transpose()?;
        let lengths = lengths.map(|columns| AttachedLengths::new(columns, global_pack));
        Ok(Self { columns, lengths, checks: checks.map(|checks| checks.0.clone()) })
    }

    /// The packs numbered `packs`, column by column.
    fn lookup<'py>(&self, py: Python<'py>, packs: &Bound<'py, PyUntypedArray>) -> PyResult<LookupArrays<'py>> {
        let packs = IntegerArray::new(packs)?;
        let found = self.find(py, &packs.view())?;
        Ok((
            PyArray1::from_vec(py, found.dataset_id),
            PyArray1::from_vec(py, found.piece_cu),
            PyArray1::from_vec(py, found.sample),
            PyArray1::from_vec(py, found.start),
            PyArray1::from_vec(py, found.stop),
        ))
    }

    /// Compare all columns with their checksums.
    #[pyo3(signature = (progress=None))]
    fn check(&self, py: Python<'_>, progress: Option<Py<PyAny>>) -> PyResult<()> {
        enter(py, progress, |signals| Ok(self.view()?.check_all(signals)?))
    }

    /// Write the plan to a folder.
    #[pyo3(signature = (metadata, target, progress=None))]
    fn save(&self, py: Python<'_>, metadata: &str, target: PathBuf, progress: Option<Py<PyAny>>) -> PyResult<()> {
        let metadata = from_json(metadata)?;
        enter(py, progress, |signals| Ok(folder::save(&self.view()?, &metadata, &target, signals)?))
    }

    /// Check the plan against lengths, and the order and the costs that were given.
    #[pyo3(signature = (metadata, lengths, order=None, costs=None, threads=None, progress=None))]
    #[allow(clippy::too_many_arguments)]
    fn verify(
        &self,
        py: Python<'_>,
        metadata: &str,
        lengths: Vec<Bound<'_, PyUntypedArray>>,
        order: Option<Bound<'_, PyUntypedArray>>,
        costs: Option<Vec<Bound<'_, PyUntypedArray>>>,
        threads: Option<Bound<'_, PyAny>>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let lengths = IntegerArray::all(&lengths)?;
        let order = order.as_ref().map(IntegerArray::new).transpose()?;
        let costs = costs.as_deref().map(IntegerArray::all).transpose()?;
        let metadata = from_json(metadata)?;
        let threads = threads.map(|threads| as_integer(&threads, "threads", Mode::Hard)).transpose()?;
        enter(py, progress, |signals| {
            let lengths: Vec<Integers<'_>> = lengths.iter().map(IntegerArray::view).collect();
            let order = order.as_ref().map(IntegerArray::view);
            let costs: Option<Vec<Integers<'_>>> =
                costs.as_ref().map(|columns| columns.iter().map(IntegerArray::view).collect());
            Ok(verify::verify(&self.view()?, &metadata, &lengths, order, costs.as_deref(), threads, signals)?)
        })
    }
}

impl PackLookup {
    fn view(&self) -> Result<PlanView<'_>, BindingError> {
        let plan = view(&self.columns)?;
        Ok(match &self.checks {
            Some(checks) => plan.with_checks(checks),
            None => plan,
        })
    }

    fn find(&self, py: Python<'_>, packs: &Integers<'_>) -> PyResult<PackBatch> {
        let plan = self.view()?;
        let lengths = self.lengths.as_ref();
        if packs.len() > QUICK {
            return enter(py, None, |signals| Ok(plan::lookup(&plan, packs, lengths, signals)?));
        }
        let located = plan::locate(&plan, packs, &mut NoProgress).map_err(BindingError::Pack)?;
        if located.pieces() > QUICK || !located.is_checked(&plan) {
            return enter(py, None, |signals| Ok(located.read(&plan, lengths, signals)?));
        }
        Ok(located.read(&plan, lengths, &mut NoProgress).map_err(BindingError::Pack)?)
    }
}

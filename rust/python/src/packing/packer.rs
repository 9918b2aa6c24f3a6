//! Computes plans.

use std::path::PathBuf;

use numpy::PyUntypedArray;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tundish_packing::inputs::SampleOrder;
use tundish_packing::{
    Mode, Modes, Overlong, PackError, PackMultiple, PackRequest, Packer, Placement, Remainder, SampleCosts,
    WholeOptions,
};

use super::integer_array::IntegerArray;
use super::{as_numpy, available_threads, to_json};
use crate::error::BindingError;
use crate::long_work::{SignalCheck, enter};

/// The arguments of a plan, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct RequestDict<'py> {
    lengths: Vec<Bound<'py, PyUntypedArray>>,
    order: Option<Bound<'py, PyUntypedArray>>,
    seed: Option<u32>,
    max_length: u64,
    modes: Vec<String>,
    drop_last: bool,
    overlong: String,
    window: u64,
    max_samples: Option<u64>,
    align: u64,
    costs: Option<Vec<Bound<'py, PyUntypedArray>>>,
    max_cost: u64,
    multiple_of: Option<u64>,
    remainder: String,
    global_pack: bool,
    threads: Option<usize>,
}

fn unknown(name: &str, value: &str, choices: &str) -> BindingError {
    BindingError::Value(format!("{name} is '{value}'; it is one of {choices}"))
}

impl RequestDict<'_> {
    fn modes(&self) -> Result<Modes, BindingError> {
        match &self.modes[..] {
            [mode] => self.mode(mode).map(Modes::All),
            modes => modes.iter().map(|mode| self.mode(mode)).collect::<Result<_, _>>().map(Modes::Each),
        }
    }

    fn mode(&self, name: &str) -> Result<Mode, BindingError> {
        if name == "hard" {
            return Ok(Mode::Hard { drop_last: self.drop_last });
        }
        let placement = Placement::from_name(name, self.window)
            .ok_or_else(|| unknown("mode", name, "'hard', 'best_fit', 'ordered', 'sequential'"))?;
        let overlong = Overlong::from_name(&self.overlong)
            .ok_or_else(|| unknown("overlong", &self.overlong, "'error', 'split', 'truncate', 'drop'"))?;
        Ok(Mode::Whole(WholeOptions { placement, overlong, max_samples: self.max_samples, align: self.align }))
    }

    fn multiple(&self) -> Result<Option<PackMultiple>, BindingError> {
        let remainder = Remainder::from_name(&self.remainder)
            .ok_or_else(|| unknown("remainder", &self.remainder, "'drop', 'repeat'"))?;
        Ok(self.multiple_of.map(|of| PackMultiple { of, remainder }))
    }

    /// Call `work` with the request, without the GIL.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        progress: Option<Py<PyAny>>,
        work: impl FnOnce(PackRequest<'_>, &mut SignalCheck) -> Result<T, PackError> + Send,
    ) -> PyResult<T> {
        let lengths = IntegerArray::all(&self.lengths)?;
        let order = self.order.as_ref().map(IntegerArray::new).transpose()?;
        let (seed, max_length, mode, global_pack) = (self.seed, self.max_length, self.modes()?, self.global_pack);
        let (costs, max_cost) = (self.costs.as_deref().map(IntegerArray::all).transpose()?, self.max_cost);
        let multiple = self.multiple()?;
        let threads = self.threads.unwrap_or_else(available_threads);
        enter(py, progress, move |signals| {
            let request = PackRequest {
                lengths: lengths.iter().map(IntegerArray::view).collect(),
                order: match (&order, seed) {
                    (Some(order), _) => SampleOrder::Given(order.view()),
                    (None, Some(seed)) => SampleOrder::Seed(seed),
                    (None, None) => SampleOrder::Natural,
                },
                max_length,
                mode,
                costs: costs
                    .as_ref()
                    .map(|columns| SampleCosts { columns: columns.iter().map(IntegerArray::view).collect(), max_cost }),
                multiple,
                global_pack,
                threads,
            };
            Ok(work(request, signals)?)
        })
    }
}

/// A packer for the plan with the fingerprint `expected`, or for any.
fn packer<'r>(
    request: PackRequest<'r>,
    expected: Option<&str>,
    signals: &mut SignalCheck,
) -> Result<Packer<'r>, PackError> {
    let packer = Packer::new(request, signals)?;
    match expected {
        Some(fingerprint) => packer.expect_fingerprint(fingerprint),
        None => Ok(packer),
    }
}

/// Compute a plan in memory: its metadata as JSON, and its six or eight columns.
#[pyfunction]
#[pyo3(signature = (request, progress=None, expected=None))]
pub(crate) fn pack<'py>(
    py: Python<'py>,
    request: RequestDict<'py>,
    progress: Option<Py<PyAny>>,
    expected: Option<String>,
) -> PyResult<(String, Bound<'py, PyTuple>)> {
    let plan =
        request.run(py, progress, |request, signals| packer(request, expected.as_deref(), signals)?.pack(signals))?;
    let columns: Vec<_> = plan.columns.into_iter().map(|column| as_numpy(py, column)).collect();
    Ok((to_json(&plan.metadata)?, PyTuple::new(py, columns)?))
}

/// Compute a plan straight into the folder `target`: its metadata as JSON.
#[pyfunction]
#[pyo3(signature = (request, target, progress=None, expected=None))]
pub(crate) fn pack_to_folder(
    py: Python<'_>,
    request: RequestDict<'_>,
    target: PathBuf,
    progress: Option<Py<PyAny>>,
    expected: Option<String>,
) -> PyResult<String> {
    let work = |request: PackRequest<'_>, signals: &mut SignalCheck| {
        packer(request, expected.as_deref(), signals)?.write(&target, signals)
    };
    to_json(&request.run(py, progress, work)?)
}

/// The fingerprint of the plan that `pack` would compute.
#[pyfunction]
#[pyo3(signature = (request, progress=None))]
pub(crate) fn plan_fingerprint(
    py: Python<'_>,
    request: RequestDict<'_>,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    request.run(py, progress, |request, signals| Ok(tundish_packing::plan_fingerprint(request, signals)?.to_string()))
}

//! Computes hard plans.

use std::path::PathBuf;

use numpy::PyUntypedArray;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tundish_packing::PackError;
use tundish_packing::hard::{self, HardPacker, PackRequest};
use tundish_packing::inputs::SampleOrder;

use super::integer_array::IntegerArray;
use super::{as_numpy, available_threads, to_json};
use crate::long_work::{SignalCheck, enter};

/// The arguments of a plan, as a dict.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct RequestDict<'py> {
    lengths: Vec<Bound<'py, PyUntypedArray>>,
    order: Option<Bound<'py, PyUntypedArray>>,
    seed: Option<u32>,
    max_length: u64,
    drop_last: bool,
    global_pack: bool,
    threads: Option<usize>,
}

impl RequestDict<'_> {
    /// Call `work` with the request, without the GIL.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        progress: Option<Py<PyAny>>,
        work: impl FnOnce(PackRequest<'_>, &mut SignalCheck) -> Result<T, PackError> + Send,
    ) -> PyResult<T> {
        let lengths = IntegerArray::all(&self.lengths)?;
        let order = self.order.as_ref().map(IntegerArray::new).transpose()?;
        let (seed, max_length, drop_last, global_pack) = (self.seed, self.max_length, self.drop_last, self.global_pack);
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
                drop_last,
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
) -> Result<HardPacker<'r>, PackError> {
    let packer = HardPacker::new(request, signals)?;
    match expected {
        Some(fingerprint) => packer.expect_fingerprint(fingerprint),
        None => Ok(packer),
    }
}

/// Compute a plan in memory: its metadata as JSON, and its six columns.
#[pyfunction]
#[pyo3(signature = (request, progress=None, expected=None))]
pub(crate) fn hard_pack<'py>(
    py: Python<'py>,
    request: RequestDict<'py>,
    progress: Option<Py<PyAny>>,
    expected: Option<String>,
) -> PyResult<(String, Bound<'py, PyTuple>)> {
    let plan =
        request.run(py, progress, |request, signals| packer(request, expected.as_deref(), signals)?.pack(signals))?;
    let columns = plan.columns.into_iter().map(|column| as_numpy(py, column));
    Ok((to_json(&plan.metadata)?, PyTuple::new(py, columns)?))
}

/// Compute a plan straight into the folder `target`: its metadata as JSON.
#[pyfunction]
#[pyo3(signature = (request, target, progress=None, expected=None))]
pub(crate) fn hard_pack_to_folder(
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

/// The fingerprint of the plan that `hard_pack` would compute.
#[pyfunction]
#[pyo3(signature = (request, progress=None))]
pub(crate) fn hard_plan_fingerprint(
    py: Python<'_>,
    request: RequestDict<'_>,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    request.run(py, progress, |request, signals| Ok(hard::fingerprint(request, signals)?.to_string()))
}

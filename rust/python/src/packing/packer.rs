//! Computes plans.
//!
//! Arguments come as a dict of what the caller passed. Here they get their types; the core checks their ranges and
//! whether they go together.

use std::path::PathBuf;

use numpy::PyUntypedArray;
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyString, PyTuple};
use tundish_packing::ordered_samples::SampleOrder;
use tundish_packing::request::{out_of_range, range_of};
use tundish_packing::{Mode, Overlong, PackError, PackRequest, Packer, Remainder};

use super::integer_array::IntegerArray;
use super::{as_numpy, to_json};
use crate::error::BindingError;
use crate::long_work::{SignalCheck, enter};

/// The keys of a request: the arrays, then the options.
const KEYS: [&str; 16] = [
    "lengths",
    "order",
    "costs",
    "max_length",
    "mode",
    "seed",
    "drop_last",
    "overlong",
    "window",
    "max_samples",
    "align",
    "max_cost",
    "multiple_of",
    "remainder",
    "global_pack",
    "threads",
];

/// A request with its arrays.
pub(super) struct Request {
    lengths: Vec<IntegerArray>,
    order: Option<IntegerArray>,
    costs: Option<Vec<IntegerArray>>,
    /// Without arrays.
    options: PackRequest<'static>,
}

/// An argument that is given, and is not None.
fn given<'py>(arguments: &Bound<'py, PyDict>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    Ok(arguments.get_item(name)?.filter(|value| !value.is_none()))
}

/// A value as messages show it.
fn shown(value: &Bound<'_, PyAny>) -> String {
    let text = value.repr().map_or_else(|_| value.get_type().to_string(), |text| text.to_string());
    text.chars().take(100).collect()
}

fn integer(arguments: &Bound<'_, PyDict>, name: &str, mode: Mode) -> Result<Option<u64>, BindingError> {
    given(arguments, name)?.map(|value| as_integer(&value, name, mode)).transpose()
}

/// An integer option of a mode.
pub(super) fn as_integer(value: &Bound<'_, PyAny>, name: &str, mode: Mode) -> Result<u64, BindingError> {
    let py = value.py();
    if value.is_instance_of::<PyBool>() {
        return Err(BindingError::Type(format!("{name} must be an integer, not {}", shown(value))));
    }
    match value.extract::<u64>() {
        Ok(number) if range_of(name, mode).contains(&number) => Ok(number),
        Err(error) if !error.is_instance_of::<PyOverflowError>(py) => {
            Err(BindingError::Type(format!("{name} must be an integer, not {}", shown(value))))
        }
        _ => {
            let number = py.import("operator")?.call_method1("index", (value,))?;
            let number = py.import("tundish.errors")?.call_method1("format_integer", (number,))?;
            Err(BindingError::Value(out_of_range(name, number, mode)))
        }
    }
}

fn flag(arguments: &Bound<'_, PyDict>, name: &str) -> Result<Option<bool>, BindingError> {
    let Some(value) = given(arguments, name)? else { return Ok(None) };
    match value.cast::<PyBool>() {
        Ok(flag) => Ok(Some(flag.is_true())),
        Err(_) => Err(BindingError::Type(format!("{name} must be True or False, not {}", shown(&value)))),
    }
}

fn word<T>(
    arguments: &Bound<'_, PyDict>,
    name: &str,
    words: &[&str],
    from_name: fn(&str) -> Option<T>,
) -> Result<Option<T>, BindingError> {
    let Some(value) = given(arguments, name)? else { return Ok(None) };
    let listed = words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(", ");
    let Ok(text) = value.cast::<PyString>() else {
        return Err(BindingError::Type(format!("{name} must be one of {listed}, not {}", shown(&value))));
    };
    match text.to_str().ok().and_then(from_name) {
        Some(found) => Ok(Some(found)),
        None => Err(BindingError::Value(format!("{name} is {}; it must be one of {listed}", shown(&value)))),
    }
}

impl Request {
    pub(super) fn new(arguments: &Bound<'_, PyDict>) -> Result<Self, BindingError> {
        for name in arguments.keys() {
            let name = name.to_string();
            if !KEYS.contains(&&*name) {
                return Err(BindingError::Type(format!(
                    "there is no argument {name:.100}; the options are {}",
                    KEYS[3..].join(", ")
                )));
            }
        }
        // None stands for an option that was not given, where that is a choice.
        for name in ["mode", "align", "global_pack"] {
            if arguments.get_item(name)?.is_some_and(|value| value.is_none()) {
                return Err(BindingError::Type(match name {
                    "mode" => format!("mode must be one of {}, not None", Mode::WORDS.join(", ")),
                    "align" => "align must be an integer, not None".into(),
                    _ => "global_pack must be True or False, not None".into(),
                }));
            }
        }
        let arrays = |name| -> Result<Option<Vec<IntegerArray>>, BindingError> {
            let Some(given) = given(arguments, name)? else { return Ok(None) };
            let arrays: Vec<Bound<'_, PyUntypedArray>> = given.extract()?;
            Ok(Some(IntegerArray::all(&arrays)?))
        };
        let order = match given(arguments, "order")? {
            Some(order) => Some(IntegerArray::new(&order.cast_into::<PyUntypedArray>().map_err(PyErr::from)?)?),
            None => None,
        };
        // The range of `max_length` depends on it.
        let mode = word(arguments, "mode", Mode::WORDS, Mode::from_name)?.unwrap_or(Mode::Hard);
        let integer = |name| integer(arguments, name, mode);
        let seed = integer("seed")?;
        if order.is_some() && seed.is_some() {
            return Err(BindingError::Value(
                "order and seed are both given, and an order leaves nothing to shuffle: leave one of them out".into(),
            ));
        }
        let max_length = integer("max_length")?
            .ok_or_else(|| BindingError::Type("max_length must be an integer, not None".into()))?;
        let options = PackRequest {
            mode,
            order: seed.map_or(SampleOrder::Natural, |seed| SampleOrder::Seed(seed as u32)),
            drop_last: flag(arguments, "drop_last")?,
            overlong: word(arguments, "overlong", Overlong::WORDS, Overlong::from_name)?,
            window: integer("window")?,
            max_samples: integer("max_samples")?,
            align: integer("align")?.unwrap_or(1),
            max_cost: integer("max_cost")?,
            multiple_of: integer("multiple_of")?,
            remainder: word(arguments, "remainder", Remainder::WORDS, Remainder::from_name)?,
            global_pack: flag(arguments, "global_pack")?.unwrap_or(false),
            threads: integer("threads")?,
            ..PackRequest::new(Vec::new(), max_length)
        };
        Ok(Self { lengths: arrays("lengths")?.unwrap_or_default(), order, costs: arrays("costs")?, options })
    }

    pub(super) fn view(&self) -> PackRequest<'_> {
        let options = self.options.clone();
        PackRequest {
            lengths: self.lengths.iter().map(IntegerArray::view).collect(),
            order: self.order.as_ref().map_or(options.order, |order| SampleOrder::Given(order.view())),
            costs: self.costs.as_ref().map(|columns| columns.iter().map(IntegerArray::view).collect()),
            ..options
        }
    }

    /// Call `work` with a packer for the plan with the fingerprint `expected`, or for any, without the GIL.
    fn run<T: Send>(
        self,
        py: Python<'_>,
        progress: Option<Py<PyAny>>,
        expected: Option<&str>,
        work: impl FnOnce(Packer<'_>, &mut SignalCheck) -> Result<T, PackError> + Send,
    ) -> PyResult<T> {
        enter(py, progress, move |signals| {
            let packer = Packer::new(self.view(), signals)?;
            let packer = match expected {
                Some(fingerprint) => packer.expect_fingerprint(fingerprint)?,
                None => packer,
            };
            Ok(work(packer, signals)?)
        })
    }
}

/// Compute a plan in memory: its metadata as JSON, and its six or eight columns.
#[pyfunction]
#[pyo3(signature = (request, progress=None, expected=None))]
pub(crate) fn pack<'py>(
    py: Python<'py>,
    request: &Bound<'py, PyDict>,
    progress: Option<Py<PyAny>>,
    expected: Option<String>,
) -> PyResult<(String, Bound<'py, PyTuple>)> {
    let request = Request::new(request)?;
    let plan = request.run(py, progress, expected.as_deref(), |packer, signals| packer.pack(signals))?;
    let columns: Vec<_> = plan.columns.into_iter().map(|column| as_numpy(py, column)).collect();
    Ok((to_json(&plan.metadata)?, PyTuple::new(py, columns)?))
}

/// Compute a plan straight into the folder `target`: its metadata as JSON.
#[pyfunction]
#[pyo3(signature = (request, target, progress=None, expected=None))]
pub(crate) fn pack_to_folder(
    py: Python<'_>,
    request: &Bound<'_, PyDict>,
    target: PathBuf,
    progress: Option<Py<PyAny>>,
    expected: Option<String>,
) -> PyResult<String> {
    let request = Request::new(request)?;
    to_json(&request.run(py, progress, expected.as_deref(), |packer, signals| packer.write(&target, signals))?)
}

/// The fingerprint of the plan that `pack` would compute.
#[pyfunction]
#[pyo3(signature = (request, progress=None))]
pub(crate) fn plan_fingerprint(
    py: Python<'_>,
    request: &Bound<'_, PyDict>,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let request = Request::new(request)?;
    enter(py, progress, move |signals| Ok(tundish_packing::plan_fingerprint(request.view(), signals)?.to_string()))
}

//! Checkpoints, kinds and damage as Python objects.

use pyo3::exceptions::{PyRecursionError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};
use tundish_commit::CheckpointKind;
use tundish_commit::root::{CheckpointInfo, Damage};

use crate::error::BindingError;

/// The name of a damaged file, the problem, and whether its bytes were read and differ.
pub(crate) type FileDamage = (String, String, bool);

pub(crate) fn file_damage(damage: Damage) -> FileDamage {
    (damage.name, damage.problem, damage.is_changed)
}

pub(crate) fn parse_kind(kind: &str) -> Result<CheckpointKind, BindingError> {
    kind.parse().map_err(|_| BindingError::Value(format!("kind is {kind:?}: give 'hf' or 'dcp'")))
}

pub(crate) fn checkpoint_dicts<'py>(py: Python<'py>, checkpoints: &[CheckpointInfo]) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    for checkpoint in checkpoints {
        list.append(checkpoint_dict(py, checkpoint)?)?;
    }
    Ok(list)
}

pub(crate) fn checkpoint_dict<'py>(py: Python<'py>, checkpoint: &CheckpointInfo) -> PyResult<Bound<'py, PyDict>> {
    let entry = PyDict::new(py);
    entry.set_item("kind", checkpoint.kind.to_string())?;
    entry.set_item("step", checkpoint.step)?;
    entry.set_item("path", &checkpoint.path)?;
    entry.set_item("tag", &checkpoint.tag)?;
    entry.set_item("bytes", checkpoint.bytes)?;
    entry.set_item("files", checkpoint.files)?;
    entry.set_item("world_size", checkpoint.world_size)?;
    entry.set_item("extra", checkpoint.extra.as_ref().map(|extra| parse_json(py, extra.get())).transpose()?)?;
    Ok(entry)
}

/// JSON as Python objects; as text where Python cannot parse it: nested too deep, or with numbers of thousands of
/// digits.
fn parse_json<'py>(py: Python<'py>, json: &str) -> PyResult<Bound<'py, PyAny>> {
    let is_unreadable =
        |error: &PyErr| error.is_instance_of::<PyValueError>(py) || error.is_instance_of::<PyRecursionError>(py);
    match py.import("json")?.getattr("loads")?.call1((json,)) {
        Err(error) if is_unreadable(&error) => Ok(PyString::new(py, json).into_any()),
        outcome => outcome,
    }
}

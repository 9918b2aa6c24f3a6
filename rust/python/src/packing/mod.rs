//! Binds `tundish-packing`.

mod balance;
mod integer_array;
mod integer_list;
mod mapped_array;
mod mix;
mod packer;
mod plan;
mod stream_packer;

pub(crate) use balance::{balanced_parts, micro_batches, shuffled_indices};
pub(crate) use integer_list::integers_of_list;
pub(crate) use mix::mix_packs;
pub(crate) use packer::{pack, pack_to_folder, plan_fingerprint};
pub(crate) use plan::{PackLookup, PlanChecks, open_plan};
pub(crate) use stream_packer::StreamPacker;

use numpy::PyArray1;
use pyo3::prelude::*;
use tundish_packing::plan::{Column, PlanMetadata};

use crate::error::BindingError;

/// The values of a column as a numpy array, without a copy.
fn as_numpy(py: Python<'_>, column: Column) -> Bound<'_, PyAny> {
    match column {
        Column::I32(values) => PyArray1::from_vec(py, values).into_any(),
        Column::I64(values) => PyArray1::from_vec(py, values).into_any(),
    }
}

fn to_json(metadata: &PlanMetadata) -> PyResult<String> {
    metadata.to_json().map_err(|error| BindingError::Pack(error).into())
}

fn from_json(text: &str) -> Result<PlanMetadata, BindingError> {
    PlanMetadata::from_json(text).map_err(BindingError::Pack)
}

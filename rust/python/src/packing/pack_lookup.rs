//! Looks packs up in a plan.

use numpy::{PyArray1, PyUntypedArray};
use pyo3::prelude::*;
use tundish_packing::plan::{self, AttachedLengths, PackBatch, TO_THE_END};
use tundish_packing::{Integers, NoProgress};

use super::integer_array::{IntegerArray, view};
use crate::error::BindingError;
use crate::long_work::enter;

/// Looks packs up in the columns of a plan.
#[pyclass(frozen)]
pub(crate) struct PackLookup {
    columns: Vec<IntegerArray>,
    lengths: Option<AttachedLengths<IntegerArray>>,
}

/// Reading this many packs or pieces of a plan in memory takes some 40 µs, so the GIL is kept. To release it may cost
/// 5 ms: the turn of another thread that runs Python. A mapped plan whose pages come from a disk may take longer.
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
impl PackLookup {
    #[new]
    #[pyo3(signature = (columns, lengths, global_pack))]
    fn new(
        columns: Vec<Bound<'_, PyUntypedArray>>,
        lengths: Option<Vec<Bound<'_, PyUntypedArray>>>,
        global_pack: bool,
    ) -> PyResult<Self> {
        let columns = IntegerArray::all(&columns)?;
        view(&columns)?;
        let lengths = lengths.as_deref().map(IntegerArray::all).transpose()?;
        Ok(Self { columns, lengths: lengths.map(|columns| AttachedLengths::new(columns, global_pack)) })
    }

    /// The dataset of pack `number`, and sample, start and stop of each of its pieces.
    fn pack(&self, py: Python<'_>, number: usize) -> PyResult<(i64, Vec<Piece>)> {
        let number = [number as u64];
        let found = self.find(py, &Integers::from(&number[..]))?;
        let pieces = found.sample.iter().zip(&found.start).zip(&found.stop);
        let pieces = pieces.map(|((&sample, &start), &stop)| (sample, start, (stop != TO_THE_END).then_some(stop)));
        Ok((found.dataset_id[0], pieces.collect()))
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
}

impl PackLookup {
    fn find(&self, py: Python<'_>, packs: &Integers<'_>) -> PyResult<PackBatch> {
        let plan = view(&self.columns)?;
        let lengths = self.lengths.as_ref();
        if packs.len() > QUICK {
            return enter(py, None, |signals| Ok(plan::lookup(&plan, packs, lengths, signals)?));
        }
        let located = plan::locate(&plan, packs, &mut NoProgress).map_err(BindingError::Pack)?;
        if located.pieces() > QUICK {
            return enter(py, None, |signals| Ok(located.read(&plan, lengths, signals)?));
        }
        Ok(located.read(&plan, lengths, &mut NoProgress).map_err(BindingError::Pack)?)
    }
}

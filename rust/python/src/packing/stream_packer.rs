//! Packs a stream, sample by sample.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::packer::Request;
use super::to_json;
use crate::error::BindingError;

/// The packs of a stream that may still take pieces, numbered as they are opened.
#[pyclass]
pub(crate) struct StreamPacker(tundish_packing::StreamPacker);

#[pymethods]
impl StreamPacker {
    /// `request` has the options of `pack`, and no arrays.
    #[new]
    fn new(request: &Bound<'_, PyDict>) -> Result<Self, BindingError> {
        Ok(Self(tundish_packing::StreamPacker::new(&Request::new(request)?.view())?))
    }

    /// The options, checked and complete, as the JSON of a plan has them.
    fn options(&self) -> PyResult<String> {
        to_json(self.0.options())
    }

    /// The number of packs that take nothing more.
    fn closed(&self) -> u64 {
        self.0.closed()
    }

    /// Put a sample into packs: for each of its pieces, the number of the pack, its first token, and one past its last.
    fn place(&mut self, sample: usize, tokens: u64) -> Result<Vec<(u64, u64, u64)>, BindingError> {
        let pieces = self.0.place(sample, tokens)?;
        Ok(pieces.iter().map(|piece| (piece.pack, piece.start, piece.stop)).collect())
    }

    /// Go on with the packs from `first` on, each of which has pieces of these lengths; none was open before.
    fn reopen(&mut self, first: u64, packs: Vec<Vec<u64>>) -> Result<(), BindingError> {
        Ok(self.0.reopen(first, &packs)?)
    }
}

//! Packs a stream, piece by piece.

use pyo3::prelude::*;

use crate::error::BindingError;

/// The open packs of a stream: says which of them takes each piece. Packs are numbered as they are opened; pack `n` is
/// closed when pack `n + window` is opened.
#[pyclass]
pub(crate) struct StreamWindow(tundish_packing::StreamWindow);

#[pymethods]
impl StreamWindow {
    #[new]
    #[pyo3(signature = (window, max_length, max_samples, align))]
    fn new(window: u64, max_length: u64, max_samples: Option<u64>, align: u64) -> Result<Self, BindingError> {
        Ok(Self(tundish_packing::StreamWindow::new(window, max_length, max_samples, align)?))
    }

    /// The number of the pack that takes a piece of `tokens` tokens.
    fn place(&mut self, tokens: u64) -> Result<u64, BindingError> {
        Ok(self.0.place(tokens)?)
    }

    /// Have the packs from `first` on open, each with pieces of these lengths; no other was open before.
    fn reopen(&mut self, first: u64, packs: Vec<Vec<u64>>) -> Result<(), BindingError> {
        Ok(self.0.reopen(first, &packs)?)
    }
}

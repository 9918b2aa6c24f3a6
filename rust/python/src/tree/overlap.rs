//! Tells whether pieces of memory overlap.

use pyo3::prelude::*;
use pyo3::types::PyList;

/// Whether no two of the pieces overlap. Piece *i* begins at `addresses[i]`; `sizes` holds their lengths in bytes, as
/// native 64-bit integers. An address that is there twice overlaps, whatever the lengths.
#[pyfunction]
pub(crate) fn are_apart(addresses: &Bound<'_, PyList>, sizes: &[u8]) -> PyResult<bool> {
    let (sizes, _) = sizes.as_chunks();
    let mut pieces = Vec::with_capacity(addresses.len());
    for (address, size) in addresses.iter().zip(sizes) {
        pieces.push((address.extract::<u64>()?, u64::from_ne_bytes(*size)));
    }
    Ok(none_overlap(&mut pieces))
}

/// As `are_apart`, for pairs of address and length.
pub(super) fn none_overlap(pieces: &mut [(u64, u64)]) -> bool {
    pieces.sort_unstable();
    pieces.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[1].0 - pair[0].0 >= pair[0].1)
}

//! The `.npy` format, as far as a plan needs it: one-dimensional, little-endian, 4 or 8 bytes a value.
//!
//! Invariants: for a width and a length there is one header, the one that `numpy.save` writes. Only that header is
//! written, and only that header is read.
//!
//! Source of the format: the NumPy Enhancement Proposal 1 (R. Kern) and numpy's `format.py` documentation.

use std::io::Read;
use std::path::Path;

use crate::error::PackError;

/// Bytes of such a header, whatever the length: numpy pads to a multiple of 64, so that mapped values are aligned.
pub(super) const HEADER_BYTES: usize = 128;
const MAGIC: &[u8] = b"\x93NUMPY";
const VERSION: [u8; 2] = [1, 0];
/// Magic, version and the length of the text.
const TEXT_AT: usize = 10;

/// The header of an array of `len` signed integers of 4 bytes, or 8 if it is `wide`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NpyHeader {
    pub(super) wide: bool,
    pub(super) len: u64,
}

impl NpyHeader {
    /// The header as it stands in a file.
    pub(super) fn bytes(self) -> [u8; HEADER_BYTES] {
        let Self { wide, len } = self;
        let descr = if wide { "<i8" } else { "<i4" };
        let text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({len},), }}");
        let mut bytes = [b' '; HEADER_BYTES];
        bytes[..6].copy_from_slice(MAGIC);
        bytes[6..8].copy_from_slice(&VERSION);
        bytes[8..TEXT_AT].copy_from_slice(&((HEADER_BYTES - TEXT_AT) as u16).to_le_bytes());
        bytes[TEXT_AT..TEXT_AT + text.len()].copy_from_slice(text.as_bytes());
        bytes[HEADER_BYTES - 1] = b'\n';
        bytes
    }

    /// Bytes of a value.
    pub(super) fn width(self) -> usize {
        if self.wide { 8 } else { 4 }
    }

    /// Bytes of the file that the header begins.
    pub(super) fn file_bytes(self) -> u128 {
        HEADER_BYTES as u128 + u128::from(self.len) * self.width() as u128
    }
}

/// Read the header of the file at `path`.
///
/// # Errors
/// `Format` with what is wrong with it.
pub(super) fn read_header(file: &mut impl Read, path: &Path) -> Result<NpyHeader, PackError> {
    let wrong = |reason: String| PackError::Format { path: path.to_path_buf(), reason };
    let mut bytes = Vec::with_capacity(HEADER_BYTES);
    file.take(HEADER_BYTES as u64)
        .read_to_end(&mut bytes)
        .map_err(|source| PackError::Io { path: path.to_path_buf(), source })?;
    if !MAGIC.starts_with(&bytes[..bytes.len().min(MAGIC.len())]) {
        return Err(wrong("is not a .npy file; make the plan again".into()));
    }
    let Ok(bytes) = <[u8; HEADER_BYTES]>::try_from(bytes) else {
        return Err(wrong("is truncated within its header; make the plan again".into()));
    };
    let text = String::from_utf8_lossy(&bytes[TEXT_AT..]);
    let len = value_of(&text, "shape").and_then(|shape| shape.strip_prefix('(')?.split_once(',')?.0.parse().ok());
    for wide in [false, true] {
        // The whole header is compared, so nothing in it is overlooked.
        if let Some(header) = len.map(|len| NpyHeader { wide, len })
            && bytes == header.bytes()
        {
            return Ok(header);
        }
    }
    Err(wrong(format!("{}; make the plan again", describe_difference(&bytes, &text))))
}

/// Describe what is wrong with a header.
fn describe_difference(bytes: &[u8; HEADER_BYTES], text: &str) -> String {
    let until = |text: &str, end: char| text.split(end).next().unwrap_or_default().trim().to_owned();
    if bytes[6..8] != VERSION {
        return format!("has the .npy version {}.{}; a plan's arrays have 1.0", bytes[6], bytes[7]);
    }
    match value_of(text, "descr").map(|value| until(value, ',')) {
        Some(descr) if descr != "'<i4'" && descr != "'<i8'" => {
            return format!("has the dtype {descr}; a plan's arrays are '<i4' (int32) or '<i8' (int64)");
        }
        _ => {}
    }
    match value_of(text, "shape").map(|value| until(value, ')')) {
        Some(shape) if shape.split(',').filter(|part| !part.trim().is_empty()).count() != 1 => {
            return format!("has the shape {shape}); a plan's arrays have one dimension");
        }
        _ => {}
    }
    "has another header than numpy.save writes for a one-dimensional array of int32 or int64".to_owned()
}

/// The text after `'key': ` in a header.
fn value_of<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    Some(text.split_once(&format!("'{key}': "))?.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Result<NpyHeader, PackError> {
        read_header(&mut &bytes[..], Path::new("x.npy"))
    }

    #[test]
    fn what_is_written_is_read() {
        for (wide, len) in [(false, 0), (true, 1), (false, u64::from(u32::MAX)), (true, u64::MAX)] {
            assert_eq!(read(&NpyHeader { wide, len }.bytes()).expect("a header of ours"), NpyHeader { wide, len });
        }
    }

    #[test]
    fn any_changed_byte_is_another_header_or_none() {
        let good = NpyHeader { wide: false, len: 907 }.bytes();
        for position in 0..HEADER_BYTES {
            for value in 0..=u8::MAX {
                let mut bytes = good;
                bytes[position] = value;
                match read(&bytes) {
                    // A digit may have become another one.
                    Ok(header) => assert_eq!(bytes, header.bytes(), "byte {position} is {value}"),
                    Err(error) => assert!(error.to_string().starts_with("x.npy: "), "{error}"),
                }
            }
        }
    }

    #[test]
    fn part_of_a_header_is_truncated() {
        let good = NpyHeader { wide: true, len: 5 }.bytes();
        for end in 0..HEADER_BYTES {
            assert!(read(&good[..end]).expect_err("no header").to_string().contains("truncated"));
        }
    }
}

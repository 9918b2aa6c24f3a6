//! The `.npy` format, as far as a plan needs it: one-dimensional, little-endian, 4 or 8 bytes a value.
//!
//! Source of the format: the NumPy Enhancement Proposal 1 (R. Kern) and numpy's `format.py` documentation.

use std::io::Read;
use std::path::Path;

use crate::error::PackError;

/// Bytes of a header this library writes; a multiple of 64, so that mapped values are aligned.
pub(crate) const HEADER_BYTES: usize = 128;
const MAGIC: &[u8] = b"\x93NUMPY";
/// A one-dimensional header is well under this; more is no array of ours.
const LONGEST_HEADER: usize = 4096;

/// The header of an array of `len` signed integers of 4 or 8 bytes.
pub(crate) fn header(wide: bool, len: u64) -> [u8; HEADER_BYTES] {
    let text = format!("{{'descr': '{}', 'fortran_order': False, 'shape': ({len},), }}", descr(wide));
    let mut bytes = [b' '; HEADER_BYTES];
    bytes[..MAGIC.len()].copy_from_slice(MAGIC);
    bytes[6..8].copy_from_slice(&[1, 0]);
    bytes[8..10].copy_from_slice(&((HEADER_BYTES - 10) as u16).to_le_bytes());
    bytes[10..10 + text.len()].copy_from_slice(text.as_bytes());
    bytes[HEADER_BYTES - 1] = b'\n';
    bytes
}

fn descr(wide: bool) -> &'static str {
    if wide { "<i8" } else { "<i4" }
}

/// What a header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) wide: bool,
    pub(crate) len: u64,
    /// Where the values begin in the file.
    pub(crate) offset: u64,
}

/// Read a header; an error is a sentence that says what is wrong with it.
pub(crate) fn read_header(file: &mut impl Read, path: &Path) -> Result<Layout, PackError> {
    let wrong = |reason: String| PackError::Format { path: path.to_path_buf(), reason };
    let mut read = |bytes: &mut [u8]| {
        file.read_exact(bytes).map_err(|source| {
            if source.kind() == std::io::ErrorKind::UnexpectedEof {
                wrong("is truncated within its header; make the plan again".into())
            } else {
                PackError::Io { path: path.to_path_buf(), source }
            }
        })
    };
    let mut start = [0u8; 8];
    read(&mut start)?;
    if &start[..6] != MAGIC {
        return Err(wrong("is not a .npy file".into()));
    }
    let mut size = [0u8; 4];
    let (header_len, prefix) = match start[6] {
        1 => {
            read(&mut size[..2])?;
            (u32::from_le_bytes(size) as usize, 10)
        }
        2 | 3 => {
            read(&mut size)?;
            (u32::from_le_bytes(size) as usize, 12)
        }
        version => return Err(wrong(format!("has the unknown .npy version {version}"))),
    };
    if header_len > LONGEST_HEADER {
        return Err(wrong(format!("has a header of {header_len} bytes; a plan's are at most {LONGEST_HEADER}")));
    }
    let mut text = vec![0u8; header_len];
    read(&mut text)?;
    let text = String::from_utf8(text).map_err(|_| wrong("has a header that is not text".into()))?;
    let wide = match value_of(&text, "descr") {
        Some(value) if value.starts_with("'<i4'") => false,
        Some(value) if value.starts_with("'<i8'") => true,
        Some(value) => {
            let found: String = value.chars().take_while(|&c| c != ',').collect();
            return Err(wrong(format!("has the dtype {found}; a plan's arrays are '<i4' (int32) or '<i8' (int64)")));
        }
        None => return Err(wrong("has a header without descr".into())),
    };
    if !value_of(&text, "fortran_order").is_some_and(|value| value.starts_with("False")) {
        return Err(wrong("is not in C order".into()));
    }
    let shape = value_of(&text, "shape")
        .and_then(|value| value.strip_prefix('('))
        .and_then(|value| value.split_once(')'))
        .map(|(inside, _)| inside.trim().to_owned())
        .ok_or_else(|| wrong("has a header without shape".into()))?;
    let len = shape
        .strip_suffix(',')
        .and_then(|digits| digits.trim().parse::<u64>().ok())
        .ok_or_else(|| wrong(format!("has the shape ({shape}); a plan's arrays have one dimension")))?;
    Ok(Layout { wide, len, offset: (prefix + header_len) as u64 })
}

/// The text after `'key':` in a header.
fn value_of<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("'{key}'"))?;
    Some(rest.trim_start().strip_prefix(':')?.trim_start())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for (wide, len) in [(false, 0), (true, 1), (false, u64::from(u32::MAX)), (true, u64::MAX)] {
            let bytes = header(wide, len);
            let layout = read_header(&mut &bytes[..], Path::new("x.npy")).expect("a header of ours");
            assert_eq!(layout, Layout { wide, len, offset: HEADER_BYTES as u64 });
        }
    }
}

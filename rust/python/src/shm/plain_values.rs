//! The content of a message of the task queue: bytes, or a plain value that needs no pickle.
//!
//! Plain are `None`, `bool`, `int` of 64 bits, `float`, `complex` and `str`, of exactly these types. The highest byte
//! of a message's kind has the form, so a kind is a number below 2²⁴.
//!
//! Invariants: a plain value arrives as an equal one of the same type. Bytes arrive as bytes; so do bytes that are
//! marked as a value but cannot be one.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyComplex, PyFloat, PyInt, PyString};

const FORM_SHIFT: u32 = 24;
const KIND: u32 = (1 << FORM_SHIFT) - 1;

const BYTES: u32 = 0;
const NONE: u32 = 1;
const BOOL: u32 = 2;
const INT: u32 = 3;
const FLOAT: u32 = 4;
const COMPLEX: u32 = 5;
const STR: u32 = 6;

/// The most bytes of a value other than a text.
const NUMBER_BYTES: usize = 16;

/// The content of a message.
pub(super) struct BytesOrPlainValue<'a> {
    form: u32,
    payload: Payload<'a>,
}

enum Payload<'a> {
    Borrowed(&'a [u8]),
    Number([u8; NUMBER_BYTES], usize),
}

impl<'a> BytesOrPlainValue<'a> {
    /// Returns the content for a plain value; `None` for everything else.
    pub(super) fn plain(value: &'a Bound<'_, PyAny>) -> Option<Self> {
        if value.is_exact_instance_of::<PyInt>() {
            return value.extract::<i64>().ok().map(|value| Self::number(INT, &value.to_le_bytes()));
        }
        if value.is_exact_instance_of::<PyString>() {
            // Lone surrogates have no UTF-8.
            let text = value.cast::<PyString>().ok()?.to_str().ok()?;
            return Some(Self { form: STR, payload: Payload::Borrowed(text.as_bytes()) });
        }
        if value.is_exact_instance_of::<PyFloat>() {
            return value.extract::<f64>().ok().map(|value| Self::number(FLOAT, &value.to_le_bytes()));
        }
        if value.is_none() {
            return Some(Self::number(NONE, &[]));
        }
        if let Ok(value) = value.cast_exact::<PyBool>() {
            return Some(Self::number(BOOL, &[u8::from(value.is_true())]));
        }
        let value = value.cast_exact::<PyComplex>().ok()?;
        let mut parts = [0; 16];
        parts[..8].copy_from_slice(&value.real().to_le_bytes());
        parts[8..].copy_from_slice(&value.imag().to_le_bytes());
        Some(Self::number(COMPLEX, &parts))
    }

    /// Returns the content for bytes or a plain value; `None` for everything else.
    pub(super) fn of(value: &'a Bound<'_, PyAny>) -> Option<Self> {
        if let Ok(bytes) = value.cast_exact::<PyBytes>() {
            return Some(Self { form: BYTES, payload: Payload::Borrowed(bytes.as_bytes()) });
        }
        Self::plain(value)
    }

    /// Returns the kind of the message, with the form; `None` if `kind` is too large.
    pub(super) fn kind(&self, kind: u32) -> Option<u32> {
        (kind <= KIND).then_some(self.form << FORM_SHIFT | kind)
    }

    fn number(form: u32, bytes: &[u8]) -> Self {
        let mut number = [0; NUMBER_BYTES];
        number[..bytes.len()].copy_from_slice(bytes);
        Self { form, payload: Payload::Number(number, bytes.len()) }
    }
}

impl AsRef<[u8]> for BytesOrPlainValue<'_> {
    fn as_ref(&self) -> &[u8] {
        match &self.payload {
            Payload::Borrowed(bytes) => bytes,
            Payload::Number(bytes, length) => &bytes[..*length],
        }
    }
}

/// Returns whether `value` is plain and takes at most `room` bytes, so that a message carries it as it is.
///
/// Plain are `None`, `bool`, `int` of 64 bits, `float`, `complex` and `str`, of exactly these types.
#[pyfunction]
pub(crate) fn is_plain(value: &Bound<'_, PyAny>, room: usize) -> bool {
    BytesOrPlainValue::plain(value).is_some_and(|content| content.as_ref().len() <= room)
}

/// Returns the kind, without the form, and the content of a message.
pub(super) fn open<'py>(py: Python<'py>, kind: u32, payload: &[u8]) -> (u32, Bound<'py, PyAny>) {
    let content = value(py, kind >> FORM_SHIFT, payload).unwrap_or_else(|| PyBytes::new(py, payload).into_any());
    (kind & KIND, content)
}

fn value<'py>(py: Python<'py>, form: u32, payload: &[u8]) -> Option<Bound<'py, PyAny>> {
    match form {
        NONE => Some(py.None().into_bound(py)),
        BOOL => Some(PyBool::new(py, *payload.first()? != 0).to_owned().into_any()),
        INT => i64::from_le_bytes(payload.try_into().ok()?).into_pyobject(py).ok().map(Bound::into_any),
        FLOAT => Some(PyFloat::new(py, float(payload)?).into_any()),
        COMPLEX => {
            let (real, imag) = payload.split_at_checked(8)?;
            Some(PyComplex::from_doubles(py, float(real)?, float(imag)?).into_any())
        }
        STR => Some(PyString::new(py, core::str::from_utf8(payload).ok()?).into_any()),
        _ => None,
    }
}

fn float(bytes: &[u8]) -> Option<f64> {
    Some(f64::from_le_bytes(bytes.try_into().ok()?))
}

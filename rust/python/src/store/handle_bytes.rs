//! `dumps` and `loads`: nested containers of handles as bytes.
//!
//! Invariants: loading makes handles, Python's own containers and plain values, and nothing else. Dumping anything else
//! is refused with its path.

use pyo3::exceptions::PyRecursionError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use tundish_store::StoreError;
use tundish_store::handles::{DEEPEST, HandleReader, HandleWriter, Value};

use super::handle::RTensor;
use crate::error::BindingError;

/// The most items for which memory is allocated before they are read.
const MAX_PREALLOCATED: usize = 1024;

/// An error, and the path to the refused object from the inside out.
struct ErrorAtPath {
    error: PyErr,
    path: Vec<String>,
}

impl ErrorAtPath {
    fn new(reason: String) -> Self {
        ErrorAtPath { error: BindingError::Type(reason).into(), path: Vec::new() }
    }
}

impl<T: Into<PyErr>> From<T> for ErrorAtPath {
    fn from(error: T) -> Self {
        ErrorAtPath { error: error.into(), path: Vec::new() }
    }
}

/// A nested structure of handles as bytes: dicts, lists and tuples of handles, numbers, texts, bytes and None.
///
/// Raises `InvalidTypeError`, with the path, for anything else.
#[pyfunction]
pub(crate) fn dump_handles<'py>(value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    let mut writer = HandleWriter::new();
    write(value, &mut writer, 0).map_err(|refused| {
        let path: String = refused.path.iter().rev().map(String::as_str).collect();
        let reason = refused.error.value(value.py()).to_string();
        PyErr::from(BindingError::Type(format!("obj{path} {reason}")))
    })?;
    Ok(PyBytes::new(value.py(), &writer.finish()))
}

fn write(value: &Bound<'_, PyAny>, writer: &mut HandleWriter, depth: usize) -> Result<(), ErrorAtPath> {
    if let Ok(handle) = value.cast_exact::<RTensor>() {
        if handle.get().has_reference() {
            return Err(ErrorAtPath::new(
                "is a handle of Ray's object store, whose reference only Ray itself can carry: pass the handle to a \
                 remote function or actor as it is"
                    .to_owned(),
            ));
        }
        // A backend may give addresses of its own kind.
        let or_not = |error: StoreError| ErrorAtPath::new(format!("is a handle that cannot travel: {error}"));
        return writer.handle(&handle.get().handle).map_err(or_not);
    }
    if let Ok(text) = value.cast_exact::<PyString>() {
        return put(writer, &Value::Text(text.to_str()?));
    }
    if value.is_none() {
        return put(writer, &Value::None);
    }
    if let Ok(value) = value.cast_exact::<PyBool>() {
        return put(writer, &Value::Bool(value.is_true()));
    }
    if let Ok(value) = value.cast_exact::<PyInt>() {
        if let Ok(value) = value.extract::<i64>() {
            return put(writer, &Value::Integer(value));
        }
        let length = value.call_method0("bit_length")?.extract::<usize>()? / 8 + 1;
        let options = PyDict::new(value.py());
        options.set_item("signed", true)?;
        let bytes = value.call_method("to_bytes", (length, "little"), Some(&options))?;
        return put(writer, &Value::LargeInteger(bytes.cast_into::<PyBytes>().map_err(PyErr::from)?.as_bytes()));
    }
    if let Ok(value) = value.cast_exact::<PyFloat>() {
        return put(writer, &Value::Float(value.value()));
    }
    if let Ok(value) = value.cast_exact::<PyBytes>() {
        return put(writer, &Value::Bytes(value.as_bytes()));
    }
    if depth == DEEPEST {
        let reason = format!("lies deeper than {DEEPEST} containers, or in a container that contains itself");
        return Err(ErrorAtPath::new(reason));
    }
    if let Ok(items) = value.cast_exact::<PyDict>() {
        put(writer, &Value::Dict(items.len()))?;
        for (key, item) in items {
            write(&key, writer, depth + 1).map_err(|refused| inside(refused, " (a key)".to_owned()))?;
            write(&item, writer, depth + 1).map_err(|refused| inside(refused, label(&key)))?;
        }
        return Ok(());
    }
    if let Ok(items) = value.cast_exact::<PyList>() {
        put(writer, &Value::List(items.len()))?;
        return write_all(items.iter(), writer, depth);
    }
    if let Ok(items) = value.cast_exact::<PyTuple>() {
        put(writer, &Value::Tuple(items.len()))?;
        return write_all(items.iter(), writer, depth);
    }
    let kind = value.get_type().fully_qualified_name()?;
    Err(ErrorAtPath::new(format!(
        "is a {kind}: handles travel in dicts, lists and tuples, beside numbers, texts, bytes and None; remotize tensors \
         first, and make anything else one of these"
    )))
}

fn write_all<'py>(
    items: impl Iterator<Item = Bound<'py, PyAny>>,
    writer: &mut HandleWriter,
    depth: usize,
) -> Result<(), ErrorAtPath> {
    for (place, item) in items.enumerate() {
        write(&item, writer, depth + 1).map_err(|refused| inside(refused, format!("[{place}]")))?;
    }
    Ok(())
}

fn put(writer: &mut HandleWriter, value: &Value<'_>) -> Result<(), ErrorAtPath> {
    Ok(writer.write(value).map_err(BindingError::from)?)
}

fn inside(mut refused: ErrorAtPath, label: String) -> ErrorAtPath {
    refused.path.push(label);
    refused
}

fn label(key: &Bound<'_, PyAny>) -> String {
    key.repr().map_or_else(|_| "[…]".to_owned(), |text| format!("[{text}]"))
}

/// Restores what `dump_handles` wrote.
///
/// Raises `InvalidInputError` for bytes that it did not make.
#[pyfunction]
pub(crate) fn load_handles<'py>(py: Python<'py>, data: &[u8]) -> Result<Bound<'py, PyAny>, BindingError> {
    let mut reader = HandleReader::new(data)?;
    // Many small objects are made, and the garbage collector would search them again and again.
    let gc = py.import("gc")?;
    let was_enabled: bool = gc.call_method0("isenabled")?.extract()?;
    gc.call_method0("disable")?;
    let value = read(py, &mut reader, 0);
    if was_enabled {
        gc.call_method0("enable")?;
    }
    let value = value?;
    reader.finish()?;
    Ok(value)
}

fn read<'py>(py: Python<'py>, reader: &mut HandleReader<'_>, depth: usize) -> Result<Bound<'py, PyAny>, BindingError> {
    let value = reader.read()?;
    if depth == DEEPEST && matches!(value, Value::List(_) | Value::Tuple(_) | Value::Dict(_)) {
        return Err(BindingError::Value(format!("these handles lie in more than {DEEPEST} containers")));
    }
    Ok(match value {
        Value::None => py.None().into_bound(py),
        Value::Bool(value) => PyBool::new(py, value).to_owned().into_any(),
        Value::Integer(value) => PyInt::new(py, value).into_any(),
        Value::LargeInteger(bytes) => {
            let options = PyDict::new(py);
            options.set_item("signed", true)?;
            py.get_type::<PyInt>().call_method("from_bytes", (PyBytes::new(py, bytes), "little"), Some(&options))?
        }
        Value::Float(value) => PyFloat::new(py, value).into_any(),
        Value::Text(text) => PyString::new(py, text).into_any(),
        Value::Bytes(bytes) => PyBytes::new(py, bytes).into_any(),
        Value::List(length) => PyList::new(py, read_all(py, reader, length, depth)?)?.into_any(),
        Value::Tuple(length) => PyTuple::new(py, read_all(py, reader, length, depth)?)?.into_any(),
        Value::Dict(length) => {
            let dict = PyDict::new(py);
            for _ in 0..length {
                let key = read(py, reader, depth + 1)?;
                let item = read(py, reader, depth + 1)?;
                dict.set_item(key, item).map_err(|error| unless_it_is_ours(py, error))?;
            }
            dict.into_any()
        }
        Value::Handle(handle) => Bound::new(py, RTensor::new(handle))?.into_any(),
    })
}

fn read_all<'py>(
    py: Python<'py>,
    reader: &mut HandleReader<'_>,
    length: usize,
    depth: usize,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    // Each of the nested containers may declare as many items as there are bytes left.
    let mut items = Vec::with_capacity(length.min(MAX_PREALLOCATED));
    for _ in 0..length {
        items.push(read(py, reader, depth + 1)?);
    }
    Ok(items)
}

/// The error of an unhashable key.
fn unless_it_is_ours(py: Python<'_>, error: PyErr) -> PyErr {
    if error.is_instance_of::<PyRecursionError>(py) {
        return error;
    }
    BindingError::from(StoreError::Invalid(format!("these handles are damaged: {}", error.value(py)))).into()
}

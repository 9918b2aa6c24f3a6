//! Element types: converts `torch.dtype` to codes and back.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};
use tundish_store::{Dtype, Shape, TensorMeta};

use crate::error::BindingError;

/// The element types of this version of torch.
struct DtypeTable {
    /// Codes and their objects.
    objects: Vec<(u8, Py<PyAny>)>,
    /// Codes by object.
    codes: Py<PyDict>,
}

static DTYPES: PyOnceLock<DtypeTable> = PyOnceLock::new();

/// The first use imports torch.
fn dtypes(py: Python<'_>) -> PyResult<&DtypeTable> {
    DTYPES.get_or_try_init(py, || {
        let torch = py.import("torch")?;
        let codes = PyDict::new(py);
        let mut objects = Vec::new();
        for dtype in Dtype::all() {
            // An older torch lacks some.
            if let Some(object) = torch.getattr_opt(dtype.name())? {
                codes.set_item(&object, dtype.code())?;
                objects.push((dtype.code(), object.unbind()));
            }
        }
        Ok(DtypeTable { objects, codes: codes.unbind() })
    })
}

/// The dtypes whose tensors can be stored.
#[pyfunction]
pub(crate) fn stored_dtypes(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyAny>>> {
    Ok(dtypes(py)?.objects.iter().map(|(_, object)| object.bind(py).clone()).collect())
}

/// The `torch.dtype` of an element type.
pub(super) fn object_of(py: Python<'_>, dtype: Dtype) -> PyResult<Bound<'_, PyAny>> {
    let found = dtypes(py)?.objects.iter().find(|(code, _)| *code == dtype.code());
    found
        .map(|(_, object)| object.bind(py).clone())
        .ok_or_else(|| BindingError::Type(format!("this version of torch has no torch.{}", dtype.name())).into())
}

/// The element type of a `torch.dtype`.
pub(super) fn dtype_of(object: &Bound<'_, PyAny>) -> Result<Dtype, BindingError> {
    let code = dtypes(object.py())?.codes.bind(object.py()).get_item(object)?;
    let code = code.ok_or_else(|| {
        BindingError::Type(format!("tensors of {object} cannot be stored for others; convert it first"))
    })?;
    Ok(Dtype::from_code(code.extract()?)?)
}

/// Element type and shape of a tensor.
pub(super) fn meta_of(tensor: &Bound<'_, PyAny>) -> Result<TensorMeta, BindingError> {
    let py = tensor.py();
    let dtype = dtype_of(&tensor.getattr(intern!(py, "dtype"))?)?;
    let sizes = tensor.getattr(intern!(py, "shape"))?;
    let sizes = sizes.cast::<PyTuple>().map_err(PyErr::from)?;
    let shape = sizes.iter().map(|size| size.extract::<u64>()).collect::<PyResult<Shape>>()?;
    Ok(TensorMeta::new(dtype, shape)?)
}

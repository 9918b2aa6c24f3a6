//! `RTensor`: a handle of a tensor that another process holds.
//!
//! Invariant: a handle is small, and holds no tensor.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::basic::CompareOp;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PySlice, PyString, PyTuple, PyType};
use tundish_store::{Dtype, Selection, ShardId, StoreError, TensorMeta, Wanted};

use super::dtypes::{meta_of, object_of};
use crate::error::BindingError;

static SHARD: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static SIZE: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// An owner's address is no longer than this: a name of a host and a port.
const LONGEST_OWNER: usize = 300;

/// Shard id, owner, name of the dtype, shape of the whole shard, and the chosen rows.
type Fields = (String, String, &'static str, Vec<u64>, Option<(u64, u64)>);

/// The function that restores a handle, and its arguments.
type Reduced<'py> = (Bound<'py, PyAny>, (Fields, Option<Py<PyAny>>));

/// Names a shard, or some of its rows. Takes 40 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ShardHandle {
    pub(super) id: ShardId,
    pub(super) shared: Arc<SharedFields>,
    pub(super) rows: Selection,
}

/// The fields that many handles share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SharedFields {
    /// The address that the owner of the shard serves at.
    pub(super) owner: Arc<str>,
    /// Element type and shape of the whole shard.
    pub(super) meta: Arc<TensorMeta>,
}

/// Checks the address of an owner.
fn check_owner(address: &str) -> Result<(), BindingError> {
    let refuse = |why: String| {
        let rule =
            format!("an address of an owner is host:port, up to {LONGEST_OWNER} ASCII characters without spaces");
        Err(BindingError::Value(format!("{rule}; {why}")))
    };
    if let Some((place, _)) = address.char_indices().find(|(_, character)| !character.is_ascii_graphic()) {
        return refuse(format!("character {place} of {address:?} is none of these"));
    }
    if address.len() > LONGEST_OWNER {
        return refuse(format!("this one has {}", address.len()));
    }
    Ok(())
}

/// A handle of a tensor, or of some of its rows, that its owner serves.
///
/// `shard` is its location. `data` is a meta tensor of its shape and dtype. `to_local()` fetches it.
#[pyclass(frozen, module = "tundish.rtensor")]
pub(crate) struct RTensor {
    pub(super) handle: ShardHandle,
    /// A reference of the backend, such as an `ObjectRef` of Ray.
    reference: Mutex<Option<Py<PyAny>>>,
}

impl RTensor {
    pub(super) fn new(handle: ShardHandle) -> Self {
        RTensor::with_reference(handle, None)
    }

    /// Element type and shape of the tensor, or of the chosen rows.
    pub(super) fn meta(&self) -> Result<TensorMeta, BindingError> {
        Ok(self.handle.rows.meta_of(&self.handle.shared.meta)?)
    }

    pub(super) fn wanted(&self) -> PyResult<Wanted> {
        let ShardHandle { id, shared, rows } = &self.handle;
        Ok(Wanted { owner: Arc::clone(&shared.owner), id: id.clone(), rows: rows.clone(), meta: self.meta()? })
    }

    fn reference_of(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.lock().as_ref().map(|reference| reference.clone_ref(py))
    }

    fn with_reference(handle: ShardHandle, reference: Option<Py<PyAny>>) -> Self {
        RTensor { handle, reference: Mutex::new(reference) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Py<PyAny>>> {
        self.reference.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn size<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        SIZE.import(py, "torch", "Size")?.call1((PyTuple::new(py, self.meta()?.shape())?,))
    }
}

/// A string field of a `TensorShardInfo`.
fn text_of<'py>(shard: &Bound<'py, PyAny>, name: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyString>> {
    let found = shard.getattr_opt(name)?.and_then(|found| found.cast_into::<PyString>().ok());
    found.ok_or_else(|| {
        let reason =
            format!("shard is a {}, and has to be a TensorShardInfo(shard_id, node_addr) of two texts", kind_of(shard));
        BindingError::Type(reason).into()
    })
}

/// Parses a shard id. A lone surrogate becomes a character that no id has.
pub(super) fn name_of(text: &Bound<'_, PyString>) -> Result<ShardId, BindingError> {
    let name = text.to_string_lossy().parse::<ShardId>().map_err(StoreError::from);
    Ok(name?)
}

fn kind_of(object: &Bound<'_, PyAny>) -> String {
    object.get_type().qualname().map_or_else(|_| "foreign object".to_owned(), |name| name.to_string())
}

#[pymethods]
impl RTensor {
    /// `shard`: a `TensorShardInfo`; `data`: a tensor of the shard's shape and dtype, on any device, such as meta.
    #[new]
    fn make(shard: &Bound<'_, PyAny>, data: &Bound<'_, PyAny>) -> Result<Self, BindingError> {
        let py = shard.py();
        let id = name_of(&text_of(shard, intern!(py, "shard_id"))?)?;
        let owner: Arc<str> = text_of(shard, intern!(py, "node_addr"))?.to_string_lossy().into();
        check_owner(&owner)?;
        let reference = shard.getattr_opt(intern!(py, "ref"))?.unwrap_or_else(|| py.None().into_bound(py));
        if !data.hasattr(intern!(py, "is_meta"))? {
            let reason = format!("data is a {}, and has to be a tensor: one on the device meta will do", kind_of(data));
            return Err(BindingError::Type(reason));
        }
        let shared = Arc::new(SharedFields { owner, meta: Arc::new(meta_of(data)?) });
        let reference = (!reference.is_none()).then(|| reference.unbind());
        Ok(RTensor::with_reference(ShardHandle { id, shared, rows: Selection::All }, reference))
    }

    /// Its location.
    #[getter]
    fn shard<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let ShardHandle { id, shared, .. } = &self.handle;
        let reference = self.reference_of(py);
        SHARD.import(py, "tundish.rtensor.handles", "TensorShardInfo")?.call1((
            id.to_string(),
            &*shared.owner,
            reference,
        ))
    }

    /// The name of the shard.
    #[getter]
    fn shard_id(&self) -> String {
        self.handle.id.to_string()
    }

    /// The address of its owner.
    #[getter]
    fn node_addr(&self) -> &str {
        &self.handle.shared.owner
    }

    /// The reference of the backend, or None.
    #[getter]
    fn r#ref(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.reference_of(py)
    }

    /// The rows of the shard, or None for all.
    #[getter]
    fn rows(&self) -> Option<(u64, u64)> {
        self.handle.rows.bounds()
    }

    /// A tensor of the shape and dtype on the device meta.
    #[getter]
    fn data<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let options = PyDict::new(py);
        options.set_item("dtype", self.dtype(py)?)?;
        options.set_item("device", "meta")?;
        py.import("torch")?.call_method("empty", (self.size(py)?,), Some(&options))
    }

    /// Fetches the tensor, which the caller may write to. Within a step, later calls find its bytes in the fetch
    /// buffer.
    ///
    /// Raises as `localize`.
    fn to_local<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("tundish.rtensor")?.call_method1("localize", (slf,))
    }

    /// The shape of the tensor, as a `torch.Size`.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.size(py)
    }

    /// The dtype of the tensor.
    #[getter]
    fn dtype<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        object_of(py, self.handle.shared.meta.dtype())
    }

    /// The number of dimensions of the tensor.
    #[getter]
    fn ndim(&self) -> usize {
        self.handle.shared.meta.shape().len()
    }

    /// Bytes of the tensor.
    #[getter]
    fn nbytes(&self) -> PyResult<u64> {
        Ok(self.meta()?.nbytes())
    }

    /// The number of rows of the tensor.
    fn __len__(&self) -> PyResult<usize> {
        match self.meta()?.shape().first() {
            Some(&rows) => Ok(usize::try_from(rows)?),
            None => Err(BindingError::Type("a tensor without dimensions has no length".to_owned()).into()),
        }
    }

    /// A handle of some rows: only they are fetched.
    fn __getitem__(slf: &Bound<'_, Self>, key: &Bound<'_, PyAny>) -> PyResult<Self> {
        let this = slf.get();
        let refuse = |why: &str| Err(BindingError::Type(format!("{why}: make it local first")).into());
        let Ok(slice) = key.cast::<PySlice>() else {
            return refuse("of a handle rows can be chosen with a slice, as in rt[2:5], and nothing else");
        };
        if this.ndim() == 0 {
            return refuse("a tensor without dimensions has no rows to choose");
        }
        let indices = slice.indices(isize::try_from(this.__len__()?)?)?;
        if indices.step != 1 {
            return refuse("rows of a handle lie one after the other, so the step of a slice is 1");
        }
        let start = this.handle.rows.first() + indices.start as u64;
        let rows = Selection::range(start..start + indices.slicelength as u64);
        let handle = ShardHandle { rows, ..this.handle.clone() };
        Ok(RTensor::with_reference(handle, this.reference_of(slf.py())))
    }

    fn __richcmp__(&self, other: &Bound<'_, PyAny>, operator: CompareOp) -> PyResult<Py<PyAny>> {
        let py = other.py();
        let Ok(other) = other.cast::<RTensor>() else { return Ok(py.NotImplemented()) };
        let same = self.handle == other.get().handle;
        Ok(match operator {
            CompareOp::Eq => same.into_pyobject(py)?.to_owned().into_any().unbind(),
            CompareOp::Ne => (!same).into_pyobject(py)?.to_owned().into_any().unbind(),
            _ => py.NotImplemented(),
        })
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.handle.id.hash(&mut hasher);
        self.handle.rows.hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> Result<String, BindingError> {
        let ShardHandle { id, shared, rows } = &self.handle;
        let SharedFields { owner, meta } = &**shared;
        let chosen = if *rows == Selection::All { String::new() } else { format!(", {rows}") };
        let (selected, dtype) = (self.meta()?, meta.dtype().name());
        let shape = selected.shape();
        Ok(format!("RTensor(shape={shape:?}, dtype=torch.{dtype}, shard {id} of {owner}{chosen})"))
    }

    /// The plain values that `from_fields` makes it of again: shard id, owner, name of the dtype, shape of the whole
    /// shard, and the chosen rows or None. Raises `InvalidInputError` where the owner has no address that travels.
    fn fields(&self) -> Result<Fields, BindingError> {
        let ShardHandle { id, shared, rows } = &self.handle;
        let SharedFields { owner, meta } = &**shared;
        check_owner(owner)?;
        Ok((id.to_string(), owner.to_string(), meta.dtype().name(), meta.shape().to_vec(), rows.bounds()))
    }

    /// A handle of these `fields`, which anybody may have made. It shares memory with `like` where they are equal.
    ///
    /// Raises `InvalidInputError` for fields of no handle.
    #[staticmethod]
    #[pyo3(signature = (shard_id, owner, dtype, shape, rows=None, *, like=None))]
    fn from_fields(
        shard_id: &str,
        owner: &str,
        dtype: &str,
        shape: Vec<u64>,
        rows: Option<(u64, u64)>,
        like: Option<&Bound<'_, RTensor>>,
    ) -> Result<Self, BindingError> {
        check_owner(owner)?;
        let id = shard_id.parse::<ShardId>().map_err(StoreError::from)?;
        let meta = TensorMeta::new(Dtype::from_name(dtype)?, shape)?;
        let rows = Selection::from(rows);
        rows.meta_of(&meta)?;
        let before = like.map(|like| &like.get().handle.shared);
        let shared = match before.filter(|shared| &*shared.owner == owner && *shared.meta == meta) {
            Some(shared) => Arc::clone(shared),
            None => Arc::new(SharedFields { owner: owner.into(), meta: Arc::new(meta) }),
        };
        Ok(RTensor::new(ShardHandle { id, shared, rows }))
    }

    /// Pickles its fields, and the reference of the backend.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Reduced<'py>> {
        let restore = slf.py().import("tundish.rtensor.handles")?.getattr("restore")?;
        Ok((restore, (slf.get().fields()?, slf.get().reference_of(slf.py()))))
    }

    /// A handle of the same shard with this `ref`, or without one.
    fn with_ref(&self, reference: Option<Py<PyAny>>) -> Self {
        RTensor::with_reference(self.handle.clone(), reference)
    }

    /// Drops its `ref`.
    fn drop_ref(&self) {
        let reference = self.lock().take();
        drop(reference);
    }
}

impl RTensor {
    /// The id of its shard.
    pub(super) fn id(&self) -> &ShardId {
        &self.handle.id
    }
}

//! The one mapping from the errors of the core crates to Python's.
//!
//! The classes live in `tundish.errors`; each derives from `TundishError` and from the builtin that fits.

use std::path::Path;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tundish_commit::CommitError;
use tundish_commit::staging::OutOfMemory;
use tundish_packing::PackError;

/// Everything a binding can fail with.
#[derive(Debug)]
pub(crate) enum BindingError {
    Pack(PackError),
    Commit(CommitError),
    /// No room for staging memory.
    Memory(OutOfMemory),
    /// An argument of the wrong type or dtype.
    Type(String),
    /// An argument of a value that cannot be used.
    Value(String),
    /// Raised by Python code that was called, or by a signal.
    Python(PyErr),
}

impl From<PackError> for BindingError {
    fn from(error: PackError) -> Self {
        Self::Pack(error)
    }
}

impl From<CommitError> for BindingError {
    fn from(error: CommitError) -> Self {
        Self::Commit(error)
    }
}

impl From<OutOfMemory> for BindingError {
    fn from(error: OutOfMemory) -> Self {
        Self::Memory(error)
    }
}

impl From<PyErr> for BindingError {
    fn from(error: PyErr) -> Self {
        Self::Python(error)
    }
}

impl From<BindingError> for PyErr {
    fn from(error: BindingError) -> Self {
        match error {
            BindingError::Python(error) => error,
            BindingError::Type(message) => raise("InvalidTypeError", &message),
            BindingError::Value(message) => raise("InvalidInputError", &message),
            BindingError::Memory(error) => raise("OutOfMemoryError", &error.to_string()),
            BindingError::Pack(error) => pack_error(&error),
            BindingError::Commit(error) => commit_error(&error),
        }
    }
}

fn pack_error(error: &PackError) -> PyErr {
    let message = error.to_string();
    match error {
        PackError::NoSuchPack { .. } => raise("NoSuchPackError", &message),
        PackError::Format { .. } => raise("PlanFormatError", &message),
        PackError::Mismatch(_) => raise("PlanMismatchError", &message),
        PackError::Missing { path, reason } => raise_os("NotFoundError", ENOENT, reason, path),
        PackError::Io { path, source } => {
            raise_os("StorageError", source.raw_os_error().unwrap_or(EIO), &system_message(source), path)
        }
        PackError::Commit(error) => commit_error(error),
        _ => raise("InvalidInputError", &message),
    }
}

const EIO: i32 = 5;
const ENOENT: i32 = 2;

fn commit_error(error: &CommitError) -> PyErr {
    let class = match error {
        CommitError::TargetExists { .. } | CommitError::FileExists { .. } | CommitError::NameTaken { .. } => {
            "AlreadyExistsError"
        }
        CommitError::RootInUse { .. } => "RootInUseError",
        CommitError::StepExists { .. } => "StepExistsError",
        CommitError::StepOrder { .. } => return raise("StepOrderError", &error.to_string()),
        CommitError::CheckpointInUse { .. } => "CheckpointInUseError",
        CommitError::ParentMissing { .. } => "NotFoundError",
        CommitError::InvalidName { .. } | CommitError::InvalidWrite { .. } | CommitError::NotPublishable { .. } => {
            return raise("InvalidInputError", &error.to_string());
        }
        CommitError::Corrupt { files, .. } => return corrupt(&error.to_string(), files),
        _ if error.raw_os_error() == Some(ENOENT) => "NotFoundError",
        _ => "StorageError",
    };
    // The message names the path too, and what was being done to it.
    raise_os(class, error.raw_os_error().unwrap_or(EIO), &without_number(&error.to_string()), error.path())
}

fn system_message(source: &std::io::Error) -> String {
    without_number(&source.to_string())
}

/// Without the number that Rust writes behind the system's words: the exception carries it as its `errno`.
fn without_number(text: &str) -> String {
    text.rsplit_once(" (os error").map_or(text, |(words, _)| words).to_owned()
}

/// An error of `tundish.errors`, made when it is raised.
fn raise(class: &str, message: &str) -> PyErr {
    make(class, |class| class.call1((message,)))
}

fn corrupt(message: &str, files: &[String]) -> PyErr {
    make("CorruptCheckpointError", |class| {
        let files = PyTuple::new(class.py(), files)?;
        class.call1((message, files))
    })
}

/// One that is an `OSError` too.
fn raise_os(class: &str, code: i32, message: &str, path: &Path) -> PyErr {
    let path = path.display().to_string();
    make(class, |class| class.call1((code, message, path)))
}

fn make(class: &str, call: impl for<'py> FnOnce(Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>) -> PyErr {
    Python::attach(|py| {
        let made = py.import("tundish.errors").and_then(|module| module.getattr(class)).and_then(call);
        match made {
            Ok(error) => PyErr::from_value(error),
            Err(error) => error,
        }
    })
}

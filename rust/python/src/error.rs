//! The one mapping from the errors of the core crates to Python's.
//!
//! The classes live in `tundish.errors`; each derives from `TundishError` and from the builtin that fits.

use std::path::Path;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use tundish_commit::CommitError;
use tundish_commit::staging::OutOfMemory;
use tundish_packing::PackError;
use tundish_shm::ShmError;
use tundish_store::StoreError;

/// Everything a binding can fail with.
#[derive(Debug)]
pub(crate) enum BindingError {
    Pack(PackError),
    Commit(CommitError),
    Shm(ShmError),
    Store(StoreError),
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

impl From<ShmError> for BindingError {
    fn from(error: ShmError) -> Self {
        Self::Shm(error)
    }
}

impl From<StoreError> for BindingError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
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
            BindingError::Shm(error) => shm_error(&error),
            BindingError::Store(error) => store_error(&error),
        }
    }
}

fn pack_error(error: &PackError) -> PyErr {
    let message = error.to_string();
    match error {
        PackError::NoSuchPack { .. } => raise("NoSuchPackError", &message),
        PackError::OutOfMemory { .. } => raise("OutOfMemoryError", &message),
        PackError::Format { .. } => raise("PlanFormatError", &message),
        PackError::Mismatch(_) => raise("PlanMismatchError", &message),
        PackError::Missing { path, reason } => raise_os("NotFoundError", ENOENT, reason, path),
        PackError::Io { path, source } => {
            raise_os("StorageError", source.raw_os_error().unwrap_or(EIO), &system_message(source), path)
        }
        PackError::NoRoom { path, .. } => raise_os("StorageError", ENOSPC, &message, path),
        PackError::Commit(error) => commit_error(error),
        _ => raise("InvalidInputError", &message),
    }
}

const ENOENT: i32 = 2;
const EIO: i32 = 5;
const EAGAIN: i32 = 11;
const EACCES: i32 = 13;
const EEXIST: i32 = 17;
const ENOMEM: i32 = 12;
const ENOSPC: i32 = 28;
const EADDRINUSE: i32 = 98;
const EADDRNOTAVAIL: i32 = 99;

fn commit_error(error: &CommitError) -> PyErr {
    let class = match error {
        CommitError::TargetExists { .. } | CommitError::FileExists { .. } | CommitError::NameTaken { .. } => {
            "AlreadyExistsError"
        }
        CommitError::RootInUse { .. } | CommitError::RootOpenHere { .. } => "RootInUseError",
        CommitError::StepExists { .. } => "StepExistsError",
        CommitError::StepOrder { .. } => return raise("StepOrderError", &error.to_string()),
        CommitError::CheckpointInUse { .. } | CommitError::CheckpointLocked { .. } => "CheckpointInUseError",
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

fn shm_error(error: &ShmError) -> PyErr {
    let message = without_number(&error.to_string());
    match error {
        ShmError::NoHeadroom { .. } => raise("OutOfMemoryError", &message),
        ShmError::Gone { segment, .. } | ShmError::Unreached { segment, .. } => {
            raise_os("SegmentGoneError", ENOENT, &message, Path::new(segment))
        }
        ShmError::Exists { path, .. } => raise_os("AlreadyExistsError", EEXIST, &message, path),
        ShmError::Missing { path } => raise_os("NotFoundError", ENOENT, &message, path),
        ShmError::NoSpace { path, .. } => raise_os("StorageError", ENOSPC, &message, path),
        // No room in the address space, or too many mappings.
        ShmError::Io { source, .. } if source.raw_os_error() == Some(ENOMEM) => raise("OutOfMemoryError", &message),
        ShmError::Io { object, source, .. } => {
            raise_os("StorageError", source.raw_os_error().unwrap_or(EIO), &message, Path::new(object))
        }
        ShmError::TimedOut { .. } => raise("TimedOutError", &message),
        _ => raise("InvalidInputError", &message),
    }
}

fn store_error(error: &StoreError) -> PyErr {
    let message = without_number(&error.to_string());
    match error {
        StoreError::Memory(error) => shm_error(error),
        StoreError::Full { .. } | StoreError::TooLarge { .. } => raise("TensorStoreFullError", &message),
        StoreError::Missing { .. }
        | StoreError::StepEnded { .. }
        | StoreError::StepTaken { .. }
        | StoreError::Drained { .. } => raise("ShardGoneError", &message),
        StoreError::Mismatch { .. } => raise("ShardMismatchError", &message),
        StoreError::Refused { status: 401 | 403, .. } => raise("NotAuthorizedError", &message),
        StoreError::Corrupt { .. }
        | StoreError::Unreachable { .. }
        | StoreError::Unanswered { .. }
        | StoreError::Refused { .. } => raise("TransferError", &message),
        StoreError::TimedOut { .. } => raise("TimedOutError", &message),
        StoreError::Io { object, kind, .. } => raise_os("StorageError", code_of(*kind), &message, Path::new(object)),
        _ => raise("InvalidInputError", &message),
    }
}

fn code_of(kind: std::io::ErrorKind) -> i32 {
    match kind {
        std::io::ErrorKind::AddrInUse => EADDRINUSE,
        std::io::ErrorKind::AddrNotAvailable => EADDRNOTAVAIL,
        std::io::ErrorKind::PermissionDenied => EACCES,
        std::io::ErrorKind::WouldBlock => EAGAIN,
        _ => EIO,
    }
}

fn system_message(source: &std::io::Error) -> String {
    without_number(&source.to_string())
}

/// Without the numbers that Rust writes behind the system's words: the exception carries one as its `errno`.
fn without_number(text: &str) -> String {
    let mut parts = text.split(" (os error ");
    let first = parts.next().unwrap_or_default();
    // A message of several errors has one for each.
    parts.fold(first.to_owned(), |words, part| words + part.split_once(')').map_or(part, |(_, rest)| rest))
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

/// An exception that is an `OSError` too.
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

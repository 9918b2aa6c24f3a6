//! The ways to a segment that another process has, one after the other.
//!
//! What always holds: waiting is done without the GIL, and the registry is told of the outcome with it.

use std::sync::Arc;

use pyo3::prelude::*;
use tundish_shm::lend::{self, Borrowed};
use tundish_shm::named::{self, Directory, SegmentName};
use tundish_shm::registry;
use tundish_shm::{Address, ShmError};

use super::look;
use super::segment::Role;
use crate::enter::{Door, enter};
use crate::error::BindingError;

/// What one way led to.
type Outcome = Result<Role, ShmError>;

/// Reaches the segment at `address` through a descriptor, by its `name`, or over a socket.
pub(super) fn reach(
    py: Python<'_>,
    address: &Address,
    inherited: Option<i32>,
    name: Option<&str>,
    socket_name: Option<&str>,
) -> PyResult<Role> {
    let (segment, mut tried) = match registry::attach(address, inherited) {
        Err(ShmError::Unreached { segment, tried }) => (segment, tried),
        outcome => return Ok(Role::Reader(outcome.map_err(BindingError::from)?)),
    };
    let by_name = || name.map(|name| find_named(py, name, Some(address)));
    let by_socket = || socket_name.map(|socket_name| borrow(py, socket_name, address, name.is_none()));
    let ways: [&dyn Fn() -> Option<PyResult<Outcome>>; 2] = [&by_name, &by_socket];
    for outcome in ways.into_iter().filter_map(|way| way()) {
        match outcome? {
            Ok(role) => return Ok(role),
            Err(gone @ ShmError::Gone { .. }) => return Err(BindingError::from(gone).into()),
            Err(error) => tried.push(error.to_string()),
        }
    }
    Err(BindingError::from(ShmError::Unreached { segment, tried }).into())
}

/// The segment of this name, if it is the one that was meant.
pub(super) fn find_named(py: Python<'_>, name: &str, meant: Option<&Address>) -> PyResult<Outcome> {
    let found = attempt(py, |door| {
        let (folder, name) = (Arc::new(Directory::standard()?), SegmentName::new(name)?);
        named::attach(folder, name, &mut || look(door))
    })?;
    Ok(found.and_then(|found| registry::attach_named(found, meant)).map(Role::Reader))
}

fn borrow(py: Python<'_>, socket_name: &str, address: &Address, is_sealed: bool) -> PyResult<Outcome> {
    let borrowed = attempt(py, |door| lend::borrow(socket_name, address, &mut || look(door)))?;
    Ok(borrowed.and_then(|borrowed| match borrowed {
        Borrowed::Descriptor(file) => registry::attach_file(address, file, is_sealed).map(Role::Reader),
        Borrowed::Copy(copied) => Ok(Role::Copied(Arc::new(copied))),
    }))
}

/// One way, which may lead nowhere; only Ctrl-C ends them all.
fn attempt<T: Send>(
    py: Python<'_>,
    way: impl FnOnce(&mut Door) -> Result<T, ShmError> + Send,
) -> PyResult<Result<T, ShmError>> {
    enter(py, None, |door| match way(door) {
        Err(ShmError::Interrupted) => Err(ShmError::Interrupted.into()),
        outcome => Ok(outcome),
    })
}

/// Where this process is asked for its segments, by processes that reach them in no other way.
#[pyfunction]
pub(crate) fn lending_socket() -> PyResult<String> {
    Ok(lend::socket_name().map_err(BindingError::from)?)
}

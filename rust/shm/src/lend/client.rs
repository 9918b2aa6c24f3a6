//! Asking another process for a segment.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::io::retry_on_intr;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::TIMEOUT;
use super::copied::Copied;
use super::wire::{Form, Reply, Request, is_own};
use crate::error::ShmError;
use crate::file::GoOn;
use crate::segment::Address;

/// Between two looks at whether to go on.
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);

/// What came of asking for a segment.
#[derive(Debug)]
pub enum Borrowed {
    /// A read-only descriptor of a description of its own, which has a lease. What it leads to is still to be looked
    /// at.
    Descriptor(OwnedFd),
    /// No descriptor could be received, and so its bytes were.
    Copy(Copied),
}

/// Asks the process that listens at `socket_name` for the segment at `address`.
///
/// # Errors
/// [`ShmError::Gone`] where the segment was given back, [`ShmError::NotASegment`] where who is asked is of another user
/// or cannot lend it, [`ShmError::Io`] where nobody listens or answers. And what `go_on` says.
pub fn borrow(socket_name: &str, address: &Address, go_on: GoOn<'_>) -> Result<Borrowed, ShmError> {
    let stream = reach(socket_name, go_on)?;
    if !is_own(&stream).map_err(|error| failed("see whose the socket is at", socket_name, error))? {
        return Err(unusable(socket_name, "it is another user's"));
    }
    let asking = |error| failed("ask for a segment at", socket_name, error);
    let address = *address;
    Request { form: Form::Descriptor, address }.send(&stream).map_err(asking)?;
    let (reply, descriptor) = patiently(go_on, || Reply::receive_with(&stream))?.map_err(asking)?;
    here(reply, socket_name)?;
    if let Some(descriptor) = descriptor {
        return Ok(Borrowed::Descriptor(descriptor));
    }
    Request { form: Form::Bytes, address }.send(&stream).map_err(asking)?;
    let length = here(patiently(go_on, || Reply::receive(&stream))?.map_err(asking)?, socket_name)?;
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    let fill = |mut rest: &mut [u8]| {
        while !rest.is_empty() {
            let read = patiently(go_on, || (&stream).read(rest))?;
            let read =
                read.and_then(|read| if read == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(read) });
            let read = read.map_err(|error| failed("receive a copy of a segment from", socket_name, error))?;
            rest = &mut rest[read..];
        }
        Ok(())
    };
    Ok(Borrowed::Copy(Copied::receive(length, &address, fill)?))
}

/// A connection on which no call takes longer than [`BETWEEN_LOOKS`].
fn reach(name: &str, go_on: GoOn<'_>) -> Result<UnixStream, ShmError> {
    let connecting = || {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(BETWEEN_LOOKS))?;
        set_socket_timeout(&socket, Timeout::Send, Some(BETWEEN_LOOKS))?;
        let socket_name = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
        // Of those that the owner has not answered yet there may be too many.
        retry_on_intr(|| connect(&socket, &socket_name))?;
        Ok(socket.into())
    };
    patiently(go_on, connecting)?.map_err(|error| failed("reach the owner of a segment at", name, error))
}

/// Calls again and again what gives up after [`BETWEEN_LOOKS`]: the owner may be stopped, or just busy. What it is over
/// with in the end, unless `go_on` says otherwise.
fn patiently<T>(go_on: GoOn<'_>, mut call: impl FnMut() -> io::Result<T>) -> Result<io::Result<T>, ShmError> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {}
            outcome => return Ok(outcome),
        }
        go_on()?;
    }
}

fn here(reply: Reply, socket_name: &str) -> Result<u64, ShmError> {
    match reply {
        Reply::Here(length) => Ok(length),
        Reply::Gone => Err(ShmError::Gone {
            segment: format!("the segment that was lent at {socket_name}"),
            reason: "its owner has given it back; keep the owner open as long as handles are in use".to_owned(),
        }),
        Reply::Failed => Err(unusable(socket_name, "its process could not make a descriptor of the segment")),
    }
}

fn unusable(socket_name: &str, reason: &str) -> ShmError {
    ShmError::NotASegment { segment: format!("the socket {socket_name}"), reason: reason.to_owned() }
}

fn failed(operation: &'static str, socket_name: &str, source: io::Error) -> ShmError {
    ShmError::Io { operation, object: socket_name.to_owned(), source }
}

//! Lending: a socket without a file, and threads that answer.
//!
//! Owns the socket, one a process, and the threads that answer. What always holds:
//!
//! 1. Only a process of the same user is answered; the kernel tells who asks.
//! 2. Each descriptor that is handed out is of a new description, read-only, with a lease of its own: the borrower's
//!    lease is not this process's.
//! 3. A child made by `fork` has not the socket of its parent. Were it open there, who asks after the parent's death
//!    would wait for an answer that nobody gives.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::process::geteuid;
use rustix::rand::{GetRandomFlags, getrandom};

use super::TIMEOUT;
use super::wire::{Form, Reply, Request, is_own};
use crate::error::ShmError;
use crate::per_process::PerProcess;
use crate::registry::{self, Refusal};
use crate::segment::Address;

/// Answered at the same time, by a thread each; the next waits for the thread that accepts.
const AT_ONCE: usize = 32;

/// Bytes sent at once where a descriptor could not be received.
const CHUNK: usize = 1 << 20;

static LENDING: PerProcess<Lending> = PerProcess::new(Lending::default);

#[derive(Default)]
struct Lending {
    socket_name: Mutex<Option<String>>,
    answering: AtomicUsize,
}

/// Where this process is to be asked for segments that it has: the name of its socket. Starts to listen when first
/// called.
pub fn socket_name() -> Result<String, ShmError> {
    let mut name = LENDING.get().socket_name.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(name) = &*name {
        return Ok(name.clone());
    }
    let new = listen().map_err(|source| ShmError::Io {
        operation: "listen for processes that attach, at",
        object: "a socket without a file".to_owned(),
        source,
    })?;
    Ok(name.insert(new).clone())
}

fn listen() -> io::Result<String> {
    let mut drawn = [0; 8];
    rustix::io::retry_on_intr(|| getrandom(&mut drawn, GetRandomFlags::empty()))?;
    let drawn = u64::from_ne_bytes(drawn);
    let name = format!("tundish-{}-{}-{drawn:016x}", geteuid().as_raw(), std::process::id());
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
    close_in_children(listener.as_raw_fd())?;
    let started = thread::Builder::new().name("tundish-lend".to_owned()).spawn(move || accept_all(&listener));
    if started.is_err() {
        // The socket is closed by now, and its number is another's.
        SOCKET.store(-1, Ordering::SeqCst);
    }
    started.map(|_| name)
}

/// The listening socket, for `close_socket`; none is -1.
static SOCKET: AtomicI32 = AtomicI32::new(-1);

fn close_in_children(socket: RawFd) -> io::Result<()> {
    static IS_REGISTERED: AtomicBool = AtomicBool::new(false);
    SOCKET.store(socket, Ordering::SeqCst);
    if IS_REGISTERED.swap(true, Ordering::SeqCst) {
        return Ok(());
    }
    // SAFETY: the function does only what is allowed in a child of a process with threads, and is never unloaded while
    // it may be called: the C library forgets it with the shared object.
    let outcome = unsafe { libc::pthread_atfork(None, None, Some(close_socket)) };
    if outcome == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(outcome)) }
}

extern "C" fn close_socket() {
    let socket = SOCKET.swap(-1, Ordering::SeqCst);
    if socket >= 0 {
        // SAFETY: the thread that owned the descriptor is not in the child, so nothing else there uses or closes it.
        unsafe { libc::close(socket) };
    }
}

fn accept_all(listener: &UnixListener) {
    loop {
        match listener.accept() {
            Ok((stream, _)) => answer_elsewhere(stream),
            // Out of descriptors or memory, which passes; who asks waits meanwhile.
            Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Answers on a thread of its own; where there are enough of them, or no more to be had, on this one.
fn answer_elsewhere(stream: UnixStream) {
    let answering = &LENDING.get().answering;
    if answering.fetch_add(1, Ordering::Relaxed) < AT_ONCE {
        let stream = stream.try_clone();
        let started = stream.and_then(|stream| {
            thread::Builder::new().name("tundish-lent".to_owned()).spawn(move || {
                let _ = answer(&stream);
                answering.fetch_sub(1, Ordering::Relaxed);
            })
        });
        if started.is_ok() {
            return;
        }
    }
    answering.fetch_sub(1, Ordering::Relaxed);
    let _ = answer(&stream);
}

/// Answers until the other side hangs up, breaks the rules or is silent for too long.
fn answer(stream: &UnixStream) -> io::Result<()> {
    if !is_own(stream)? {
        return Ok(());
    }
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    while let Some(request) = Request::receive(stream)? {
        match lease(&request.address) {
            Ok(file) => hand_out(stream, request.form, file)?,
            Err(reply) => reply.send(stream)?,
        }
    }
    Ok(())
}

fn lease(address: &Address) -> Result<OwnedFd, Reply> {
    registry::lend(address).map_err(|refusal| match refusal {
        Refusal::GivenBack(_) | Refusal::Other(ShmError::NotASegment { .. }) => Reply::Gone,
        Refusal::Other(ShmError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Reply::Gone,
        Refusal::Other(_) => Reply::Failed,
    })
}

fn hand_out(mut stream: &UnixStream, form: Form, file: OwnedFd) -> io::Result<()> {
    let length = rustix::fs::fstat(&file)?.st_size.unsigned_abs();
    let reply = Reply::Here(length);
    if form == Form::Descriptor {
        return reply.send_with(stream, &file);
    }
    reply.send(stream)?;
    let file = File::from(file);
    let mut chunk = vec![0; CHUNK];
    let mut sent = 0;
    while sent < length {
        let room = chunk.len().min(usize::try_from(length - sent).unwrap_or(usize::MAX));
        // Sealed, or not shortened by anybody who means well: it is as long as it was.
        file.read_exact_at(&mut chunk[..room], sent)?;
        stream.write_all(&chunk[..room])?;
        sent += room as u64;
    }
    Ok(())
}

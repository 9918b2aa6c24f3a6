//! The stream of a connection to an owner: a socket, or TLS over one.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;

use rustls::{ClientConnection, StreamOwned};

use crate::http::fork_safe_sockets::Socket;

#[derive(Debug)]
pub(super) enum Stream {
    Plain(Blocking),
    Tls(Box<StreamOwned<ClientConnection, Blocking>>),
}

/// A socket whose reads and writes time out with `WouldBlock`.
#[derive(Debug)]
pub(super) struct Blocking(pub(super) Socket<TcpStream>);

impl Stream {
    pub(super) fn socket(&self) -> &Socket<TcpStream> {
        match self {
            Stream::Plain(socket) => &socket.0,
            Stream::Tls(stream) => &stream.sock.0,
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => socket.read(buffer),
            Stream::Tls(stream) => stream.read(buffer),
        }
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => (&*socket.0).read_vectored(buffers),
            Stream::Tls(stream) => stream.read_vectored(buffers),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => socket.write(bytes),
            Stream::Tls(stream) => stream.write(bytes),
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Plain(socket) => (&*socket.0).write_vectored(slices),
            Stream::Tls(stream) => stream.write_vectored(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Plain(socket) => socket.flush(),
            Stream::Tls(stream) => stream.flush(),
        }
    }
}

impl Read for Blocking {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&*self.0).read(buffer)
    }
}

impl Write for Blocking {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self.0).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

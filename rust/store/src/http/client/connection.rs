//! One connection to an owner: blocking reads and writes with a deadline and cancellation.
//!
//! Blocking the calling thread costs less than handing over to another one and back.
//!
//! Invariants:
//!
//! - No system call takes longer than [`MAX_WAIT`]. The deadline is checked between two of them, also while bytes keep
//!   coming.
//! - `inbox` holds what was received and not parsed yet, never more than the response.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{
    Timeout, set_socket_keepalive, set_socket_timeout, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl,
    set_tcp_nodelay, set_tcp_user_timeout, socket_error,
};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, connect, recv, socket_with};
use rustls::StreamOwned;

use super::response_head::ResponseHead;
use super::stream::{Blocking, Stream};
use crate::checksum::RunningChecksum;
use crate::error::StoreError;
use crate::http::fork_safe_sockets::Socket;
use crate::http::tls::ClientTls;
use crate::time_limit::TimeLimit;

/// The longest system call: between two of them the caller may cancel.
const MAX_WAIT: Duration = Duration::from_millis(50);

/// How long the kernel of an owner may take to answer that it is there. Asked for twice, within a second.
const REACH: Duration = Duration::from_millis(400);

/// A machine that is silent for so long is gone; after a second it is asked whether it is there, and again each second.
const SILENCE: Duration = Duration::from_secs(3);

/// Bytes that are received at once, so that they are summed before they leave the processor's cache.
const STRIDE: usize = 256 << 10;

/// Bytes that are received beyond those of a shard: the header of the next one.
const READ_AHEAD: usize = 64;

/// Bytes that are received at once while the length of the response is unknown.
const READ_AT_ONCE: usize = 8 << 10;

/// The most interim answers (status 1xx) before the final one.
const MAX_INTERIM: usize = 16;

/// The failure of a connection.
#[derive(Debug)]
pub(super) enum ConnectionFailure {
    /// The connection or the response is broken. The caller may try again.
    Broken(String),
    /// The machine does not answer. Another try would take as long.
    Silent,
    /// The error of the call.
    Final(StoreError),
}

impl From<StoreError> for ConnectionFailure {
    fn from(error: StoreError) -> Self {
        ConnectionFailure::Final(error)
    }
}

fn broken(error: &io::Error) -> ConnectionFailure {
    ConnectionFailure::Broken(error.to_string())
}

#[derive(Debug)]
pub(super) struct Connection {
    stream: Stream,
    inbox: Vec<u8>,
    /// Bytes of it that were parsed.
    taken: usize,
    /// Whether it may be used again.
    pub(super) keeps_alive: bool,
}

impl Connection {
    /// Connects to `owner` at one of these addresses, over TLS where it is trusted with that.
    pub(super) fn open(
        owner: &str,
        addresses: &[SocketAddr],
        tls: Option<&ClientTls>,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<Self, ConnectionFailure> {
        let mut last = ConnectionFailure::Broken("its host name has no address".to_owned());
        for address in addresses {
            // The first request to connect may have been lost on the way.
            for _ in 0..2 {
                match open_socket(address, time_limit) {
                    Ok(Some(socket)) => {
                        let stream = match tls {
                            None => Stream::Plain(Blocking(socket)),
                            Some(tls) => Stream::Tls(Box::new(StreamOwned::new(tls.connect(owner)?, Blocking(socket)))),
                        };
                        return Ok(Connection { stream, inbox: Vec::new(), taken: 0, keeps_alive: true });
                    }
                    Ok(None) => last = ConnectionFailure::Silent,
                    Err(failure @ ConnectionFailure::Final(_)) => return Err(failure),
                    Err(failure) => {
                        last = failure;
                        break;
                    }
                }
            }
        }
        Err(last)
    }

    /// Whether it can be used for a request: the other side keeps it open and has sent nothing.
    pub(super) fn is_idle(&self) -> bool {
        if !self.is_own() {
            return false;
        }
        let mut byte = [0; 1];
        let seen = recv(&**self.stream.socket(), &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT);
        matches!(seen, Err(Errno::AGAIN))
    }

    /// Whether this process opened it, and not the one that it was forked from.
    pub(super) fn is_own(&self) -> bool {
        self.stream.socket().is_own()
    }

    /// Sends all of it, one part behind the other.
    pub(super) fn send(
        &mut self,
        mut parts: &mut [IoSlice<'_>],
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(), ConnectionFailure> {
        IoSlice::advance_slices(&mut parts, 0);
        while !parts.is_empty() {
            match self.stream.write_vectored(parts) {
                Ok(0) => return Err(ConnectionFailure::Broken("it accepts no more bytes".to_owned())),
                Ok(sent) => {
                    IoSlice::advance_slices(&mut parts, sent);
                    if !parts.is_empty() {
                        time_limit.check()?;
                    }
                }
                Err(error) => self.wait(&error, time_limit)?,
            }
        }
        Ok(())
    }

    /// The head of the answer. Interim answers are skipped.
    pub(super) fn head(&mut self, time_limit: &mut TimeLimit<'_>) -> Result<ResponseHead, ConnectionFailure> {
        for _ in 0..=MAX_INTERIM {
            let head = self.parse(time_limit, |bytes| ResponseHead::parse(bytes).map_err(ConnectionFailure::Broken))?;
            if head.status >= 200 {
                self.keeps_alive = head.keeps_alive;
                return Ok(head);
            }
        }
        Err(ConnectionFailure::Broken("it announces an answer again and again, and sends none".to_owned()))
    }

    /// The result of `parse` on the next bytes. `parse` also returns the number of bytes that it took.
    pub(super) fn parse<T>(
        &mut self,
        time_limit: &mut TimeLimit<'_>,
        parse: impl Fn(&[u8]) -> Result<Option<(T, usize)>, ConnectionFailure>,
    ) -> Result<T, ConnectionFailure> {
        let mut has_come = false;
        loop {
            if let Some((parsed, length)) = parse(&self.inbox[self.taken..])? {
                self.taken += length;
                return Ok(parsed);
            }
            if std::mem::replace(&mut has_come, true) {
                time_limit.check()?;
            }
            self.inbox.drain(..self.taken);
            self.taken = 0;
            let begun = self.inbox.len();
            self.inbox.resize(begun + READ_AT_ONCE, 0);
            let received = self.receive(begun, time_limit);
            self.inbox.truncate(begun + *received.as_ref().unwrap_or(&0));
            received?;
        }
    }

    fn receive(&mut self, from: usize, time_limit: &mut TimeLimit<'_>) -> Result<usize, ConnectionFailure> {
        loop {
            match self.stream.read(&mut self.inbox[from..]) {
                Ok(0) => return Err(ended()),
                Ok(received) => return Ok(received),
                Err(error) => self.wait(&error, time_limit)?,
            }
        }
    }

    /// Fills `target` with the next bytes of the answer, and returns their checksum. `rest` bytes follow them.
    pub(super) fn fill(
        &mut self,
        target: &mut [u8],
        rest: u64,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<u64, ConnectionFailure> {
        let mut checksum = RunningChecksum::new();
        let here = &self.inbox[self.taken..];
        let mut filled = here.len().min(target.len());
        target[..filled].copy_from_slice(&here[..filled]);
        self.taken += filled;
        checksum.update(&target[..filled]);
        let ahead = READ_AHEAD.min(usize::try_from(rest).unwrap_or(READ_AHEAD));
        while filled < target.len() {
            // The inbox is empty here, or `target` would be full.
            self.inbox.resize(ahead, 0);
            self.taken = ahead;
            let end = target.len().min(filled + STRIDE);
            let ahead = if end == target.len() { ahead } else { 0 };
            let wanted = end - filled;
            let space = &mut target[filled..end];
            let mut parts = [IoSliceMut::new(space), IoSliceMut::new(&mut self.inbox[..ahead])];
            match self.stream.read_vectored(&mut parts) {
                Ok(0) => return Err(ended()),
                Ok(received) => {
                    let of_target = received.min(wanted);
                    checksum.update(&target[filled..filled + of_target]);
                    filled += of_target;
                    if received > wanted {
                        self.inbox.truncate(received - wanted);
                        self.taken = 0;
                    }
                    if filled < target.len() {
                        time_limit.check()?;
                    }
                }
                Err(error) => self.wait(&error, time_limit)?,
            }
        }
        Ok(checksum.value())
    }

    /// The next `length` bytes.
    pub(super) fn collect(
        &mut self,
        length: u64,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<Vec<u8>, ConnectionFailure> {
        let mut collected = Vec::new();
        let mut left = length;
        while left > 0 {
            let (begun, some) = (collected.len(), left.min(STRIDE as u64));
            left -= some;
            collected.resize(begun + some as usize, 0);
            self.fill(&mut collected[begun..], left, time_limit)?;
            if left > 0 {
                time_limit.check()?;
            }
        }
        Ok(collected)
    }

    /// Checks the deadline after a system call that may be repeated; else returns its error.
    fn wait(&self, error: &io::Error, time_limit: &mut TimeLimit<'_>) -> Result<(), ConnectionFailure> {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => check_time_limit(time_limit),
            _ => Err(broken(error)),
        }
    }
}

fn ended() -> ConnectionFailure {
    ConnectionFailure::Broken("it closed the connection in the middle of an answer".to_owned())
}

pub(super) fn check_time_limit(time_limit: &mut TimeLimit<'_>) -> Result<(), ConnectionFailure> {
    time_limit.check_cancelled()?;
    if time_limit.is_over() {
        // The caller adds the description.
        return Err(StoreError::TimedOut { what: String::new() }.into());
    }
    Ok(())
}

/// A connection, if the other side's kernel answers in time.
fn open_socket(
    address: &SocketAddr,
    time_limit: &mut TimeLimit<'_>,
) -> Result<Option<Socket<TcpStream>>, ConnectionFailure> {
    let failed = |errno: Errno| broken(&errno.into());
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = Socket::new(TcpStream::from(socket_with(family, SocketType::STREAM, flags, None).map_err(failed)?));
    match connect(&*socket, address) {
        Ok(()) => {}
        Err(Errno::INPROGRESS) => {
            let end = Instant::now() + REACH;
            let is_connected = || -> rustix::io::Result<bool> {
                let mut event = [PollFd::new(&*socket, PollFlags::OUT)];
                let wait = end.saturating_duration_since(Instant::now()).min(MAX_WAIT);
                match poll(&mut event, Some(&Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() })) {
                    Err(Errno::INTR) => Ok(false),
                    polled => Ok(polled? > 0),
                }
            };
            while !is_connected().map_err(failed)? {
                check_time_limit(time_limit)?;
                if Instant::now() >= end {
                    return Ok(None);
                }
            }
            socket_error(&*socket).map_err(failed)?.map_err(failed)?;
        }
        Err(errno) => return Err(failed(errno)),
    }
    socket.set_nonblocking(false).map_err(|error| broken(&error))?;
    set_socket_options(&socket).map_err(failed)?;
    Ok(Some(socket))
}

fn set_socket_options(socket: &TcpStream) -> rustix::io::Result<()> {
    set_tcp_nodelay(socket, true)?;
    set_socket_timeout(socket, Timeout::Recv, Some(MAX_WAIT))?;
    set_socket_timeout(socket, Timeout::Send, Some(MAX_WAIT))?;
    set_socket_keepalive(socket, true)?;
    set_tcp_keepidle(socket, Duration::from_secs(1))?;
    set_tcp_keepintvl(socket, Duration::from_secs(1))?;
    set_tcp_keepcnt(socket, SILENCE.as_secs() as u32 - 1)?;
    // Requests are small: the kernel of a machine that is there takes them, whatever the process does.
    set_tcp_user_timeout(socket, SILENCE.as_millis() as u32)
}

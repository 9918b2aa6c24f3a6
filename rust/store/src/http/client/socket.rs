//! The socket of a connection to an owner, and the loop that waits for it in the calling thread.
//!
//! hyper and rustls read and write through tokio's traits, without a runtime of tokio's: the calling thread polls their
//! futures itself, and waits for the socket when they cannot go on. A runtime would be inherited by children made by
//! `fork`, and another thread costs a hand-over for each answer.
//!
//! Invariants:
//!
//! - No wait takes longer than 50 ms. The time limit is checked between two waits, also while bytes keep coming: a
//!   future gets [`MAX_READS`] reads before it has to give way.
#![allow(unsafe_code)]

use std::future::Future;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, read};
use rustix::net::sockopt::{
    set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl, set_tcp_nodelay, set_tcp_user_timeout,
    socket_error,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::connection::{ConnectionFailure, broken};
use crate::http::fork_safe_sockets::Socket;
use crate::time_limit::TimeLimit;

/// How long the kernel of an owner may take to answer that it is there. Asked for twice, within a second.
const REACH: Duration = Duration::from_millis(400);

/// A machine that is silent for so long is gone; after a second it is asked whether it is there, and again each second.
const SILENCE: Duration = Duration::from_secs(3);

/// Reads between two checks of the time limit.
const MAX_READS: u16 = 4;

/// A socket that is read and written by futures, and waited for by the thread that polls them.
#[derive(Clone, Debug)]
pub(super) struct ClientSocket(Arc<State>);

#[derive(Debug)]
struct State {
    socket: Socket<TcpStream>,
    /// Whether the last write has to wait until the kernel takes more.
    is_full: AtomicBool,
    /// Reads that are left before the future has to give way.
    reads: AtomicU16,
}

impl ClientSocket {
    /// Connects; `None` if the other side's kernel does not answer in time.
    pub(super) fn connect(
        address: &SocketAddr,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<Option<Self>, ConnectionFailure> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(family, SocketType::STREAM, flags, None).map_err(|errno| broken(&errno))?;
        let socket = Socket::new(TcpStream::from(socket));
        let state = State { socket, is_full: AtomicBool::new(false), reads: AtomicU16::new(0) };
        let this = ClientSocket(Arc::new(state));
        match connect(&*this.0.socket, address) {
            Ok(()) => {}
            Err(Errno::INPROGRESS) => {
                let end = Instant::now() + REACH;
                let longest = || end.saturating_duration_since(Instant::now());
                while !this.wait(PollFlags::OUT, longest().min(time_limit.next_wait()))? {
                    time_limit.check()?;
                    if longest().is_zero() {
                        return Ok(None);
                    }
                }
                let outcome = socket_error(&*this.0.socket).and_then(|outcome| outcome);
                outcome.map_err(|errno| broken(&errno))?;
            }
            Err(errno) => return Err(broken(&errno)),
        }
        set_socket_options(&this.0.socket).map_err(|errno| broken(&errno))?;
        Ok(Some(this))
    }

    /// Whether this process opened it, and not the one that it was forked from.
    pub(super) fn is_own(&self) -> bool {
        self.0.socket.is_own()
    }

    /// Runs a future that reads and writes this socket, in the calling thread.
    pub(super) fn block_on<F: Future>(
        &self,
        future: F,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<F::Output, ConnectionFailure> {
        let mut future = pin!(future);
        let woken = Arc::new(Woken(AtomicBool::new(false)));
        let waker = Waker::from(Arc::clone(&woken));
        loop {
            time_limit.check()?;
            if let Poll::Ready(output) = self.poll(future.as_mut(), &mut Context::from_waker(&waker)) {
                return Ok(output);
            }
            if !woken.0.swap(false, Ordering::Relaxed) {
                let mut events = PollFlags::IN;
                events.set(PollFlags::OUT, self.0.is_full.load(Ordering::Relaxed));
                self.wait(events, time_limit.next_wait())?;
            }
        }
    }

    /// Polls such a future once, without waiting.
    pub(super) fn poll<F: Future>(&self, future: Pin<&mut F>, context: &mut Context<'_>) -> Poll<F::Output> {
        self.0.reads.store(MAX_READS, Ordering::Relaxed);
        future.poll(context)
    }

    /// Waits for one of these events; whether it has come.
    fn wait(&self, events: PollFlags, longest: Duration) -> Result<bool, ConnectionFailure> {
        let mut event = [PollFd::new(&*self.0.socket, events)];
        match poll(&mut event, Some(&Timespec { tv_sec: 0, tv_nsec: longest.subsec_nanos().into() })) {
            Err(Errno::INTR) => Ok(false),
            polled => polled.map(|count| count > 0).map_err(|errno| broken(&errno)),
        }
    }
}

/// The outcome of a read or a write, unless it has to wait.
fn unless_it_blocks<T>(outcome: io::Result<T>) -> Poll<io::Result<T>> {
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
        outcome => Poll::Ready(outcome),
    }
}

/// Whether a future can go on without waiting for the socket.
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl AsyncRead for ClientSocket {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let left = self.0.reads.load(Ordering::Relaxed);
        if left == 0 {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.0.reads.store(left - 1, Ordering::Relaxed);
        // SAFETY: `read` makes no byte of it uninitialised.
        let received = read(&*self.0.socket, unsafe { buffer.unfilled_mut() }).map(|(received, _)| received.len());
        unless_it_blocks(received.map_err(io::Error::from)).map_ok(|received| {
            // SAFETY: so many bytes were received there.
            unsafe { buffer.assume_init(received) };
            buffer.advance(received);
        })
    }
}

impl AsyncWrite for ClientSocket {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = unless_it_blocks((&*self.0.socket).write(bytes));
        self.0.is_full.store(written.is_pending(), Ordering::Relaxed);
        written
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // It is closed when it is dropped.
        Poll::Ready(Ok(()))
    }
}

fn set_socket_options(socket: &TcpStream) -> rustix::io::Result<()> {
    set_tcp_nodelay(socket, true)?;
    set_socket_keepalive(socket, true)?;
    set_tcp_keepidle(socket, Duration::from_secs(1))?;
    set_tcp_keepintvl(socket, Duration::from_secs(1))?;
    set_tcp_keepcnt(socket, SILENCE.as_secs() as u32 - 1)?;
    // Requests are small: the kernel of a machine that is there takes them, whatever the process does.
    set_tcp_user_timeout(socket, SILENCE.as_millis() as u32)
}

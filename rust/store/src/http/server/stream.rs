//! The socket of one client, as hyper reads and writes it: bytes are counted, and a client that is silent for too long
//! loses the connection.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustix::net::{Shutdown, shutdown};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use super::Timeouts;
use super::connections::Connection;
use super::metrics::Metrics;

pub(super) struct ClientStream {
    connection: Arc<Connection>,
    timeouts: Timeouts,
    metrics: Arc<Metrics>,
    timer: Pin<Box<Sleep>>,
}

impl ClientStream {
    pub(super) fn new(connection: Arc<Connection>, timeouts: Timeouts, metrics: Arc<Metrics>) -> Self {
        ClientStream { connection, timeouts, metrics, timer: Box::pin(sleep_until(Instant::now())) }
    }

    /// Nothing can be read or written: waits for that, or for the time at which the client loses the connection.
    fn wait<T>(&mut self, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        let Some(deadline) = self.connection.deadline(&self.timeouts) else { return Poll::Pending };
        self.timer.as_mut().reset(deadline.into());
        ready!(self.timer.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    fn write(
        &mut self,
        context: &mut Context<'_>,
        write: impl Fn(&tokio::net::TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        while let Poll::Ready(writable) = self.connection.stream.poll_write_ready(context) {
            writable?;
            match write(&self.connection.stream) {
                Ok(sent) => {
                    self.metrics.sent_bytes.inc_by(sent as u64);
                    self.connection.add_progress(sent);
                    return Poll::Ready(Ok(sent));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        self.wait(context)
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while let Poll::Ready(readable) = this.connection.stream.poll_read_ready(context) {
            readable?;
            match this.connection.stream.try_read_buf(buffer) {
                Ok(received) => {
                    this.metrics.received_bytes.inc_by(received as u64);
                    this.connection.add_progress(received);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        this.wait(context)
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().write(context, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().write(context, |stream| stream.try_write_vectored(slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// hyper calls this when it has written all that it holds.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.connection.note_flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let done = shutdown(&*self.connection.stream, Shutdown::Write);
        Poll::Ready(done.map_err(io::Error::from))
    }
}

//! The server of a process's shards.
//!
//! It owns a listening socket, two threads, and the connections. What always holds: what a request makes it allocate
//! grows with what comes of it, except that the room for a shard, which the store's limit counts, is taken whole when
//! its header has come, and kept only from who goes on sending; whoever is silent or slow loses the connection and
//! nothing else, sooner where others wait for its place; no thread of it takes signals, which are for those of the
//! process's own.

mod answer;
mod body;
mod connection;
mod exchange;
mod metrics;
mod rooms;
mod table;
mod threads;
mod timing;
mod traffic;

use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};
use std::panic::catch_unwind;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Poll, ready};
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{
    set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl, set_tcp_nodelay,
};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::time::sleep;
use tundish_shm::without_signals;

use self::answer::Answer;
use self::connection::{Connection, Trouble};
use self::exchange::{Claims, Exchange};
use self::table::Table;
pub use self::timing::Timing;
use self::traffic::Traffic;
use crate::error::StoreError;
use crate::http::descriptors::{NoFork, Socket};
use crate::http::head::RequestHead;
use crate::http::refusal::Refusal;
use crate::http::route::Route;
use crate::http::token::Token;
use crate::slice;
use crate::transport::Service;

/// Threads that serve: one for what is large and one for what is small beside it.
const THREADS: usize = 2;

/// Connections that the kernel makes before this process takes them: all consumers of a job may come at once, and who is
/// not answered takes the machine for gone. The kernel has a limit of its own, `net.core.somaxconn`.
const BACKLOG: i32 = 4096;

/// How long the end of a server waits for what is being done.
const ENDING: Duration = Duration::from_secs(1);

/// A server; it ends when this is dropped, and the claims that were made on its connections with it.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    /// `None` at its end.
    runtime: Option<Runtime>,
    process: u32,
}

/// What all connections have in common.
struct Common {
    service: Arc<dyn Service>,
    token: Option<Token>,
    timing: Timing,
    traffic: Arc<Traffic>,
    table: Arc<Table>,
}

impl Server {
    /// Serves at `host`, on `port` or, for 0, on one that is free.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for an address that others reach where there is no token, [`StoreError::Io`] where the
    /// port is taken or the system refuses.
    pub fn start(
        service: Arc<dyn Service>,
        host: &str,
        port: u16,
        token: Option<Token>,
        timing: Timing,
    ) -> Result<Server, StoreError> {
        let object = || format!("{host}:{port}");
        let failed = |operation, error: &io::Error| StoreError::io(operation, object(), error);
        let found: Vec<SocketAddr> =
            (host, port).to_socket_addrs().map_err(|error| failed("find the address", &error))?.collect();
        let is_open = found.iter().any(|address| !address.ip().is_loopback());
        if is_open && token.is_none() {
            return Err(StoreError::Invalid(format!(
                "{host} can be reached from other machines, and without a token anybody there could read and delete: \
                 serve with a token, or at 127.0.0.1"
            )));
        }
        let listener = listen(&found).map_err(|error| failed("listen on", &error))?;
        let address = listener.local_addr().map_err(|error| failed("listen on", &error))?;
        let runtime = without_signals(runtime).map_err(|error| failed("start threads to serve", &error))?;
        let (traffic, table) = (Arc::default(), Arc::new(Table::new(timing.crowded)));
        let common = Arc::new(Common { service, token, timing, traffic, table });
        let entered = runtime.enter();
        let listener = listener.into_form(tokio::net::TcpListener::from_std);
        drop(entered);
        let listener = listener.map_err(|error| failed("listen on", &error))?;
        runtime.spawn(accept_all(listener, common));
        Ok(Server { address, runtime: Some(runtime), process: std::process::id() })
    }

    /// Where it serves.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        if self.process == std::process::id() {
            runtime.shutdown_timeout(ENDING);
        } else {
            // A child made by `fork` has none of its threads and must not wait for them.
            std::mem::forget(runtime);
        }
    }
}

fn runtime() -> io::Result<Runtime> {
    let build = || {
        Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("tundish-serve")
            // A small request is not to wait until one that sends much has used its time.
            .on_thread_start(slice::share)
            .enable_io()
            .enable_time()
            .build()
    };
    // It panics, and says so, where the system has no thread left: one is tried before.
    let _ = thread::Builder::new().spawn(|| ())?.join();
    catch_unwind(build).unwrap_or_else(|_| Err(Errno::AGAIN.into()))
}

fn listen(addresses: &[SocketAddr]) -> io::Result<Socket<TcpListener>> {
    let no_fork = NoFork::begin()?;
    let listener = no_fork.keep(TcpListener::bind(addresses)?);
    // The library's own are 128.
    rustix::net::listen(&*listener, BACKLOG)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

async fn accept_all(listener: Socket<tokio::net::TcpListener>, common: Arc<Common>) {
    loop {
        let accepted = poll_fn(|context| {
            let no_fork = NoFork::begin()?;
            let (stream, _) = ready!(listener.poll_accept(context))?;
            Poll::Ready(io::Result::Ok(no_fork.keep(stream)))
        });
        match accepted.await {
            Ok(stream) => {
                let (stream, common) = (Arc::new(stream), Arc::clone(&common));
                let seat = common.table.seat(&stream).await;
                tokio::spawn(async move {
                    common.traffic.connections.fetch_add(1, Relaxed);
                    serve(stream, seat, &common).await;
                    common.traffic.connections.fetch_sub(1, Relaxed);
                });
            }
            // Out of descriptors or memory, which passes; who asks waits meanwhile.
            Err(_) => {
                common.table.close_one();
                sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// Answers until the other side hangs up, breaks the rules, or is silent for too long.
async fn serve(stream: Arc<Socket<TcpStream>>, seat: table::Seat, common: &Common) {
    if prepare(&stream).is_err() {
        return;
    }
    let mut connection = Connection::new(stream, seat, common.timing, Arc::clone(&common.traffic));
    let mut claims = Claims::new(Arc::clone(&common.service));
    loop {
        // What holds claims is held open on purpose: the kernel looks whether the other side is there.
        let holds = claims.are_held();
        if !connection.awaits((!holds).then_some(common.timing.idle)).await {
            return;
        }
        let head = match connection.head().await {
            Ok(Some(head)) => head,
            Ok(None) | Err(Trouble::Broken) => return,
            Err(Trouble::Refused(refusal)) => return end(connection, refusal).await,
        };
        if let Err(refusal) = admit(&head, common) {
            return end(connection, refusal).await;
        }
        let (service, timing, traffic) = (&common.service, common.timing, &*common.traffic);
        let exchange = Exchange {
            service,
            head: &head,
            connection: &mut connection,
            claims: &mut claims,
            timing,
            traffic,
            aside: None,
        };
        let answer = match exchange.answer().await {
            Ok(answer) => answer,
            Err(Trouble::Refused(refusal)) => Answer::from(refusal),
            Err(Trouble::Broken) => return,
        };
        let keeps_alive = head.keeps_alive && connection.discard().await;
        if connection.send(&answer, head.method, keeps_alive).await.is_err() {
            return;
        }
        if !keeps_alive {
            return connection.linger().await;
        }
    }
}

/// The last answer on a connection.
async fn end(mut connection: Connection, refusal: Refusal) {
    if connection.send(&Answer::from(refusal), crate::http::head::Method::Get, false).await.is_ok() {
        connection.linger().await;
    }
}

fn prepare(stream: &Socket<TcpStream>) -> rustix::io::Result<()> {
    let stream = &**stream;
    set_tcp_nodelay(stream, true)?;
    set_socket_keepalive(stream, true)?;
    set_tcp_keepidle(stream, Duration::from_secs(10))?;
    set_tcp_keepintvl(stream, Duration::from_secs(5))?;
    set_tcp_keepcnt(stream, 3)
}

/// Whether this request is looked at.
///
/// A page in somebody's browser can send requests to this machine. Those that do not come from the same page's own
/// address carry its origin; those that came by a name that the page's owner turned to this machine carry that name.
fn admit(head: &RequestHead, common: &Common) -> Result<(), Refusal> {
    if head.is_of_a_page {
        return Err(Refusal::new(403, "pages in a browser are not served"));
    }
    match &common.token {
        Some(token) => {
            let is_public = Route::of(head.method, &head.path) == Ok(Route::Health);
            if !is_public && !token.is_said_by(head.authorization.as_deref()) {
                let reason =
                    "this server wants its token, as `Authorization: Bearer …`; tell the client whom to trust with it";
                return Err(Refusal::new(401, reason));
            }
            Ok(())
        }
        None if head.host.as_deref().is_none_or(is_local_name) => Ok(()),
        None => Err(Refusal::new(403, "without a token only requests to an address or to localhost are served")),
    }
}

/// An address, or this machine's own name for itself; with a port or without.
fn is_local_name(host: &str) -> bool {
    if host.parse::<SocketAddr>().is_ok() || host.parse::<IpAddr>().is_ok() {
        return true;
    }
    let name = host.rsplit_once(':').map_or(host, |(name, port)| if port.parse::<u16>().is_ok() { name } else { host });
    let name = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_nobody_can_turn_are_local() {
        for host in ["127.0.0.1", "127.0.0.1:80", "localhost", "LOCALHOST:80", "[::1]:80", "[::1]", "::1", "10.0.0.1:7"]
        {
            assert!(is_local_name(host), "{host}");
        }
        for host in ["", "evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "a:b"] {
            assert!(!is_local_name(host), "{host}");
        }
    }
}

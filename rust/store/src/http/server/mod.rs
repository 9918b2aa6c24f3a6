//! The server of a process's shards.
//!
//! Invariants:
//!
//! - The memory that a request takes grows with what arrives of it, not with what it announces.
//! - A silent or slow client loses its connection and nothing else, sooner where others wait for its place.
//! - Its threads take no signals, which are for those of the process's own.

mod client_session;
mod connections;
mod handlers;
mod metrics;
mod response;
mod stream;

use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::panic::catch_unwind;
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rustix::io::Errno;
use rustix::net::sockopt::{
    set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl, set_tcp_nodelay,
};
use rustix::process::geteuid;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::time::{sleep, timeout};
use tundish_shm::without_signals;

use self::client_session::Session;
use self::connections::{Admitted, Connections};
use self::metrics::Metrics;
use self::stream::ClientStream;
use crate::error::StoreError;
use crate::http::fork_safe_sockets::Socket;
use crate::http::peer_user;
use crate::http::tls::ServerTls;
use crate::http::token::Token;
use crate::tensor_store::TensorStore;

/// Threads that serve: a small request does not wait for a large one.
const THREADS: usize = 2;

/// Connections that the kernel makes before this process takes them. Many, since all consumers of a job may come at
/// once, and a client that gets no answer takes the machine for gone. The kernel's own limit is `net.core.somaxconn`.
const BACKLOG: i32 = 4096;

/// The longest head of a request, in bytes.
const LONGEST_HEAD: usize = 16 << 10;

/// The most fields of a head.
const MAX_FIELDS: usize = 64;

/// Bytes that a connection reads or writes at once.
const BUFFER: usize = 256 << 10;

/// How long the end of a server waits for the requests that are being answered.
const ENDING: Duration = Duration::from_secs(1);

/// How long the server reads from a connection that it closes, so that the client gets the last response.
const LINGER: Duration = Duration::from_secs(1);

/// How long a server waits for its clients.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// For the next 64 KiB of a request or its end, for a TLS handshake, and for the client to take as much of a
    /// response.
    pub silence: Duration,
    /// For the next request on a connection that holds no claims.
    pub idle: Duration,
    /// The same as `silence`, while all connections that a server may have are open and others wait to connect.
    pub crowded: Duration,
    /// For the store to need its idle memory again, which goes back to the system afterwards.
    pub memory: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts {
            silence: Duration::from_secs(30),
            idle: Duration::from_secs(600),
            crowded: Duration::from_millis(500),
            memory: Duration::from_secs(60),
        }
    }
}

/// The options of a server.
#[derive(Debug, Default)]
pub struct ServerOptions {
    /// The token that every request has to show. Without one, only processes of the server's own user on its own
    /// machine are served.
    pub token: Option<Token>,
    /// Serves over TLS.
    pub tls: Option<ServerTls>,
    /// Answers `/metrics` and `/health` to everybody.
    pub open_metrics: bool,
    /// How long clients are waited for.
    pub timeouts: Timeouts,
}

/// A server; it ends when this is dropped, and the claims that were made on its connections with it.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    /// `None` at its end.
    runtime: Option<Runtime>,
    process: u32,
}

/// The state that all connections share.
struct ServerState {
    store: Arc<TensorStore>,
    token: Option<Token>,
    tls: Option<ServerTls>,
    open_metrics: bool,
    timeouts: Timeouts,
    metrics: Arc<Metrics>,
    connections: Arc<Connections>,
    /// The user that this server belongs to.
    user: u32,
}

impl Server {
    /// Serves at `host`, on `port` or, for 0, on one that is free.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for an address that other machines reach, without a token; [`StoreError::Io`] where the
    /// port is taken or the system refuses.
    pub fn start(store: Arc<TensorStore>, host: &str, port: u16, options: ServerOptions) -> Result<Server, StoreError> {
        let object = || format!("{host}:{port}");
        let failed = |operation, error: &io::Error| StoreError::io(operation, object(), error);
        let found: Vec<SocketAddr> =
            (host, port).to_socket_addrs().map_err(|error| failed("find the address", &error))?.collect();
        let ServerOptions { token, tls, open_metrics, timeouts } = options;
        if token.is_none() && found.iter().any(|address| !address.ip().is_loopback()) {
            return Err(StoreError::Invalid(format!(
                "{host} can be reached from other machines, and without a token anybody there could read and delete: \
                 serve with a token, or at 127.0.0.1"
            )));
        }
        let listener = listen(&found).map_err(|error| failed("listen on", &error))?;
        let address = listener.local_addr().map_err(|error| failed("listen on", &error))?;
        let runtime = without_signals(runtime).map_err(|error| failed("start threads to serve", &error))?;
        let (metrics, connections) = (Arc::default(), Arc::new(Connections::new(timeouts)));
        let user = geteuid().as_raw();
        let server = ServerState { store, token, tls, open_metrics, timeouts, metrics, connections, user };
        let entered = runtime.enter();
        let listener = listener.into_form(tokio::net::TcpListener::from_std);
        drop(entered);
        let listener = listener.map_err(|error| failed("listen on", &error))?;
        runtime.spawn(trim_regularly(Arc::downgrade(&server.store), timeouts.memory));
        runtime.spawn(accept_all(listener, Arc::new(server)));
        Ok(Server { address, runtime: Some(runtime), process: std::process::id() })
    }

    /// The address that it serves at.
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
            .enable_io()
            .enable_time()
            .build()
    };
    // It panics, and says so, where the system has no thread left: one is tried before.
    let _ = thread::Builder::new().spawn(|| ())?.join();
    catch_unwind(build).unwrap_or_else(|_| Err(Errno::AGAIN.into()))
}

fn listen(addresses: &[SocketAddr]) -> io::Result<Socket<TcpListener>> {
    let listener = Socket::new(TcpListener::bind(addresses)?);
    // The library's own are 128.
    rustix::net::listen(&*listener, BACKLOG)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Returns memory to the system that the store does not need any more.
async fn trim_regularly(store: Weak<TensorStore>, interval: Duration) {
    loop {
        sleep(interval).await;
        let Some(store) = store.upgrade() else { break };
        store.trim();
    }
}

async fn accept_all(listener: Socket<tokio::net::TcpListener>, server: Arc<ServerState>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let admitted = server.connections.admit(Socket::new(stream)).await;
                let server = Arc::clone(&server);
                tokio::spawn(async move {
                    server.metrics.connections.inc();
                    serve(admitted, &server).await;
                    server.metrics.connections.dec();
                });
            }
            // Out of descriptors or memory, which passes; clients wait meanwhile.
            Err(_) => {
                server.connections.close_one();
                sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// Answers until the client hangs up, breaks the rules, or is silent for too long.
async fn serve(admitted: Admitted, server: &Arc<ServerState>) {
    let connection = Arc::clone(&admitted.connection);
    if set_socket_options(&connection.stream).is_err() {
        return;
    }
    let refusal_reason =
        if server.token.is_some() { None } else { reason_to_refuse(&connection.stream, server.user).await };
    let silence = server.timeouts.silence;
    let lacks_tls = server.tls.is_some() && timeout(silence, speaks_plain_text(&connection.stream)).await == Ok(true);
    let session =
        Session { server: Arc::clone(server), admitted, lacks_tls, refusal_reason, claimant: OnceLock::new() };
    let stream = ClientStream::new(Arc::clone(&connection), server.timeouts, Arc::clone(&server.metrics));
    let has_ended_well = match server.tls.as_ref().filter(|_| !lacks_tls) {
        None => serve_http(stream, session).await,
        Some(tls) => match timeout(silence, tls.acceptor().accept(stream)).await {
            Ok(Ok(stream)) => serve_http(stream, session).await,
            _ => false,
        },
    };
    if has_ended_well {
        // Were it closed with something unread, the kernel would take the last response back.
        let mut stream = ClientStream::new(connection, server.timeouts, Arc::clone(&server.metrics));
        let _ = timeout(LINGER, async {
            let mut nowhere = vec![0; 16 << 10];
            while let Ok(1..) = stream.read(&mut nowhere).await {}
        })
        .await;
    }
}

/// Whether the first byte of a client begins no TLS handshake.
async fn speaks_plain_text(stream: &TcpStream) -> bool {
    const HANDSHAKE: u8 = 0x16;
    let mut first = [HANDSHAKE];
    matches!(stream.peek(&mut first).await, Ok(1)) && first != [HANDSHAKE]
}

/// Speaks HTTP; whether it came to a proper end. A client may close its side after its last request.
async fn serve_http(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, session: Session) -> bool {
    let session = Arc::new(session);
    let service = service_fn(move |request| {
        let session = Arc::clone(&session);
        async move { session.handle(request).await }
    });
    http1::Builder::new()
        .auto_date_header(false)
        .half_close(true)
        .header_read_timeout(None)
        .max_headers(MAX_FIELDS)
        .max_header_size(LONGEST_HEAD)
        .max_buf_size(BUFFER)
        .serve_connection(TokioIo::new(stream), service)
        .await
        .is_ok()
}

fn set_socket_options(stream: &TcpStream) -> rustix::io::Result<()> {
    set_tcp_nodelay(stream, true)?;
    set_socket_keepalive(stream, true)?;
    set_tcp_keepidle(stream, Duration::from_secs(10))?;
    set_tcp_keepintvl(stream, Duration::from_secs(5))?;
    set_tcp_keepcnt(stream, 3)
}

/// The reason to refuse a client without a token, unless it is a process of `user`.
async fn reason_to_refuse(stream: &TcpStream, user: u32) -> Option<String> {
    const ADVICE: &str = "without a token only processes of the user that serves are answered: serve with a token";
    /// Where the process has no descriptor left to ask with.
    const TRIES: usize = 100;
    const BETWEEN_TRIES: Duration = Duration::from_millis(20);

    let (Ok(client), Ok(server)) = (stream.peer_addr(), stream.local_addr()) else {
        return Some(ADVICE.to_owned());
    };
    let mut reason = ADVICE.to_owned();
    for _ in 0..TRIES {
        match peer_user::user_of(client, server) {
            Ok(Some(owner)) if owner == user => return None,
            Err(error) => {
                reason = format!("{ADVICE} (the owner of the connection cannot be looked up: {error})");
                sleep(BETWEEN_TRIES).await;
            }
            _ => return Some(reason),
        }
    }
    Some(reason)
}

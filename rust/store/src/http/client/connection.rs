//! One connection to an owner: hyper's, run by the calling thread.

use std::convert::Infallible;
use std::error::Error;
use std::fmt;
use std::future::{Future, pending, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use http_body_util::Full;
use hyper::Request;
use hyper::body::{Body, Bytes};
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper_util::rt::TokioIo;
use rustix::process::geteuid;
use tokio::io::{AsyncRead, AsyncWrite};

use super::Trust;
use super::incoming_response::IncomingResponse;
use super::socket::ClientSocket;
use crate::error::StoreError;
use crate::http::peer_user;
use crate::http::route::MediaType;
use crate::http::tls::{ClientTls, certificate_fault};
use crate::http::token::Token;
use crate::time_limit::TimeLimit;

/// Bytes of the longest head of a response.
const LONGEST_HEAD: usize = 16 << 10;

/// Bytes that are received at once, so that they are summed before they leave the processor's cache.
const BUFFER: usize = 256 << 10;

const NO_TLS: &str = "it does not serve over TLS: call trust(ADDR, token=…) for it without tls, or leave out \
                      --certificate";

const NO_HTTP: &str = "its answer is no HTTP; it may serve over TLS: call trust(ADDR, token=…, tls=CERTIFICATE), or \
                       give the command --certificate";

/// The failure of a connection.
#[derive(Debug)]
pub(super) enum ConnectionFailure {
    /// The connection or the response is broken. The caller may try again.
    Broken(String),
    /// The machine does not answer. Another try would take as long.
    Silent,
    /// The process there speaks another protocol, or is not trusted; the text says what to do. Another try would fail.
    Misfit(String),
    /// The error of the call.
    Final(StoreError),
}

impl From<StoreError> for ConnectionFailure {
    fn from(error: StoreError) -> Self {
        ConnectionFailure::Final(error)
    }
}

/// A failure that another connection may not have.
pub(super) fn broken(error: &(dyn Error + 'static)) -> ConnectionFailure {
    ConnectionFailure::Broken(with_causes(error))
}

/// The text of an error, and those of its causes.
pub(super) fn with_causes(error: &(dyn Error + 'static)) -> String {
    let (mut text, mut cause) = (error.to_string(), error.source());
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

/// A request to an owner.
pub(super) type HttpRequest = Request<Full<Bytes>>;

/// A request whose answer is JSON. `body` is sent as JSON, where it is not empty.
pub(super) fn json_request(
    owner: &str,
    token: Option<&Token>,
    method: &str,
    path: &str,
    body: Vec<u8>,
) -> Result<HttpRequest, StoreError> {
    let json = MediaType::Json.name();
    let mut builder = Request::builder().method(method).uri(path).header(HOST, owner).header(ACCEPT, json);
    if !body.is_empty() {
        builder = builder.header(CONTENT_TYPE, json);
    }
    if let Some(token) = token {
        builder = builder.header(AUTHORIZATION, token.header());
    }
    let invalid = |error| StoreError::Invalid(format!("{method:?} {path:?} is no request to {owner}: {error}"));
    builder.body(Full::from(body)).map_err(invalid)
}

/// A connection to an owner.
pub(super) struct Connection {
    socket: ClientSocket,
    is_encrypted: bool,
    sender: SendRequest<Full<Bytes>>,
    driver: Driver,
}

/// Reads and writes the socket whenever it is polled. It never ends.
type Driver = Pin<Box<dyn Future<Output = Infallible> + Send>>;

impl Connection {
    /// Connects to `owner` at one of these addresses, over TLS where it is trusted with that. Without a token or TLS, a
    /// process of another user of this machine is refused: it may listen where an owner has ended.
    pub(super) fn open(
        owner: &str,
        addresses: &[SocketAddr],
        trust: &Trust,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<Self, ConnectionFailure> {
        let is_trusted = trust.token.is_some() || trust.tls.is_some();
        let mut last = ConnectionFailure::Broken("its host name has no address".to_owned());
        for address in addresses {
            // The first request to connect may have been lost on the way.
            for _ in 0..2 {
                let connected = ClientSocket::connect(address, time_limit).and_then(|socket| {
                    if socket.is_some() && !is_trusted && address.ip().to_canonical().is_loopback() {
                        check_user(*address)?;
                    }
                    Ok(socket)
                });
                match connected {
                    Ok(Some(socket)) => return Connection::over(socket, owner, trust.tls.as_ref(), time_limit),
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

    fn over(
        socket: ClientSocket,
        owner: &str,
        tls: Option<&ClientTls>,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<Self, ConnectionFailure> {
        let stream = socket.clone();
        let opened = match tls {
            None => socket.block_on(speak_http(stream), time_limit)?,
            Some(tls) => {
                let encrypted = tls.connect(owner, stream)?;
                socket.block_on(async { speak_http(encrypted.await?).await }, time_limit)?
            }
        };
        let (sender, driver) = opened.map_err(|error| match handshake_failure(&*error) {
            Some(reason) => ConnectionFailure::Misfit(reason),
            None => broken(&*error),
        })?;
        Ok(Connection { socket, is_encrypted: tls.is_some(), sender, driver })
    }

    /// Whether it can be used for a request: this process opened it, the last response was read to its end, and the
    /// other side keeps it open and has sent nothing more.
    pub(super) fn is_idle(&mut self) -> bool {
        // A child made by `fork` must not touch it.
        if !self.socket.is_own() {
            return false;
        }
        let Connection { socket, sender, driver, .. } = self;
        let polled = poll_fn(|context| {
            let _ = driver.as_mut().poll(context);
            Poll::Ready(sender.is_ready())
        });
        socket.poll(pin!(polled), &mut Context::from_waker(Waker::noop())) == Poll::Ready(true)
    }

    /// Sends a request, and receives the head of its response.
    ///
    /// # Errors
    /// [`ConnectionFailure::Broken`] also if the response does not tell its length.
    pub(super) fn send(
        &mut self,
        request: HttpRequest,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<IncomingResponse<'_>, ConnectionFailure> {
        let response = self.sender.send_request(request);
        let is_encrypted = self.is_encrypted;
        let answered = self.run(response, time_limit)?.map_err(|error| {
            match error.is_parse() && !error.is_parse_too_large() && !is_encrypted {
                true => ConnectionFailure::Misfit(NO_HTTP.to_owned()),
                false => broken(&error),
            }
        });
        let (head, body) = answered?.into_parts();
        if body.size_hint().exact().is_none() {
            return Err(ConnectionFailure::Broken("it does not tell the length of its body".to_owned()));
        }
        Ok(IncomingResponse::new(head.status.as_u16(), body, self))
    }

    /// Runs the connection until `future` ends.
    pub(super) fn run<F: Future>(
        &mut self,
        future: F,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<F::Output, ConnectionFailure> {
        let Connection { socket, driver, .. } = self;
        let mut future = pin!(future);
        let both = poll_fn(|context| {
            let _ = driver.as_mut().poll(context);
            future.as_mut().poll(context)
        });
        socket.block_on(both, time_limit)
    }
}

/// The reason why a handshake of TLS fails each time, and what to do about it; `None` for any other error.
fn handshake_failure(error: &(dyn Error + 'static)) -> Option<String> {
    let cause = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref)?;
    match cause.downcast_ref::<rustls::Error>()? {
        rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType) => Some(NO_TLS.to_owned()),
        rustls::Error::InvalidCertificate(error) => Some(certificate_fault(error)),
        _ => None,
    }
}

/// Checks that a process of this user listens at an address of this machine.
fn check_user(address: SocketAddr) -> Result<(), ConnectionFailure> {
    match peer_user::user_of_listener(address).map_err(|error| broken(&error))? {
        Some(user) if user == geteuid().as_raw() => Ok(()),
        Some(_) => Err(ConnectionFailure::Broken("a process of another user listens there".to_owned())),
        None => Err(ConnectionFailure::Broken("no process listens there any more".to_owned())),
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Connection").field("socket", &self.socket).finish_non_exhaustive()
    }
}

async fn speak_http(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
) -> Result<(SendRequest<Full<Bytes>>, Driver), Box<dyn Error + Send + Sync>> {
    let mut builder = Builder::new();
    builder.max_header_size(LONGEST_HEAD).max_buf_size(BUFFER);
    let (sender, http) = builder.handshake(TokioIo::new(stream)).await?;
    let driver: Driver = Box::pin(async move {
        // Its failure is also that of the future that waits for a response.
        let _ = http.await;
        pending().await
    });
    Ok((sender, driver))
}

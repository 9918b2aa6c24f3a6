//! [`WorkerClient`]: small requests to one other process, over one connection that is kept.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use super::connection::{Connection, ConnectionFailure};
use super::connection::{HttpRequest, json_request};
use super::{Trust, resolve};
use crate::error::StoreError;
use crate::http::tls::ClientTls;
use crate::http::token::Token;
use crate::time_limit::TimeLimit;

/// Bytes of the largest answer that is read.
const LONGEST_ANSWER: u64 = 64 << 20;

/// How often a request looks whether another one has given the connection back.
const BETWEEN_TRIES: Duration = Duration::from_millis(2);

/// The number of the next connection of any client of this process.
static NEXT_CONNECTION: AtomicU64 = AtomicU64::new(1);

/// Sends requests to one process, one after the other, over one connection.
///
/// The server releases what a controller claimed when the connection of the claim ends, so the connection stays open
/// for as long as this client. It is closed when a request fails half way or is interrupted, and opened again by the
/// next request. A kept connection that the other side has closed meanwhile is replaced once, and the request sent
/// again: use it only for requests that may be repeated.
///
/// A child made by `fork` has no connection of its parent's; it must make clients of its own.
#[derive(Debug)]
pub struct WorkerClient {
    addr: Arc<str>,
    trust: Trust,
    /// Held while a request uses the connection.
    connection: Mutex<Option<Connection>>,
    is_closed: AtomicBool,
    /// The number of the latest connection; 0 before the first.
    connection_number: AtomicU64,
}

impl WorkerClient {
    /// A client of the process that serves at `addr` (`host:port`). It sends `token` with every request, and speaks TLS
    /// if certificates to trust are given.
    pub fn new(addr: &str, token: Option<Token>, tls: Option<ClientTls>) -> Self {
        WorkerClient {
            addr: addr.into(),
            trust: Trust { token, tls },
            connection: Mutex::default(),
            is_closed: AtomicBool::new(false),
            connection_number: AtomicU64::new(0),
        }
    }

    /// Status and body of the answer. `body` is sent as JSON, where it is not empty.
    ///
    /// # Errors
    /// [`StoreError::Unanswered`] if the process cannot be reached, closes the connection or sends no HTTP;
    /// [`StoreError::TimedOut`] at the deadline; [`StoreError::Invalid`] for an invalid address; the errors of `time_limit`.
    pub fn request(
        &self,
        method: &str,
        path: &str,
        body: &[u8],
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(u16, Vec<u8>), StoreError> {
        if !path.starts_with('/') {
            return Err(StoreError::Invalid(format!("{path:?} is no path: it begins with '/'")));
        }
        let request = json_request(&self.addr, self.trust.token.as_ref(), method, path, body.to_vec())?;
        let deadline = time_limit.deadline();
        let mut check_cancelled = || {
            if self.is_closed.load(Ordering::Relaxed) {
                let reason = "the connection was closed by this process".to_owned();
                return Err(StoreError::Unanswered { owner: Arc::clone(&self.addr), reason });
            }
            time_limit.check_cancelled()
        };
        let mut time_limit = TimeLimit::new(deadline, &mut check_cancelled);
        let answered = self.exchange(request, &mut time_limit);
        answered.map_err(|failure| failure.into_error(&self.addr, None))
    }

    fn exchange(
        &self,
        request: HttpRequest,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(u16, Vec<u8>), ConnectionFailure> {
        let mut kept = self.lock(time_limit)?;
        // Where it fails half way, the connection is closed.
        if let Some(mut connection) = kept.take()
            && connection.is_idle()
        {
            match self.exchange_on(&mut connection, request.clone(), time_limit) {
                Ok(answer) => {
                    *kept = self.reusable(connection);
                    return Ok(answer);
                }
                // The other side closed it at the moment of its use.
                Err(ConnectionFailure::Broken(_)) => {}
                Err(other) => return Err(other),
            }
        }
        time_limit.check_cancelled()?;
        let addresses = resolve(&self.addr, time_limit)?;
        let mut connection = Connection::open(&self.addr, &addresses, &self.trust, time_limit)?;
        self.connection_number.store(NEXT_CONNECTION.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        let answer = self.exchange_on(&mut connection, request, time_limit)?;
        *kept = self.reusable(connection);
        Ok(answer)
    }

    fn reusable(&self, mut connection: Connection) -> Option<Connection> {
        (connection.is_idle() && !self.is_closed.load(Ordering::Relaxed)).then_some(connection)
    }

    /// Waits until no other request has the connection.
    fn lock(&self, time_limit: &mut TimeLimit<'_>) -> Result<MutexGuard<'_, Option<Connection>>, ConnectionFailure> {
        loop {
            match self.connection.try_lock() {
                Ok(connection) => return Ok(connection),
                Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => {
                    std::thread::sleep(time_limit.next_wait().min(BETWEEN_TRIES));
                    time_limit.check()?;
                }
            }
        }
    }

    fn exchange_on(
        &self,
        connection: &mut Connection,
        request: HttpRequest,
        time_limit: &mut TimeLimit<'_>,
    ) -> Result<(u16, Vec<u8>), ConnectionFailure> {
        let response = connection.send(request, time_limit)?;
        if response.left() > LONGEST_ANSWER {
            let reason = format!("its answer has {} bytes, more than {LONGEST_ANSWER}", response.left());
            return Err(StoreError::Unanswered { owner: Arc::clone(&self.addr), reason }.into());
        }
        Ok((response.status, response.collect(time_limit)?))
    }

    /// A number that identifies the latest connection among all of this process; `None` before the first request. It
    /// changes when a connection was lost and another one opened.
    pub fn connection_number(&self) -> Option<u64> {
        Some(self.connection_number.load(Ordering::Relaxed)).filter(|number| *number > 0)
    }

    /// Closes the connection. A request that is under way fails within 50 ms, and so does each later one.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
        // A request under way notices it, and drops the connection.
        if let Ok(mut connection) = self.connection.lock() {
            drop(connection.take());
        }
    }
}

//! `ShardServer`, `WorkerClient`, and the clients that fetch.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use tundish_shm::PerProcess;
use tundish_store::http::{self, Client, ClientTls, Server, ServerOptions, ServerTls, Token, Trust};
use tundish_store::{TimeLimit, Transport};

use super::shard_store::{ShardStore, check_signals, deadline_of};
use crate::error::BindingError;
use crate::long_work::enter;
use crate::shm::DropWithoutGil;

/// Fetches over sockets also on one node.
static OF_SOCKETS: PerProcess<Client> = PerProcess::new(Client::of_sockets);

/// The client that fetches.
pub(super) fn transport(shared_memory: bool) -> &'static dyn Transport {
    if shared_memory { Client::of_process() } else { OF_SOCKETS.get() }
}

/// Serves the shards of a store until it is closed.
#[pyclass(frozen)]
pub(crate) struct ShardServer {
    server: Mutex<Option<DropWithoutGil<Server>>>,
    port: u16,
    certificate_problem: Option<String>,
}

#[pymethods]
impl ShardServer {
    /// Serves `store` at `host`, on `port` or, for 0, on one that is free.
    ///
    /// Without a token only processes of this user on this machine are answered, and `host` has to be an address that
    /// only they reach. `tls` is a certificate and its private key, both in PEM; `open_metrics` answers `/metrics` and
    /// `/health` to everybody.
    #[new]
    #[pyo3(signature = (store, host, port, token=None, *, tls=None, open_metrics=false))]
    fn new(
        py: Python<'_>,
        store: &ShardStore,
        host: &Bound<'_, PyString>,
        port: u16,
        token: Option<&str>,
        tls: Option<(Vec<u8>, Vec<u8>)>,
        open_metrics: bool,
    ) -> Result<Self, BindingError> {
        let token = token_of(token)?;
        let tls = tls.map(|(certificate, key)| ServerTls::from_pem(&certificate, &key)).transpose()?;
        let certificate_problem = tls.as_ref().and_then(ServerTls::validity_problem);
        let options = ServerOptions { token, tls, open_metrics, ..Default::default() };
        // A lone surrogate becomes another character that no host name has.
        let host = host.to_string_lossy().into_owned();
        let store = Arc::clone(&store.store);
        let server = enter(py, None, move |_| Ok(Server::start(store, &host, port, options)?))?;
        let port = server.address().port();
        let server = Mutex::new(Some(DropWithoutGil::new(server)));
        Ok(ShardServer { server, port, certificate_problem })
    }

    /// Its port.
    #[getter]
    fn port(&self) -> u16 {
        self.port
    }

    /// Why its certificate is not valid now: it has expired, or is not valid yet; else None.
    #[getter]
    fn certificate_problem(&self) -> Option<&str> {
        self.certificate_problem.as_deref()
    }

    /// Stops serving. Idempotent.
    fn close(&self) {
        let server = self.server.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(server);
    }
}

/// Sends small requests to one other process over one connection, which stays open as long as this object or until
/// `close()`.
#[pyclass(frozen)]
pub(crate) struct WorkerClient {
    client: http::WorkerClient,
}

#[pymethods]
impl WorkerClient {
    /// `addr`: `host:port`; `token`: sent with every request; `tls`: the certificates to trust, in PEM.
    #[new]
    #[pyo3(signature = (addr, token=None, *, tls=None))]
    fn new(addr: &str, token: Option<&str>, tls: Option<Vec<u8>>) -> PyResult<Self> {
        let Trust { token, tls } = trust_of(token, tls)?;
        Ok(WorkerClient { client: http::WorkerClient::new(addr, token, tls) })
    }

    /// Status and body of the answer; `body` is sent as JSON. Threads that share a client wait for one another.
    ///
    /// Raises `TransferError` if the process cannot be reached, closes the connection or sends no HTTP, and
    /// `TimedOutError` after `timeout` seconds.
    #[pyo3(signature = (method, path, body=None, *, timeout))]
    fn request<'py>(
        &self,
        py: Python<'py>,
        method: &str,
        path: &str,
        body: Option<&[u8]>,
        timeout: f64,
    ) -> PyResult<(u16, Bound<'py, PyBytes>)> {
        let deadline = deadline_of(timeout)?;
        let client = &self.client;
        let (status, answer) = enter(py, None, move |signals| {
            let mut check_cancelled = || check_signals(signals);
            let mut time_limit = TimeLimit::new(deadline, &mut check_cancelled);
            Ok(client.request(method, path, body.unwrap_or_default(), &mut time_limit)?)
        })?;
        Ok((status, PyBytes::new(py, &answer)))
    }

    /// A number that identifies the latest connection; None before the first request. It changes when the connection
    /// was lost and opened again: claims that were made on the old one are gone.
    #[getter]
    fn connection_number(&self) -> Option<u64> {
        self.client.connection_number()
    }

    /// Closes the connection for good. A request that is under way in another thread fails.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.client.close());
    }
}

/// Sends `token`, or none, to the process that serves at exactly this address, and speaks TLS with it where `tls` has
/// the certificates to trust, in PEM.
#[pyfunction]
#[pyo3(signature = (owner, token=None, *, tls=None))]
pub(crate) fn trust_owner(owner: &str, token: Option<&str>, tls: Option<Vec<u8>>) -> PyResult<()> {
    let trust = trust_of(token, tls)?;
    OF_SOCKETS.get().trust(owner, trust.clone());
    Client::of_process().trust(owner, trust);
    Ok(())
}

fn trust_of(token: Option<&str>, tls: Option<Vec<u8>>) -> Result<Trust, BindingError> {
    let tls = tls.map(|certificates| ClientTls::trusting(&certificates)).transpose();
    Ok(Trust { token: token_of(token)?, tls: tls? })
}

fn token_of(token: Option<&str>) -> Result<Option<Token>, BindingError> {
    Ok(token.map(Token::new).transpose()?)
}

//! A process's server, and the clients with which it fetches.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};
use tundish_shm::PerProcess;
use tundish_store::http::{self, Client, Server, Timing, Token};
use tundish_store::{Node, Patience, Transport};

use super::node::{deadline_of, look};

use crate::enter::enter;
use crate::error::BindingError;
use crate::shm::drop_without_gil::DropWithoutGil;

/// For who wants bytes over sockets also on one node.
static OF_SOCKETS: PerProcess<Client> = PerProcess::new(Client::of_sockets);

/// The client to fetch with.
pub(super) fn transport(shared_memory: bool) -> &'static dyn Transport {
    if shared_memory { Client::of_process() } else { OF_SOCKETS.get() }
}

/// Serves what this process stores, as long as it is not closed.
#[pyclass(frozen)]
pub(crate) struct ShardServer {
    server: std::sync::Mutex<Option<DropWithoutGil<Server>>>,
    port: u16,
}

#[pymethods]
impl ShardServer {
    /// At `host`, on `port`, or on one that is free for 0. Others than this machine reach it with a token only.
    #[new]
    #[pyo3(signature = (host, port, token=None))]
    fn new(py: Python<'_>, host: &Bound<'_, PyString>, port: u16, token: Option<&str>) -> PyResult<Self> {
        let token = token_of(token)?;
        // Of a lone surrogate, which no host has in its name, it becomes another name that none has.
        let host = host.to_string_lossy().into_owned();
        let server =
            enter(py, None, move |_| Ok(Server::start(Node::of_process(), &host, port, token, Timing::default())?))?;
        let port = server.address().port();
        Ok(ShardServer { server: std::sync::Mutex::new(Some(DropWithoutGil::new(server))), port })
    }

    /// Which port it is.
    #[getter]
    fn port(&self) -> u16 {
        self.port
    }

    /// Ends it. Done twice is done once.
    fn close(&self) {
        let server = self.server.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
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
    /// `addr`: `host:port`; `token`: sent with every request.
    #[new]
    #[pyo3(signature = (addr, token=None))]
    fn new(addr: &str, token: Option<&str>) -> PyResult<Self> {
        Ok(WorkerClient { client: http::WorkerClient::new(addr, token_of(token)?) })
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
        let (status, answer) = enter(py, None, move |door| {
            let mut go_on = || look(door);
            let mut patience = Patience::new(deadline, &mut go_on);
            Ok(client.request(method, path, body.unwrap_or_default(), &mut patience)?)
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

/// From here on `token`, or none, is sent to who serves at exactly this address.
#[pyfunction]
#[pyo3(signature = (owner, token=None))]
pub(crate) fn trust_owner(owner: &str, token: Option<&str>) -> PyResult<()> {
    let token = token_of(token)?;
    OF_SOCKETS.get().trust(owner, token.clone());
    Client::of_process().trust(owner, token);
    Ok(())
}

fn token_of(token: Option<&str>) -> PyResult<Option<Token>> {
    Ok(token.map(Token::new).transpose().map_err(BindingError::from)?)
}

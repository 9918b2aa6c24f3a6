//! One connection of a client: admits its requests, and gives up its claims when it ends.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};

use hyper::body::Incoming;
use hyper::header::{AUTHORIZATION, HOST, HeaderName, HeaderValue, ORIGIN};
use hyper::http::request;
use hyper::{Request, Response};

use super::ServerState;
use super::connections::{Admitted, WaitsFor};
use super::handlers::{Handler, header_text};
use super::response::{Answer, ResponseBody};
use crate::Claimant;
use crate::http::route::Refusal;
use crate::http::route::Route;

/// One connection of a client. Its claims are given up when it ends.
pub(super) struct Session {
    pub(super) server: Arc<ServerState>,
    pub(super) admitted: Admitted,
    /// Whether the client speaks plain text to a server of TLS.
    pub(super) lacks_tls: bool,
    /// Why this client is not served, if it is a process of another user.
    pub(super) refusal_reason: Option<String>,
    /// The claimant of the claims that were made on this connection.
    pub(super) claimant: OnceLock<Claimant>,
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(claimant) = self.claimant.get() {
            self.server.store.release_claimant(*claimant);
        }
    }
}

impl Session {
    pub(super) async fn handle(&self, request: Request<Incoming>) -> io::Result<Response<ResponseBody>> {
        let connection = &self.admitted.connection;
        let (head, body) = request.into_parts();
        let answer = match self.admit(&head) {
            Err(refusal) => Answer::from(refusal).closes(),
            Ok(()) => {
                connection.set(WaitsFor::Client);
                match Handler::new(self, &head, body).await {
                    Err(Some(refusal)) => Answer::from(refusal).closes(),
                    // It closes the connection.
                    Err(None) => return Err(io::ErrorKind::ConnectionAborted.into()),
                    Ok(handler) => handler.answer().unwrap_or_else(Answer::from),
                }
            }
        };
        connection.set(WaitsFor::Client);
        self.server.metrics.count_answer(answer.status());
        Ok(answer.on(connection))
    }

    /// Refuses requests without the token, of other users, and of pages in a browser.
    ///
    /// A page in somebody's browser can send requests to this machine. They carry the origin of the page, unless its
    /// owner pointed the page's own host name at this machine (DNS rebinding): then they carry that name as `Host`.
    fn admit(&self, head: &request::Parts) -> Result<(), Refusal> {
        if self.lacks_tls {
            let reason = "this server speaks TLS: call trust(ADDR, token=…, tls=CERTIFICATE) in the client, or give \
                          the command --certificate";
            return Err(Refusal::new(400, reason));
        }
        let host = host_of(head)?;
        let site = header_text(&head.headers, &HeaderName::from_static("sec-fetch-site"));
        if head.headers.contains_key(ORIGIN) || site.is_some_and(|site| site != "none") {
            return Err(Refusal::new(403, "pages in a browser are not served"));
        }
        let route = Route::of(&head.method, head.uri.path());
        let is_open = self.server.open_metrics && matches!(route, Ok(Route::Health | Route::Metrics));
        match &self.server.token {
            _ if is_open => Ok(()),
            Some(token) => {
                let said = head.headers.get(AUTHORIZATION).map(|value| value.as_bytes());
                token.matches(said).then_some(()).ok_or_else(|| {
                    let reason =
                        "this server requires its token, as `Authorization: Bearer …`: call trust() in the client";
                    Refusal::new(401, reason)
                })
            }
            None => match &self.refusal_reason {
                Some(reason) => Err(Refusal::new(403, reason.clone())),
                None if is_local_name(host) && head.uri.authority().is_none_or(|name| is_local_name(name.as_str())) => {
                    Ok(())
                }
                None => {
                    Err(Refusal::new(403, "without a token only requests to an address or to localhost are served"))
                }
            },
        }
    }
}

/// The host that a request names, exactly once. A second one could be meant for somebody else on the way.
fn host_of(head: &request::Parts) -> Result<&str, Refusal> {
    let mut hosts = head.headers.get_all(HOST).iter();
    match (hosts.next().map(HeaderValue::to_str), hosts.next()) {
        (Some(Ok(host)), None) => Ok(host),
        _ => Err(Refusal::new(400, "a request has one field `Host`, of ASCII characters")),
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
    fn only_addresses_and_localhost_are_local_names() {
        for host in ["127.0.0.1", "127.0.0.1:80", "localhost", "LOCALHOST:80", "[::1]:80", "[::1]", "::1", "10.0.0.1:7"]
        {
            assert!(is_local_name(host), "{host}");
        }
        for host in ["", "evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "a:b"] {
            assert!(!is_local_name(host), "{host}");
        }
    }
}

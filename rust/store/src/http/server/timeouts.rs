//! How long a server waits for its clients.

use std::time::Duration;

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
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts {
            silence: Duration::from_secs(30),
            idle: Duration::from_secs(600),
            crowded: Duration::from_millis(500),
        }
    }
}

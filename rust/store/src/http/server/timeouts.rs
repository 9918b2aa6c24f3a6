//! How long a server waits for its clients.

use std::time::Duration;

/// How long a server waits for its clients.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// For the whole head of a request, from its first byte on, and for a TLS handshake.
    pub head: Duration,
    /// For the next 64 KiB of a body or its end, and for the client to take as much of a response.
    pub silence: Duration,
    /// For the next request on a connection that holds no claims.
    pub idle: Duration,
    /// For space in a store at its limit. A client that was given space and stays silent has half of that, so that
    /// the space goes to one that waits for it.
    pub space: Duration,
    /// As `silence`, while all connections that a server may have are open and others wait to connect.
    pub crowded: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Timeouts {
            head: Duration::from_secs(10),
            silence: Duration::from_secs(30),
            idle: Duration::from_secs(600),
            space: Duration::from_secs(10),
            crowded: Duration::from_millis(500),
        }
    }
}

impl Timeouts {
    /// For the next 64 KiB of a body for which space in the store is reserved.
    pub(super) fn with_space(&self) -> Duration {
        self.silence.min(self.space / 2)
    }
}

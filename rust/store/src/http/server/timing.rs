//! How long a server waits for whom.

use std::time::Duration;

/// How long a server waits for whom.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// For the whole head of a request, from its first byte on.
    pub head: Duration,
    /// For the next 64 KiB of a body or its end, and for a client to take as much of an answer.
    pub silence: Duration,
    /// For the next request on a connection that holds no claims.
    pub idle: Duration,
    /// For room for a shard that is sent to a store at its limit. Who got it and is silent has half of that, so that it
    /// goes to who waits for it.
    pub room: Duration,
    /// For the next 64 KiB, as `silence`, where there are as many connections as there may be and others wait to
    /// connect.
    pub crowded: Duration,
    /// Who is slower than this, in bytes a second, over a whole body and a `silence` in advance, waits for nothing.
    pub slowest: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            head: Duration::from_secs(10),
            silence: Duration::from_secs(30),
            idle: Duration::from_secs(600),
            room: Duration::from_secs(10),
            crowded: Duration::from_millis(500),
            slowest: 64 << 10,
        }
    }
}

impl Timing {
    /// For the next bytes of a body that has got its room.
    pub(super) fn with_room(&self) -> Duration {
        self.silence.min(self.room / 2)
    }

    /// For a body of so many bytes.
    pub(super) fn whole(&self, bytes: u64) -> Duration {
        self.silence + Duration::from_secs(bytes / self.slowest.max(1))
    }
}

//! `StoreError`: the error of this crate.
//!
//! An error can be cloned: all threads that wait for a fetch get its failure.

use std::sync::Arc;

use tundish_shm::ShmError;

use crate::Step;
use crate::shard_id::{InvalidShardId, ShardId};

/// Why shards could not be stored, fetched or found.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Shared memory failed.
    #[error("{0}")]
    Memory(Arc<ShmError>),
    /// The limit is reached, and nothing was freed until the deadline.
    #[error(
        "{asked} bytes do not fit in the {side}: {used} of its {limit} bytes are in use and {escaped} more are held by \
         tensors that are still in use after their step; drain what was consumed, or raise the limit"
    )]
    Full {
        /// `"storage"` or `"fetch buffer"`.
        side: &'static str,
        /// Bytes that were asked for.
        asked: u64,
        /// Bytes in use.
        used: u64,
        /// Bytes given up, with a view alive in some process.
        escaped: u64,
        /// The limit.
        limit: u64,
    },
    /// It would not fit even in an empty store.
    #[error(
        "{asked} bytes never fit in the {side}, whose limit is {limit} bytes; raise the limit, or store less at once"
    )]
    TooLarge {
        /// `"storage"` or `"fetch buffer"`.
        side: &'static str,
        /// Bytes that were asked for.
        asked: u64,
        /// The limit.
        limit: u64,
    },
    /// The owner does not have these shards.
    #[error("{}", missing(owner.as_deref(), shards))]
    Missing {
        /// The owner; this process if `None`.
        owner: Option<Arc<str>>,
        /// The missing shards.
        shards: Vec<MissingShard>,
    },
    /// A shard of this name is there.
    #[error("shard {id} exists already, and a shard never changes: store under another id")]
    Exists {
        /// The shard.
        id: ShardId,
    },
    /// The step ended before its work did.
    #[error("step {step} ended and was drained meanwhile; nothing that was fetched or claimed for it is kept")]
    StepEnded {
        /// The step.
        step: Step,
    },
    /// The step belongs to another claimant.
    #[error("step {step} belongs to another controller, or this process is among the workers under two addresses")]
    StepTaken {
        /// The step.
        step: Step,
    },
    /// The shard was drained by its id while it was being fetched.
    #[error("shard {id} was drained while it was being fetched; nothing is kept of it")]
    Drained {
        /// The shard.
        id: ShardId,
    },
    /// The shard differs from the declaration of the handle.
    #[error("shard {id} of {owner} is {found}, and its handle declares {declared}")]
    Mismatch {
        /// The shard.
        id: ShardId,
        /// Its owner.
        owner: Arc<str>,
        /// Type and shape in the handle.
        declared: String,
        /// Type and shape of the shard.
        found: String,
    },
    /// A shard arrived damaged.
    #[error("shard {id} of {owner} arrived damaged: {reason}; fetch it again")]
    Corrupt {
        /// The shard.
        id: ShardId,
        /// Its owner.
        owner: Arc<str>,
        /// The damage.
        reason: String,
    },
    /// The owner of a shard does not answer.
    #[error("cannot fetch shard {id} from {owner}: {reason}")]
    Unreachable {
        /// The first shard that was asked for.
        id: ShardId,
        /// The owner.
        owner: Arc<str>,
        /// The failure.
        reason: String,
    },
    /// A process does not answer.
    #[error("cannot reach {owner}: {reason}")]
    Unanswered {
        /// The owner.
        owner: Arc<str>,
        /// The failure.
        reason: String,
    },
    /// The owner refused the request.
    #[error("{owner} refused ({status}): {reason}")]
    Refused {
        /// The owner.
        owner: Arc<str>,
        /// The status of HTTP.
        status: u16,
        /// The message of the owner.
        reason: String,
    },
    /// The deadline passed.
    #[error("timed out while waiting for {what}")]
    TimedOut {
        /// The awaited event.
        what: String,
    },
    /// A call of the operating system failed.
    #[error("cannot {operation} {object}: {reason}")]
    Io {
        /// A verb phrase such as `"listen on"`.
        operation: &'static str,
        /// Its object.
        object: String,
        /// The kind of the system's error.
        kind: std::io::ErrorKind,
        /// The system's message.
        reason: String,
    },
    /// An argument that cannot be used.
    #[error("{0}")]
    Invalid(String),
    /// The caller gave up.
    #[error("interrupted")]
    Interrupted,
}

impl StoreError {
    /// The error of a call of the operating system.
    pub(crate) fn io(operation: &'static str, object: impl Into<String>, error: &std::io::Error) -> Self {
        StoreError::Io { operation, object: object.into(), kind: error.kind(), reason: error.to_string() }
    }
}

/// A shard that its owner does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingShard {
    /// The shard.
    pub id: ShardId,
    /// Whether the owner had it, and has removed or drained it since.
    pub was_removed: bool,
}

impl From<InvalidShardId> for StoreError {
    fn from(error: InvalidShardId) -> Self {
        StoreError::Invalid(error.to_string())
    }
}

impl From<ShmError> for StoreError {
    fn from(error: ShmError) -> Self {
        match error {
            ShmError::Interrupted => StoreError::Interrupted,
            other => StoreError::Memory(Arc::new(other)),
        }
    }
}

fn missing(owner: Option<&str>, shards: &[MissingShard]) -> String {
    /// So many are named.
    const NAMED: usize = 8;

    let by = owner.unwrap_or("this process");
    let (removed, unknown): (Vec<_>, Vec<_>) = shards.iter().partition(|shard| shard.was_removed);
    let say = |what: &str, shards: &[&MissingShard]| {
        let names: Vec<_> = shards.iter().take(NAMED).map(|shard| shard.id.to_string()).collect();
        let rest = shards.len().saturating_sub(NAMED);
        let more = if rest > 0 { format!(" and {rest} more") } else { String::new() };
        (!shards.is_empty()).then(|| format!("{by} {what}: {}{more}", names.join(", ")))
    };
    let parts = [
        say("has drained or removed these shards, whose handles cannot be used any more", &removed),
        say("has no such shards", &unknown),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join("; ")
}

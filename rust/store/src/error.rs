//! The one error of this crate. Every variant names what it is about.
//!
//! An error can be cloned: the failure of one fetch is told to all who waited for it.

use std::sync::Arc;

use tundish_shm::ShmError;

use crate::Epoch;
use crate::shard_id::ShardId;

/// Why shards could not be stored, fetched or found.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Shared memory failed.
    #[error("{0}")]
    Memory(Arc<ShmError>),
    /// The limit is reached, and nothing was freed until the deadline.
    #[error(
        "{asked} bytes do not fit in the {account}: {used} of its {limit} bytes are in use and {escaped} more are held by \
         tensors that outlived what they were fetched or stored for; drain what was consumed, or raise the limit"
    )]
    Full {
        /// `"storage"` or `"fetch buffer"`.
        account: &'static str,
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
        "{asked} bytes never fit in the {account}, whose limit is {limit} bytes; raise the limit, or store less at once"
    )]
    TooLarge {
        /// `"storage"` or `"fetch buffer"`.
        account: &'static str,
        /// Bytes that were asked for.
        asked: u64,
        /// The limit.
        limit: u64,
    },
    /// The owner has not got these shards.
    #[error("{}", missing(owner.as_deref(), shards))]
    Missing {
        /// Whom they were asked of; this process where `None`.
        owner: Option<Arc<str>>,
        /// Which.
        shards: Vec<MissingShard>,
    },
    /// A shard of this name is there.
    #[error("shard {id} exists already; a shard never changes: store under another id")]
    Exists {
        /// Which.
        id: ShardId,
    },
    /// The step ended before its work did.
    #[error("step {epoch} has ended and was drained meanwhile; nothing is kept of what was fetched or claimed for it")]
    StepEnded {
        /// Which.
        epoch: Epoch,
    },
    /// The step is somebody else's.
    #[error("step {epoch} is another controller's, or this process is among the workers under two addresses")]
    StepTaken {
        /// Which.
        epoch: Epoch,
    },
    /// The shard was drained by its id while it was being fetched.
    #[error("shard {id} was drained while it was being fetched; nothing is kept of it")]
    Drained {
        /// Which.
        id: ShardId,
    },
    /// What came is not what the handle declares.
    #[error("shard {id} of {owner} is {found}, and its handle declares {declared}")]
    Mismatch {
        /// Which shard.
        id: ShardId,
        /// Whose.
        owner: Arc<str>,
        /// What the handle says.
        declared: String,
        /// What came.
        found: String,
    },
    /// What came is damaged.
    #[error("shard {id} of {owner} arrived damaged: {reason}")]
    Corrupt {
        /// Which shard.
        id: ShardId,
        /// Whose.
        owner: Arc<str>,
        /// What is wrong with it.
        reason: String,
    },
    /// The owner does not answer.
    #[error("cannot fetch shard {id} from {owner}: {reason}; does that process still run and serve?")]
    Unreachable {
        /// The first shard that was asked for.
        id: ShardId,
        /// Whom.
        owner: Arc<str>,
        /// What became of it.
        reason: String,
    },
    /// A process does not answer.
    #[error("cannot reach {owner}: {reason}; does that process still run and serve?")]
    Unanswered {
        /// Whom.
        owner: Arc<str>,
        /// What became of it.
        reason: String,
    },
    /// The owner answered that it will not.
    #[error("{owner} refused ({status}): {reason}")]
    Refused {
        /// Who.
        owner: Arc<str>,
        /// The status of HTTP.
        status: u16,
        /// What it said.
        reason: String,
    },
    /// The deadline passed.
    #[error("waited in vain for {what}: the time that was given is over")]
    TimedOut {
        /// What was waited for.
        what: String,
    },
    /// A call of the operating system failed.
    #[error("cannot {operation} {object}: {reason}")]
    Io {
        /// What was tried, a verb phrase such as `"listen on"`.
        operation: &'static str,
        /// What it was tried on.
        object: String,
        /// What the system calls it.
        kind: std::io::ErrorKind,
        /// The system's words.
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
    /// A call of the operating system that failed: what was tried, on what, and the answer.
    pub(crate) fn io(operation: &'static str, object: impl Into<String>, error: &std::io::Error) -> Self {
        StoreError::Io { operation, object: object.into(), kind: error.kind(), reason: error.to_string() }
    }
}

/// A shard that its owner has not got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingShard {
    /// Which.
    pub id: ShardId,
    /// Whether the owner had it, and has removed or drained it since.
    pub was_removed: bool,
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

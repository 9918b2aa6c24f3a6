//! The writer lock of a root: at most one process on all machines that share the root holds it.
//!
//! The file `.owner` carries a kernel lock and a record with a heartbeat.
//!
//! Invariants:
//!
//! 1. The kernel lock decides where it can. The kernel drops it with the process, however that ends. It belongs to the
//!    process (fcntl): network file systems carry it to other machines, and children made by `fork` do not inherit it.
//! 2. A process also loses such a lock when it closes the file elsewhere, as a backup does. The lock is therefore taken
//!    again with every heartbeat. A process that gets the lock still respects a record whose process is alive. If the
//!    owner runs under the same kernel but in another container, it waits for two heartbeats first.
//! 3. On a network file system mounted without locks, the lock may not reach every machine. There only a record whose
//!    owner is dead or has released it is taken over at once. Any other must be unchanged for
//!    [`HeartbeatTiming::stale`], measured on this machine, so that clocks need not agree. Where locks do not exist at
//!    all, a new owner also checks one heartbeat later that the record is still its own.
//! 4. Before each change the owner checks that the record is still its own. A process that was stopped while another
//!    took over notices that, and changes nothing.
//! 5. The file is never removed or replaced, so that all processes lock the same file.

mod acquire;
mod heartbeat;
mod lock_file;
mod lock_record;
mod process_identity;

pub use acquire::WaitCallback;
pub(crate) use acquire::{WriterLock, nonce_of};
pub use lock_file::HeartbeatTiming;
pub use process_identity::ProcessIdentity;

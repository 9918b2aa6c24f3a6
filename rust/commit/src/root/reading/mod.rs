//! Reading and verifying checkpoints, with a lock that keeps them from being removed.

mod read_lock;
mod readonly_root;
mod verify;

pub use read_lock::{ReadLock, read_lock_at, verify_checkpoint};
pub(crate) use read_lock::{ReaderExclusion, exclude_readers};
pub use readonly_root::{DamagedCheckpoint, ReadonlyRoot, RootListing};

//! Who owns a root: at most one process at a time, on all machines that share it.
//!
//! The file `.owner` carries a kernel lock and a record with a heartbeat. What always holds:
//!
//! 1. The lock decides where it can: the kernel drops it with the process, however that ends. It is a lock of the
//!    process (fcntl), which network file systems carry to other machines and which children made by `fork` do not
//!    inherit; an orphaned data worker does not keep a root from being opened again.
//! 2. Such a lock is also lost when its own process closes the file elsewhere (a backup made by it, say). So it is
//!    taken again with every beat, and who gets it does not believe it against a record whose process he sees alive,
//!    nor, where that runs under the same kernel and cannot be seen (in another container), before two beats were due.
//! 3. Where the lock may not reach every machine (a network file system, mounted without locks), only a record whose
//!    owner is known to be dead or to have let go is taken over at once; any other must have stood still for
//!    [`Timing::stale`], measured on this machine alone, so that clocks need not agree. That is waited for however
//!    short the wait for a living owner is to be. What cannot be locked at all is believed in only when the record is
//!    still one's own a beat later.
//! 4. Before anything is changed, the owner looks whether the record is still its own. A process that was stopped for
//!    so long that another took over finds that out, and changes nothing.
//! 5. The file is never removed or replaced: whoever locks it holds what all others lock.

mod heart;
mod identity;
mod record;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use super::directory::Directory;
use super::layout;
use crate::disk::{Disk, EntryKind, Lock, write_all};
use crate::error::CommitError;

use heart::Heart;
pub use identity::Identity;
use identity::Life;
use record::Record;

/// Between two tries for a lock that another holds.
const POLL: Duration = Duration::from_millis(50);

/// How owners of one root keep time; all of them alike.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Between two beats.
    pub beat: Duration,
    /// How long a heart must have stood still to count as dead.
    pub stale: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self { beat: Duration::from_secs(3), stale: Duration::from_secs(20) }
    }
}

/// Called while something waits; an error ends the wait.
pub type Patience<'a> = &'a mut dyn FnMut() -> Result<(), CommitError>;

/// The ownership of a root. Dropped, it lets go.
pub(super) struct Owner<D: Disk + Clone + 'static> {
    claim: Arc<Claim<D>>,
    /// `None` while it is being dropped.
    heart: Option<Heart>,
    process: u32,
}

/// What the owner holds; shared with its heart.
pub(super) struct Claim<D: Disk> {
    disk: D,
    file: D::File,
    path: PathBuf,
    own: Record,
    /// Whether what is written has to be sent to a server to be seen by others.
    is_shared: bool,
    timing: Timing,
}

impl<D: Disk + Clone + 'static> Owner<D> {
    /// Waits up to `wait` for whoever owns the root to die or let go, and until it is known whether anybody does.
    ///
    /// # Errors
    /// [`CommitError::RootInUse`], which names the owner; [`CommitError::NameTaken`]; what `patience` ends with.
    pub(super) fn acquire(
        root: &Directory<D>,
        identity: Identity,
        timing: Timing,
        wait: Duration,
        patience: Patience<'_>,
    ) -> Result<Self, CommitError> {
        let until = Instant::now().checked_add(wait);
        let mut sight = Sight::new();
        loop {
            patience()?;
            let (found, is_decided) = match Attempt::make(root, &identity, &mut sight, timing)? {
                Attempt::Free(file) => match take(root, file, identity.clone(), timing)? {
                    Ok(claim) => {
                        let claim = Arc::new(claim);
                        let heart = Heart::start(Arc::clone(&claim)).inspect_err(|_| claim.release())?;
                        return Ok(Self { claim, heart: Some(heart), process: std::process::id() });
                    }
                    Err(found) => (found, true),
                },
                Attempt::Held(found) => (found, true),
                Attempt::Unsure(found) => (found, sight.has_changed),
                Attempt::HeldHere => {
                    let owner = format!("this very process, {}, which has it open already", identity.pid);
                    return Err(CommitError::RootInUse { path: root.path.clone(), owner });
                }
            };
            if is_decided && until.is_some_and(|until| Instant::now() >= until) {
                let owner = found.map_or("an unknown process".to_owned(), |record| record.describe());
                return Err(CommitError::RootInUse { path: root.path.clone(), owner });
            }
            std::thread::sleep(POLL);
        }
    }

    /// Makes sure that the root is still this process's, before it changes anything.
    ///
    /// # Errors
    /// [`CommitError::RootLost`].
    pub(super) fn check(&self, root: &Directory<D>) -> Result<(), CommitError> {
        let lost = |reason: String| Err(CommitError::RootLost { path: root.path.clone(), reason });
        match root.look_at(OsStr::new(layout::OWNER))? {
            Some(named) if named.is_same(&self.claim.disk.file_status(&self.claim.file, &self.claim.path)?) => {}
            _ => return lost(format!("its lock {} was removed", layout::OWNER)),
        }
        match self.claim.read_again()? {
            Some(record) if record.nonce == self.claim.own.nonce => Ok(()),
            Some(record) => lost(format!("{} took it over", record.describe())),
            None => lost(format!("its lock {} was overwritten", layout::OWNER)),
        }
    }
}

impl<D: Disk + Clone + 'static> Drop for Owner<D> {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // A copy in a child made by `fork`.
            std::mem::forget(self.heart.take());
            return;
        }
        // First the heart: it must not beat after the release.
        self.heart = None;
        self.claim.release();
    }
}

impl<D: Disk> Claim<D> {
    /// What the file says now, wherever it was written: network file systems ask their server again after a lock,
    /// which changes nothing where it is held.
    fn read_again(&self) -> Result<Option<Record>, CommitError> {
        self.disk.lock_file_for_process(&self.file, &self.path)?;
        Ok(Record::parse(&record::read(&self.disk, &self.file, &self.path)?))
    }

    fn write(&self, record: &Record) -> Result<(), CommitError> {
        let bytes = record.to_bytes();
        write_all(&self.disk, &self.file, 0, &bytes, &self.path, bytes.len(), |_| Ok(()))?;
        // For its way to the server, not to the disk: nobody needs a heartbeat after a crash.
        if self.is_shared { self.disk.fsync(&self.file, &self.path) } else { Ok(()) }
    }

    /// Lets go, if it is held. Best effort: who comes next sees that the process is gone, or that the heart stands
    /// still.
    fn release(&self) {
        if matches!(self.read_again(), Ok(Some(record)) if record.nonce == self.own.nonce) {
            let _ = self.write(&self.own.release());
        }
    }

    /// One beat; `false` when the root is another's.
    fn beat(&self, beat: u64) -> Result<bool, CommitError> {
        match self.read_again()? {
            Some(record) if record.nonce != self.own.nonce => Ok(false),
            _ => self.write(&self.own.after(beat)).map(|()| true),
        }
    }
}

/// What one try for the root came to.
enum Attempt<F> {
    /// Whoever owned it is gone. The file is locked, where it can be.
    Free(F),
    Held(Option<Record>),
    /// The record has not stood still for long enough to tell.
    Unsure(Option<Record>),
    /// By this process.
    HeldHere,
}

impl<F> Attempt<F> {
    fn make<D: Disk<File = F> + Clone>(
        root: &Directory<D>,
        identity: &Identity,
        sight: &mut Sight,
        timing: Timing,
    ) -> Result<Self, CommitError> {
        let name = OsStr::new(layout::OWNER);
        let path = root.path.join(name);
        if root.look_at(name)?.is_some_and(|status| status.kind != EntryKind::File) {
            return Err(CommitError::NameTaken { path, needed_for: "the lock of the root's owner" });
        }
        let file = root.disk.open_or_create_file(&root.folder, name, &path)?;
        let lock = root.disk.lock_file_for_process(&file, &path)?;
        let bytes = record::read(&root.disk, &file, &path)?;
        let record = Record::parse(&bytes);
        let life = match &record {
            Some(record) if record.released => Life::Dead,
            Some(record) => identity.sees(&record.owner),
            None if bytes.is_empty() => Life::Dead,
            None => Life::Unknown,
        };
        // How long it must have stood still to be free.
        let still = match (lock, life) {
            (Lock::HeldByAnother, _) | (_, Life::Alive) => None,
            (_, Life::Dead) => Some(Duration::ZERO),
            (Lock::Taken, Life::Unknown) if root.disk.is_local(&root.folder) => match &record {
                Some(record) if identity.has_kernel_of(&record.owner) => Some(2 * timing.beat),
                _ => Some(Duration::ZERO),
            },
            (_, Life::Unknown) => Some(timing.stale),
        };
        let stood = sight.look(bytes);
        match still {
            Some(still) if stood >= still => return Ok(Attempt::Free(file)),
            Some(_) => return Ok(Attempt::Unsure(record)),
            None => {}
        }
        if record.as_ref().is_some_and(|record| record.owner == *identity && !record.released) {
            // Closing any descriptor of the file would cost this process its lock.
            std::mem::forget(file);
            return Ok(Attempt::HeldHere);
        }
        Ok(Attempt::Held(record))
    }
}

/// Writes the own record into a file that is free; who else did so where it could not be locked.
fn take<D: Disk + Clone>(
    root: &Directory<D>,
    file: D::File,
    owner: Identity,
    timing: Timing,
) -> Result<Result<Claim<D>, Option<Record>>, CommitError> {
    let name = OsStr::new(layout::OWNER);
    let path = root.path.join(name);
    let own = Record::new(owner, nonce(&path)?);
    let is_shared = !root.disk.is_local(&root.folder);
    let claim = Claim { disk: root.disk.clone(), file, path, own, is_shared, timing };
    // What failed may have been written all the same.
    let found = write_and_look(&claim).inspect_err(|_| claim.release())?;
    if found.as_ref().is_some_and(|record| record.nonce == claim.own.nonce) { Ok(Ok(claim)) } else { Ok(Err(found)) }
}

/// Whose record is there after the own was written.
fn write_and_look<D: Disk>(claim: &Claim<D>) -> Result<Option<Record>, CommitError> {
    claim.write(&claim.own)?;
    if claim.disk.file_status(&claim.file, &claim.path)?.size > record::LENGTH as u64 {
        // What was no record and longer than one: its end would spoil every record that is written over its beginning.
        claim.disk.truncate(&claim.file, record::LENGTH as u64, &claim.path)?;
    }
    if claim.disk.lock_file_for_process(&claim.file, &claim.path)? != Lock::Taken || claim.is_shared {
        // Two that could not lock each other out: the one whose record was written over gives way.
        std::thread::sleep(claim.timing.beat);
    }
    claim.read_again()
}

fn nonce(path: &Path) -> Result<String, CommitError> {
    let mut bytes = [0u8; 16];
    // So few bytes come whole or not at all.
    rustix::io::retry_on_intr(|| getrandom(&mut bytes, GetRandomFlags::empty()))
        .map_err(|errno: Errno| CommitError::io("draw a random number for", path, errno))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Since when a record has looked the same.
struct Sight {
    bytes: Option<Vec<u8>>,
    since: Instant,
    /// Since the first look: a heart beats.
    has_changed: bool,
}

impl Sight {
    fn new() -> Self {
        Self { bytes: None, since: Instant::now(), has_changed: false }
    }

    /// For how long these bytes have been there.
    fn look(&mut self, bytes: Vec<u8>) -> Duration {
        if self.bytes.as_ref() != Some(&bytes) {
            *self = Self { has_changed: self.bytes.is_some(), bytes: Some(bytes), since: Instant::now() };
        }
        self.since.elapsed()
    }
}

//! Taking the writer lock of a root, and checking that it is still held.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use super::heartbeat::Heartbeat;
use super::lock_file::{HeartbeatTiming, LockFile};
use super::lock_record::{self, LockRecord};
use super::process_identity::{ProcessIdentity, ProcessState};
use crate::disk::{Disk, EntryKind, LockOutcome};
use crate::error::CommitError;
use crate::root::contents::{OpenFolder, root_names};

/// Between two attempts to take a lock that another process holds.
const POLL: Duration = Duration::from_millis(50);

/// Called repeatedly during a wait; an error ends the wait.
pub type WaitCallback<'a> = &'a mut dyn FnMut() -> Result<(), CommitError>;

/// The ownership of a root. Dropping it releases the root.
pub(crate) struct WriterLock<D: Disk + Clone + 'static> {
    lock_file: Arc<LockFile<D>>,
    /// `None` while it is being dropped.
    heartbeat: Option<Heartbeat>,
    process: u32,
}

impl<D: Disk + Clone + 'static> WriterLock<D> {
    /// Takes the lock. Waits up to `wait` for its owner to die or release it, and until it is known whether there is
    /// one.
    pub(crate) fn acquire(
        root: &OpenFolder<D>,
        identity: ProcessIdentity,
        timing: HeartbeatTiming,
        wait: Duration,
        on_wait: WaitCallback<'_>,
    ) -> Result<Self, CommitError> {
        let until = Instant::now().checked_add(wait);
        let mut history = RecordHistory::new();
        loop {
            on_wait()?;
            let (found, is_decided) = match LockState::try_lock(root, &identity, &mut history, timing)? {
                LockState::Free(file) => match take_ownership(root, file, identity.clone(), timing)? {
                    Ok(lock_file) => {
                        let lock_file = Arc::new(lock_file);
                        let heartbeat =
                            Heartbeat::start(Arc::clone(&lock_file)).inspect_err(|_| lock_file.release())?;
                        return Ok(Self { lock_file, heartbeat: Some(heartbeat), process: std::process::id() });
                    }
                    Err(found) => (found, true),
                },
                LockState::Held(found) => (found, true),
                LockState::Undecided(found) => (found, history.has_changed),
                LockState::HeldByThisProcess => {
                    return Err(CommitError::RootOpenHere { path: root.path.clone(), process: identity.pid });
                }
            };
            if is_decided && until.is_some_and(|until| Instant::now() >= until) {
                let owner = found.map_or("an unknown process".to_owned(), |record| record.describe());
                return Err(CommitError::RootInUse { path: root.path.clone(), owner });
            }
            std::thread::sleep(POLL);
        }
    }

    /// The random text of this ownership.
    pub(crate) fn nonce(&self) -> &str {
        &self.lock_file.own.nonce
    }

    /// Checks that this process still owns the root, before a change.
    pub(crate) fn check(&self, root: &OpenFolder<D>) -> Result<(), CommitError> {
        let lost = |reason: String| Err(CommitError::RootLost { path: root.path.clone(), reason });
        match root.look_at(OsStr::new(root_names::WRITER_LOCK))? {
            Some(named)
                if named.is_same(&self.lock_file.disk.file_stat(&self.lock_file.file, &self.lock_file.path)?) => {}
            _ => return lost(format!("its lock {} was removed", root_names::WRITER_LOCK)),
        }
        match self.lock_file.read_again()? {
            Some(record) if record.nonce == self.lock_file.own.nonce => Ok(()),
            Some(record) => lost(format!("{} took it over", record.describe())),
            None => lost(format!("its lock {} was overwritten", root_names::WRITER_LOCK)),
        }
    }
}

impl<D: Disk + Clone + 'static> Drop for WriterLock<D> {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // This is a copy in a child made by `fork`.
            std::mem::forget(self.heartbeat.take());
            return;
        }
        // First the heartbeat: it must not beat after the release.
        self.heartbeat = None;
        self.lock_file.release();
    }
}

/// The random text in the writer lock of `root`; `None` where nobody ever owned it.
pub(crate) fn nonce_of<D: Disk + Clone>(root: &OpenFolder<D>) -> Result<Option<String>, CommitError> {
    let name = OsStr::new(root_names::WRITER_LOCK);
    if root.look_at(name)?.is_none_or(|stat| stat.kind != EntryKind::File) {
        return Ok(None);
    }
    let bytes = lock_record::read(&root.disk, &root.open_file(name)?, &root.path.join(name))?;
    Ok(LockRecord::parse(&bytes).map(|record| record.nonce))
}

/// The result of one attempt to take the lock.
enum LockState<F> {
    /// There is no owner. The file is locked, where locks exist.
    Free(F),
    Held(Option<LockRecord>),
    /// The record was not unchanged for long enough to tell.
    Undecided(Option<LockRecord>),
    /// This process holds it.
    HeldByThisProcess,
}

impl<F> LockState<F> {
    fn try_lock<D: Disk<File = F> + Clone>(
        root: &OpenFolder<D>,
        identity: &ProcessIdentity,
        history: &mut RecordHistory,
        timing: HeartbeatTiming,
    ) -> Result<Self, CommitError> {
        let name = OsStr::new(root_names::WRITER_LOCK);
        let path = root.path.join(name);
        if root.look_at(name)?.is_some_and(|stat| stat.kind != EntryKind::File) {
            return Err(CommitError::NameTaken { path, needed_for: "the writer lock of the root" });
        }
        let file = root.disk.open_or_create_file(&root.folder, name, &path)?;
        let lock = root.disk.lock_file_for_process(&file, &path)?;
        let bytes = lock_record::read(&root.disk, &file, &path)?;
        let record = LockRecord::parse(&bytes);
        let state = match &record {
            Some(record) if record.released => ProcessState::Dead,
            Some(record) => identity.state_of(&record.owner),
            None if bytes.is_empty() => ProcessState::Dead,
            None => ProcessState::Unknown,
        };
        // How long the record must be unchanged to count as free.
        let required = match (lock, state) {
            (LockOutcome::HeldByAnother, _) | (_, ProcessState::Alive) => None,
            (_, ProcessState::Dead) => Some(Duration::ZERO),
            (LockOutcome::Taken, ProcessState::Unknown) if root.disk.is_local(&root.folder) => match &record {
                Some(record) if identity.has_same_kernel_as(&record.owner) => Some(2 * timing.beat),
                _ => Some(Duration::ZERO),
            },
            (_, ProcessState::Unknown) => Some(timing.stale),
        };
        let unchanged = history.unchanged_for(bytes);
        match required {
            Some(required) if unchanged >= required => return Ok(LockState::Free(file)),
            Some(_) => return Ok(LockState::Undecided(record)),
            None => {}
        }
        if record.as_ref().is_some_and(|record| record.owner == *identity && !record.released) {
            // Closing any descriptor of the file would release this process's own lock.
            std::mem::forget(file);
            return Ok(LockState::HeldByThisProcess);
        }
        Ok(LockState::Held(record))
    }
}

/// Writes this process's record into a free file. Returns the record of another process that did so first, where
/// the file could not be locked.
fn take_ownership<D: Disk + Clone>(
    root: &OpenFolder<D>,
    file: D::File,
    owner: ProcessIdentity,
    timing: HeartbeatTiming,
) -> Result<Result<LockFile<D>, Option<LockRecord>>, CommitError> {
    let name = OsStr::new(root_names::WRITER_LOCK);
    let path = root.path.join(name);
    let own = LockRecord::new(owner, nonce(&path)?);
    let is_shared = !root.disk.is_local(&root.folder);
    let lock_file = LockFile { disk: root.disk.clone(), file, path, own, is_shared, timing };
    // A failed write may have reached the file.
    let found = write_and_read(&lock_file).inspect_err(|_| lock_file.release())?;
    if found.as_ref().is_some_and(|record| record.nonce == lock_file.own.nonce) {
        Ok(Ok(lock_file))
    } else {
        Ok(Err(found))
    }
}

/// The record in the file after this process wrote its own.
fn write_and_read<D: Disk>(lock_file: &LockFile<D>) -> Result<Option<LockRecord>, CommitError> {
    lock_file.write(&lock_file.own)?;
    if lock_file.disk.file_stat(&lock_file.file, &lock_file.path)?.size > lock_record::LENGTH as u64 {
        // The file held something longer than a record. Its end would make every later record unreadable.
        lock_file.disk.truncate(&lock_file.file, lock_record::LENGTH as u64, &lock_file.path)?;
    }
    if lock_file.disk.lock_file_for_process(&lock_file.file, &lock_file.path)? != LockOutcome::Taken
        || lock_file.is_shared
    {
        // Two processes may write at once: the one whose record was overwritten gives way.
        std::thread::sleep(lock_file.timing.beat);
    }
    lock_file.read_again()
}

fn nonce(path: &Path) -> Result<String, CommitError> {
    let mut bytes = [0u8; 16];
    // So few bytes arrive completely or not at all.
    rustix::io::retry_on_intr(|| getrandom(&mut bytes, GetRandomFlags::empty()))
        .map_err(|errno: Errno| CommitError::io("draw a random number for", path, errno))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// How long a record has been unchanged.
struct RecordHistory {
    bytes: Option<Vec<u8>>,
    since: Instant,
    /// It changed since the first read: there is a heartbeat.
    has_changed: bool,
}

impl RecordHistory {
    fn new() -> Self {
        Self { bytes: None, since: Instant::now(), has_changed: false }
    }

    /// How long these bytes have been there.
    fn unchanged_for(&mut self, bytes: Vec<u8>) -> Duration {
        if self.bytes.as_ref() != Some(&bytes) {
            *self = Self { has_changed: self.bytes.is_some(), bytes: Some(bytes), since: Instant::now() };
        }
        self.since.elapsed()
    }
}

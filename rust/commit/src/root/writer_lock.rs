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

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};

use super::names;
use crate::checksum::Checksum;
use crate::disk::{Disk, EntryKind, LockOutcome, write_all};
use crate::error::CommitError;
use crate::open_folder::OpenFolder;

// Identifies a process among all processes on all machines that may open one root.

/// A process: where it runs and since when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// The name of its machine, for messages.
    pub host: String,
    /// The kernel's random boot id; empty where it is unknown.
    pub boot_id: String,
    /// Its pid namespace: containers on one machine number their processes separately.
    pub pid_space: String,
    /// Its process id in that namespace.
    pub pid: u32,
    /// Its start time in kernel ticks: process ids are reused.
    pub started: u64,
    /// Identifies the program, since `exec` changes it while the pid stays; empty where it is unknown.
    #[serde(default)]
    pub program: String,
}

/// Whether another process lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessState {
    Alive,
    Dead,
    /// It may run where this process cannot see it.
    Unknown,
}

impl ProcessIdentity {
    /// This process.
    pub fn current() -> Self {
        let pid = std::process::id();
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let pid_space = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        Self {
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            boot_id: read("/proc/sys/kernel/random/boot_id"),
            pid_space: pid_space.to_string_lossy().into_owned(),
            pid,
            started: started(pid).unwrap_or(0),
            program: program(),
        }
    }

    /// Whether `other` runs, or ran, under the same kernel since the same boot.
    pub(crate) fn has_same_kernel_as(&self, other: &ProcessIdentity) -> bool {
        !self.boot_id.is_empty() && self.boot_id == other.boot_id
    }

    /// Whether the process `other` lives, as far as this process can see.
    pub(crate) fn state_of(&self, other: &ProcessIdentity) -> ProcessState {
        let is_visible = !self.boot_id.is_empty()
            && !self.pid_space.is_empty()
            && (&self.boot_id, &self.pid_space) == (&other.boot_id, &other.pid_space);
        if !is_visible {
            return ProcessState::Unknown;
        }
        if self.pid == other.pid && self.started == other.started {
            // The program before `exec` has ended, with its locks.
            return if self.program == other.program { ProcessState::Alive } else { ProcessState::Dead };
        }
        match started(other.pid) {
            Some(started) if started == other.started => ProcessState::Alive,
            _ => ProcessState::Dead,
        }
    }
}

/// A checksum of the program's load addresses, which the kernel randomizes for each `exec`.
fn program() -> String {
    std::fs::read("/proc/self/auxv").map_or_else(|_| String::new(), |vector| Checksum::of(&vector).to_string())
}

/// The start time of a process; `None` where it does not exist or is a zombie.
fn started(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    // The program's name is in parentheses and may contain some. After it comes the state, which is field 3.
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    if matches!(fields.first(), Some(&("Z" | "X" | "x"))) {
        return None;
    }
    fields.get(22 - 3)?.parse().ok()
}

#[cfg(test)]
mod process_identity_tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_is_alive_until_it_ends() {
        let me = ProcessIdentity::current();
        assert_ne!(me.started, 0);
        assert_eq!(me.state_of(&me), ProcessState::Alive);
        let mut other = Command::new("sleep").arg("60").spawn().unwrap();
        let mut seen = ProcessIdentity { pid: other.id(), ..me.clone() };
        seen.started = started(seen.pid).unwrap();
        assert_eq!(me.state_of(&seen), ProcessState::Alive);
        // An earlier process had the same pid.
        assert_eq!(me.state_of(&ProcessIdentity { started: seen.started - 1, ..seen.clone() }), ProcessState::Dead);
        other.kill().unwrap();
        // It is dead although its parent has not waited for it yet.
        while started(seen.pid).is_some() {
            std::thread::yield_now();
        }
        assert_eq!(me.state_of(&seen), ProcessState::Dead);
        other.wait().unwrap();
        assert_eq!(me.state_of(&seen), ProcessState::Dead);
    }

    #[test]
    fn processes_elsewhere_are_unknown() {
        let me = ProcessIdentity::current();
        for other in [
            ProcessIdentity { boot_id: "another".into(), ..me.clone() },
            ProcessIdentity { pid_space: "pid:[1]".into(), ..me.clone() },
        ] {
            assert_eq!(me.state_of(&other), ProcessState::Unknown);
        }
        let nowhere = ProcessIdentity { boot_id: String::new(), ..me };
        assert_eq!(nowhere.state_of(&nowhere.clone()), ProcessState::Unknown);
    }
}

// The contents of the lock file: the owner of the root and the number of its heartbeats.
//
// The record is overwritten in place, because replacing the file would replace the lock. A heartbeat changes only
// digits at fixed places, so that a concurrent reader always finds a valid record.

/// Bytes of a record. Longer than any: the longest name of a host has 64.
pub(crate) const LENGTH: usize = 512;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LockRecord {
    #[serde(flatten)]
    pub(crate) owner: ProcessIdentity,
    /// Distinguishes this ownership from all others, also of the same process.
    pub(crate) nonce: String,
    /// The number of heartbeats, always with the same number of digits.
    beat: String,
    /// The owner released the root.
    pub(crate) released: bool,
}

impl LockRecord {
    /// The first record of a new ownership.
    pub(crate) fn new(owner: ProcessIdentity, nonce: String) -> Self {
        Self { owner, nonce, beat: digits(0), released: false }
    }

    /// The same record after `beats` heartbeats.
    pub(crate) fn after(&self, beats: u64) -> Self {
        Self { beat: digits(beats), ..self.clone() }
    }

    /// The last record of an ownership.
    pub(crate) fn release(&self) -> Self {
        Self { released: true, ..self.clone() }
    }

    /// The bytes of the file.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).unwrap_or_default();
        bytes.resize(LENGTH - 1, b' ');
        bytes.push(b'\n');
        bytes
    }

    /// `None` for anything else, as after a crash during the first write.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice(bytes).ok()
    }

    /// The owner, for messages.
    pub(crate) fn describe(&self) -> String {
        format!("process {} on host {}", self.owner.pid, self.owner.host)
    }
}

/// Reads the bytes of a record, and one more if the file is longer: a foreign file may have any size.
pub(crate) fn read_record<D: Disk>(disk: &D, file: &D::File, path: &Path) -> Result<Vec<u8>, CommitError> {
    let mut bytes = vec![0; LENGTH + 1];
    let mut end = 0;
    while end < bytes.len() {
        match disk.read_at(file, end as u64, &mut bytes[end..], path)? {
            0 => break,
            count => end += count,
        }
    }
    bytes.truncate(end);
    Ok(bytes)
}

fn digits(beats: u64) -> String {
    format!("{beats:020}")
}

// The open lock file of a root's owner; shared by the owner and its heartbeat.

/// How the owners of one root keep time. All of them use the same values.
#[derive(Debug, Clone, Copy)]
pub struct HeartbeatTiming {
    /// Between two heartbeats.
    pub beat: Duration,
    /// A record that was unchanged for this long belongs to a dead owner.
    pub stale: Duration,
}

impl Default for HeartbeatTiming {
    fn default() -> Self {
        Self { beat: Duration::from_secs(3), stale: Duration::from_secs(20) }
    }
}

pub(crate) struct LockFile<D: Disk> {
    pub(crate) disk: D,
    pub(crate) file: D::File,
    pub(crate) path: PathBuf,
    pub(crate) own: LockRecord,
    /// Writes have to be sent to a server before other machines see them.
    pub(crate) is_shared: bool,
    pub(crate) timing: HeartbeatTiming,
}

impl<D: Disk> LockFile<D> {
    /// Reads the record as other machines see it. Network file systems ask their server again after a lock; taking a
    /// lock that is already held changes nothing.
    pub(crate) fn read_again(&self) -> Result<Option<LockRecord>, CommitError> {
        self.disk.lock_file_for_process(&self.file, &self.path)?;
        Ok(LockRecord::parse(&read_record(&self.disk, &self.file, &self.path)?))
    }

    pub(crate) fn write(&self, record: &LockRecord) -> Result<(), CommitError> {
        let bytes = record.to_bytes();
        write_all(&self.disk, &self.file, 0, &bytes, &self.path, |_| Ok(()))?;
        // The fsync sends it to the server. Nobody needs a heartbeat after a crash.
        if self.is_shared { self.disk.fsync(&self.file, &self.path) } else { Ok(()) }
    }

    /// Releases the lock if it is held. Best effort: the next owner sees that the process is gone, or that the
    /// heartbeat has stopped.
    pub(crate) fn release(&self) {
        if matches!(self.read_again(), Ok(Some(record)) if record.nonce == self.own.nonce) {
            let _ = self.write(&self.own.release());
        }
    }

    /// Writes heartbeat number `beat`; `false` when another process owns the root.
    pub(crate) fn beat(&self, beat: u64) -> Result<bool, CommitError> {
        match self.read_again()? {
            Some(record) if record.nonce != self.own.nonce => Ok(false),
            _ => self.write(&self.own.after(beat)).map(|()| true),
        }
    }
}

// The thread that writes the owner's heartbeat.
//
// Invariant: it ends with the ownership. A copy in a child made by `fork` has no thread and touches nothing.

pub(crate) struct Heartbeat {
    thread: Option<JoinHandle<()>>,
    /// Dropping it ends the thread.
    stop: Option<Sender<()>>,
}

impl Heartbeat {
    pub(crate) fn start<D: Disk>(lock_file: Arc<LockFile<D>>) -> Result<Self, CommitError> {
        let (stop, stopped) = mpsc::channel::<()>();
        let path = lock_file.path.clone();
        let run = move || {
            let mut beat = 0;
            while stopped.recv_timeout(lock_file.timing.beat) == Err(RecvTimeoutError::Timeout) {
                beat += 1;
                // A disk that fails now and then must not end the heartbeat. The owner itself finds out about another
                // owner before it changes anything.
                if matches!(lock_file.beat(beat), Ok(false)) {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("tundish-heartbeat".to_owned()).spawn(run).map_err(|error| {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::AGAIN);
            CommitError::io("start the heartbeat of", &path, errno)
        })?;
        Ok(Self { thread: Some(thread), stop: Some(stop) })
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

// Taking the writer lock of a root, and checking that it is still held.

/// Between two attempts to take a lock that another process holds.
const POLL: Duration = Duration::from_millis(50);

/// Called repeatedly during a wait; an error ends the wait.
pub type WaitCallback<'a> = &'a mut dyn FnMut() -> Result<(), CommitError>;

/// The ownership of a root. Dropping it releases the root.
pub(crate) struct WriterLock<D: Disk> {
    lock_file: Arc<LockFile<D>>,
    /// `None` while it is being dropped.
    heartbeat: Option<Heartbeat>,
    process: u32,
}

impl<D: Disk> WriterLock<D> {
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
        match root.look_at(OsStr::new(names::WRITER_LOCK))? {
            Some(named)
                if named.is_same(&self.lock_file.disk.file_stat(&self.lock_file.file, &self.lock_file.path)?) => {}
            _ => return lost(format!("its lock {} was removed", names::WRITER_LOCK)),
        }
        match self.lock_file.read_again()? {
            Some(record) if record.nonce == self.lock_file.own.nonce => Ok(()),
            Some(record) => lost(format!("{} took it over", record.describe())),
            None => lost(format!("its lock {} was overwritten", names::WRITER_LOCK)),
        }
    }
}

impl<D: Disk> Drop for WriterLock<D> {
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
pub(crate) fn nonce_of<D: Disk>(root: &OpenFolder<D>) -> Result<Option<String>, CommitError> {
    let name = OsStr::new(names::WRITER_LOCK);
    if root.look_at(name)?.is_none_or(|stat| stat.kind != EntryKind::File) {
        return Ok(None);
    }
    let bytes = read_record(&root.disk, &root.open_file(name)?, &root.path.join(name))?;
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
    fn try_lock<D: Disk<File = F>>(
        root: &OpenFolder<D>,
        identity: &ProcessIdentity,
        history: &mut RecordHistory,
        timing: HeartbeatTiming,
    ) -> Result<Self, CommitError> {
        let name = OsStr::new(names::WRITER_LOCK);
        let path = root.path.join(name);
        if root.look_at(name)?.is_some_and(|stat| stat.kind != EntryKind::File) {
            return Err(CommitError::NameTaken { path, needed_for: "the writer lock of the root" });
        }
        let file = root.disk.open_or_create_file(&root.folder, name, &path)?;
        let lock = root.disk.lock_file_for_process(&file, &path)?;
        let bytes = read_record(&root.disk, &file, &path)?;
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
fn take_ownership<D: Disk>(
    root: &OpenFolder<D>,
    file: D::File,
    owner: ProcessIdentity,
    timing: HeartbeatTiming,
) -> Result<Result<LockFile<D>, Option<LockRecord>>, CommitError> {
    let name = OsStr::new(names::WRITER_LOCK);
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
    if lock_file.disk.file_stat(&lock_file.file, &lock_file.path)?.size > LENGTH as u64 {
        // The file held something longer than a record. Its end would make every later record unreadable.
        lock_file.disk.truncate(&lock_file.file, LENGTH as u64, &lock_file.path)?;
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
